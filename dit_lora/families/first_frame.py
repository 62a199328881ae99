"""Base of image-to-video families whose picture is the first latent frame itself, clean and told by its tokens' timestep, 0."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.numerics.streams import Draws


@dataclass(frozen=True, kw_only=True)
class FirstFrameCheckpoint(FlowCheckpoint):
    """A checkpoint that can do without the picture, of which a share of the samples is trained so."""

    image_dropout: float = 0.0
    takes: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.takes, "data.image_dropout")

    def for_recipe(self, recipe: Recipe) -> Self:
        """Take `data.image_dropout`, the share of samples that are trained as text-to-video."""
        return replace(super().for_recipe(recipe), image_dropout=recipe.data.image_dropout)

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        own: Draws = {
            "image_dropout": lambda rows: (
                torch.cat([torch.rand(1, generator=row) for row in rows]) >= self.image_dropout
            )
        }
        return {**super().draws(batch), **own}

    def has_picture(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return true for each sample whose picture is given, (B,); for all where nothing is drawn."""
        latents = batch["latent_mean"]
        return given.get("image_dropout", latents.new_ones(len(latents), dtype=torch.bool))
