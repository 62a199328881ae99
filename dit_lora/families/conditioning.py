"""Conditioning of a denoiser by more than text: what differs between the tasks of a family.

Shapes: B batch, C channels, F latent frames, H and W latent size, S tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.numerics.streams import DrawFunctions, draw_uniform

TensorMap = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Base class for conditioning by more than the text, and itself conditioning by text only.

    Tasks that give the network a frame, a clip or a reference override the methods they need. `batch` holds cached
    tensors, and `random_tensors` those of a training step, which `get_random_input_samplers` names.
    """

    supported_options: ClassVar[tuple[str, ...]] = ()
    """Options that this conditioning supports, of those that `refuse_options` rejects by default."""

    def copy_with_recipe_settings(self, recipe: Recipe) -> Self:
        """Copy of the conditioning with the recipe's settings."""
        return self

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors (by name) that the conditioning needs in a training step.

        Those of the objective are not included.
        """
        # Names are streams: a new name does not change the numbers of the others.
        return {}

    def compute_conditioning_mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor | None:
        """Conditioning mask: 1 where latents are given clean, 0 where they are denoised. None without conditioning.

        It broadcasts to the latents. Clean latents get no noise and no loss.
        """
        # Everything is denoised.
        return None

    def insert_clean_latents(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Latents for the transformer, in which those that are given clean replace the noisy ones."""
        return latents

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timesteps for the transformer: one per sample (B,), or one per token (B, S)."""
        # All tokens of a sample have its noise level.
        return timesteps

    def append_channels(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Noisy latents for the transformer, with the conditioning appended as further channels."""
        return latents

    def append_conditioning_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        """The transformer's arguments, with conditioning tokens appended after those of the sample."""
        return transformer_kwargs


@dataclass(frozen=True, kw_only=True)
class FirstFrameConditioning(Conditioning):
    """Conditioning with an image that is given clean in place of the first latent frame.

    The image's tokens have timestep 0, which tells the network that they are not noisy. Some samples train without
    their image, from text only.
    """

    image_latents: Callable[[TensorMap, TensorMap], torch.Tensor]
    """The image's latents by batch and random tensors, in the layout of the video's, which they are broadcast to."""
    image_dropout: float = 0.0
    """Share of samples that train without their image (`data.image_dropout`)."""
    supported_options: ClassVar[tuple[str, ...]] = ("data.image_dropout",)

    def copy_with_recipe_settings(self, recipe: Recipe) -> Self:
        # A share of samples without an image keeps the model able to work from text only.
        return replace(self, image_dropout=recipe.data.image_dropout)

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        # One uniform number per sample decides whether it keeps its image; the draw is true where it does.
        return {"image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout}

    def has_conditioning_image(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Bool (B,), true for each sample that keeps its image.

        All are true if `random_tensors`, the random tensors of the step, contains no image dropout.
        """
        latents = batch["latent_mean"]
        return random_tensors.get("image_dropout", latents.new_ones(len(latents), dtype=torch.bool))

    def compute_conditioning_mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, 1, F, 1, 1): 1 at the first frame of samples that keep their image, else 0."""
        frames = batch["latent_mean"].shape[2]
        is_first_frame = torch.arange(frames, device=batch["latent_mean"].device) == 0
        has_conditioning_image = self.has_conditioning_image(batch, random_tensors)
        # (B, 1, 1, 1, 1) and (1, 1, F, 1, 1) combine to (B, 1, F, 1, 1).
        return (has_conditioning_image.view(-1, 1, 1, 1, 1) & is_first_frame.view(1, 1, -1, 1, 1)).float()

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timestep of every latent frame (B, F), or of every token (B, S). It is 0 where the image is given."""
        # (B, 1) * (B, F): the mask is 1 at the image, which sets its timestep to 0.
        return timesteps[:, None] * (1 - self.compute_conditioning_mask(batch, random_tensors).flatten(1))

    def insert_clean_latents(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Latents with the first frame replaced by the image's, for samples that keep their image."""
        mask = self.compute_conditioning_mask(batch, random_tensors)
        return torch.where(mask > 0, self.image_latents(batch, random_tensors), latents)


@dataclass(frozen=True, kw_only=True)
class FirstFrameTokenConditioning(FirstFrameConditioning):
    """First-frame conditioning of packed latents (B, S, C), one token per latent."""

    def compute_conditioning_mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, S, 1): 1 at the tokens of the first frame of samples that keep their image, else 0."""
        frames, height, width = batch["latent_mean"].shape[2:]
        # (B,) and (S,) combine to (B, S, 1).
        has_conditioning_image = self.has_conditioning_image(batch, random_tensors)
        is_first_frame = torch.arange(frames * height * width, device=has_conditioning_image.device) < height * width
        return (has_conditioning_image.view(-1, 1, 1) & is_first_frame.view(1, -1, 1)).float()
