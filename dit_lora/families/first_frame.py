"""Conditioning of image-to-video tasks whose image replaces the first latent frame.

The image's tokens are clean and have timestep 0, which tells the network that they are not noisy.

Shapes: B batch, C channels, F latent frames, H and W latent size, S tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.families.base import TensorMap
from dit_lora.families.conditioning import Conditioning
from dit_lora.numerics.streams import DrawFunctions, draw_uniform


@dataclass(frozen=True, kw_only=True)
class FirstFrame(Conditioning):
    """Conditioning with an image that is given clean in place of the first latent frame.

    Some samples train without theirs, from text only.
    """

    image_latents: Callable[[TensorMap, TensorMap], torch.Tensor]
    """The image's latents by batch and random tensors, in the layout of the video's, which they are broadcast to."""
    image_dropout: float = 0.0
    """Share of samples that train without their image (`data.image_dropout`)."""
    supported_options: ClassVar[tuple[str, ...]] = ("data.image_dropout",)

    def with_recipe(self, recipe: Recipe) -> Self:
        # A share of samples without an image keeps the model able to work from text only.
        return replace(self, image_dropout=recipe.data.image_dropout)

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        # One uniform number per sample decides whether it keeps its image; the draw is true where it does.
        return {"image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout}

    def has_picture(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Bool (B,), true for each sample that keeps its image.

        All are true if `random_tensors`, the random tensors of the step, contains no image dropout.

        All are true if `random_tensors`, the random tensors of the step, contains no image dropout.
        """
        latents = batch["latent_mean"]
        return random_tensors.get("image_dropout", latents.new_ones(len(latents), dtype=torch.bool))

    def mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, 1, F, 1, 1): 1 at the first frame of samples that keep their image, else 0."""
        frames = batch["latent_mean"].shape[2]
        is_first_frame = torch.arange(frames, device=batch["latent_mean"].device) == 0
        has_picture = self.has_picture(batch, random_tensors)
        # (B, 1, 1, 1, 1) and (1, 1, F, 1, 1) combine to (B, 1, F, 1, 1).
        return (has_picture.view(-1, 1, 1, 1, 1) & is_first_frame.view(1, 1, -1, 1, 1)).float()

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timestep of every latent frame (B, F), or of every token (B, S). It is 0 where the image is given."""
        # (B, 1) * (B, F): the mask is 1 at the image, which sets its timestep to 0.
        return timesteps[:, None] * (1 - self.mask(batch, random_tensors).flatten(1))

    def replace_given_latents(
        self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap
    ) -> torch.Tensor:
        """Latents with the first frame replaced by the image's, for samples that keep their image."""
        mask = self.mask(batch, random_tensors)
        return torch.where(mask > 0, self.image_latents(batch, random_tensors), latents)


@dataclass(frozen=True, kw_only=True)
class FirstTokens(FirstFrame):
    """First-frame conditioning of packed latents (B, S, C), one token per latent."""

    def mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, S, 1): 1 at the tokens of the first frame of samples that keep their image, else 0."""
        frames, height, width = batch["latent_mean"].shape[2:]
        # (B,) and (S,) combine to (B, S, 1).
        has_picture = self.has_picture(batch, random_tensors)
        is_first_frame = torch.arange(frames * height * width, device=has_picture.device) < height * width
        return (has_picture.view(-1, 1, 1) & is_first_frame.view(1, -1, 1)).float()
