"""Base of image-to-video families whose image replaces the first latent frame.

The image's tokens are clean and have timestep 0, which tells the network that they are not noisy.
"""

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
    """A checkpoint that also works without an image: a share of the samples trains as text-to-video."""

    image_dropout: float = 0.0
    takes: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.takes, "data.image_dropout")

    def for_recipe(self, recipe: Recipe) -> Self:
        """Apply `data.image_dropout`, the share of samples that train as text-to-video."""
        # A share of samples without an image keeps the model able to work from text only.
        return replace(super().for_recipe(recipe), image_dropout=recipe.data.image_dropout)

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        # One uniform number per sample decides whether it keeps its image; the draw is true where it does.
        image_draws: Draws = {
            "image_dropout": lambda rows: (
                torch.cat([torch.rand(1, generator=row) for row in rows]) >= self.image_dropout
            )
        }
        return {**super().draws(batch), **image_draws}

    def has_picture(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """True for each sample that keeps its image, bool (B,).

        All are true if `given`, the random tensors of the step, contains no image dropout.
        """
        latents = batch["latent_mean"]
        return given.get("image_dropout", latents.new_ones(len(latents), dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class FirstTokensCheckpoint(FirstFrameCheckpoint):
    """A checkpoint of packed latents (B, S, C), one token per latent, where the first frame's tokens hold the image.

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
        """The image's normalised latents, repeated for every frame (B, S, C). `given` holds the random tensors."""

    def for_recipe(self, recipe: Recipe) -> Self:
        """Raise `DitLoraError` if validation prompts have no images."""
        checkpoint = super().for_recipe(recipe)
        # Validation samples start from images too, one for each prompt.
        problems = wrong_pictures(recipe.validation, self.pictures)
        if problems:
            raise DitLoraError(listed(f"{self.path.name} is image-to-video", problems))
        return checkpoint

    def known(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Conditioning mask (B, S, 1): 1 at the tokens of the first frame of samples that keep their image, else 0."""
        frames, height, width = batch["latent_mean"].shape[2:]
        # (B,) and (S,) combine to (B, S, 1).
        has_picture = self.has_picture(batch, given)
        is_first_frame = (
            torch.arange(frames * height * width, device=has_picture.device) < height * width
        )
        return (has_picture.view(-1, 1, 1) & is_first_frame.view(1, -1, 1)).float()

    def token_timesteps(
        self,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Timestep of every token (B, S): 0 at the image's tokens."""
        # (B, 1) * (B, S): the mask is 1 at the image's tokens, which sets their timestep to 0.
        return timesteps[:, None] * (1 - self.known(batch, given).squeeze(-1))

    def with_picture(
        self,
        tokens: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Tokens (B, S, C) with the first frame replaced by the image's tokens, for samples that keep their image."""
        # (B, S, C), and a mask (B, S, 1) that broadcasts over the channels.
        picture = self.picture_tokens(batch, given)
        return torch.where(self.known(batch, given) > 0, picture, tokens)
