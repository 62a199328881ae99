"""Base of image-to-video families whose picture is the first latent frame itself, clean and told by its tokens' timestep, 0."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.pictures import wrong_pictures
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


@dataclass(frozen=True, kw_only=True)
class FirstTokensCheckpoint(FirstFrameCheckpoint):
    """A checkpoint of packed latents (B, S, C), a token a latent, of which the first frame's are the picture's.

    Shapes: B batch, C channels, S tokens of F latent frames, H and W latent size.
    """

    takes: ClassVar[tuple[str, ...]] = (
        *FirstFrameCheckpoint.takes,
        "data.image_column",
        "validation.images",
    )

    @property
    def pictures(self) -> tuple[str, ...]:
        return ("image",)

    @abstractmethod
    def picture_tokens(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the picture in the place of every frame (B, S, C), normalised; `given` are the draws, if any."""

    def for_recipe(self, recipe: Recipe) -> Self:
        """Refuse prompts without their pictures."""
        fitting = super().for_recipe(recipe)
        wrong = wrong_pictures(recipe.validation, self.pictures)
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} is image-to-video", wrong))
        return fitting

    def known(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return (B, S, 1): 1 at the tokens of the first frame of samples whose picture is given."""
        frames, height, width = batch["latent_mean"].shape[2:]
        kept = self.has_picture(batch, given)
        first = torch.arange(frames * height * width, device=kept.device) < height * width
        return (kept.view(-1, 1, 1) & first.view(1, -1, 1)).float()

    def token_timesteps(
        self,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return a timestep for every token (B, S): 0 where the picture is."""
        return timesteps[:, None] * (1 - self.known(batch, given).squeeze(-1))

    def with_picture(
        self,
        tokens: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return tokens (B, S, C) with the picture's in front where it is given."""
        picture = self.picture_tokens(batch, given)
        return torch.where(self.known(batch, given) > 0, picture, tokens)
