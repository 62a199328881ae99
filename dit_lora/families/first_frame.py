"""Base of image-to-video families whose image replaces the first latent frame.

The image's tokens are clean and have timestep 0, which tells the network that they are not noisy.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import TensorMap
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.pictures import image_errors
from dit_lora.numerics.streams import DrawFunctions, draw_uniform


@dataclass(frozen=True, kw_only=True)
class FirstFrameCheckpoint(FlowCheckpoint):
    """A checkpoint that also works without an image: a share of the samples trains as text-to-video."""

    image_dropout: float = 0.0
    supported_options: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.supported_options, "data.image_dropout")

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Apply `data.image_dropout`, the share of samples that train as text-to-video."""
        # A share of samples without an image keeps the model able to work from text only.
        return replace(super().apply_recipe(recipe), image_dropout=recipe.data.image_dropout)

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        # One uniform number per sample decides whether it keeps its image; the draw is true where it does.
        image_draws: DrawFunctions = {"image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout}
        return {**super().draw_functions(batch), **image_draws}

    def has_picture(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """True for each sample that keeps its image, bool (B,).

        All are true if `random_tensors`, the random tensors of the step, contains no image dropout.
        """
        latents = batch["latent_mean"]
        return random_tensors.get("image_dropout", latents.new_ones(len(latents), dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class FirstTokensCheckpoint(FirstFrameCheckpoint):
    """A checkpoint of packed latents (B, S, C), one token per latent, where the first frame's tokens hold the image.

    Shapes: B batch, C channels, S tokens of F latent frames, H and W latent size.
    """

    supported_options: ClassVar[tuple[str, ...]] = (
        *FirstFrameCheckpoint.supported_options,
        "data.image_column",
        "validation.images",
    )

    @property
    def image_arguments(self) -> tuple[str, ...]:
        return ("image",)

    @abstractmethod
    def picture_tokens(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """The image's normalised latents, repeated for every frame (B, S, C)."""

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Raise `DitLoraError` if validation prompts have no images."""
        checkpoint = super().apply_recipe(recipe)
        # Validation samples start from images too, one for each prompt.
        problems = image_errors(recipe.validation, self.image_arguments)
        if problems:
            raise DitLoraError(format_list(f"{self.path.name} is image-to-video", problems))
        return checkpoint

    def _conditioning_mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, S, 1): 1 at the tokens of the first frame of samples that keep their image, else 0."""
        frames, height, width = batch["latent_mean"].shape[2:]
        # (B,) and (S,) combine to (B, S, 1).
        has_picture = self.has_picture(batch, random_tensors)
        is_first_frame = torch.arange(frames * height * width, device=has_picture.device) < height * width
        return (has_picture.view(-1, 1, 1) & is_first_frame.view(1, -1, 1)).float()

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timestep of every token (B, S): 0 at the image's tokens."""
        # (B, 1) * (B, S): the mask is 1 at the image's tokens, which sets their timestep to 0.
        return timesteps[:, None] * (1 - self._conditioning_mask(batch, random_tensors).squeeze(-1))

    def replace_first_frame(self, tokens: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Tokens (B, S, C) with the first frame replaced by the image's tokens, for samples that keep their image."""
        # (B, S, C), and a mask (B, S, 1) that broadcasts over the channels.
        picture = self.picture_tokens(batch, random_tensors)
        return torch.where(self._conditioning_mask(batch, random_tensors) > 0, picture, tokens)


@dataclass(frozen=True, kw_only=True)
class FirstFrame(Conditioning):
    """An image in place of the first latent frame, given clean. Some samples train without theirs, from text only."""

    image_latents: Callable[[TensorMap, TensorMap], torch.Tensor]
    """The image's latents by batch and random tensors, in the layout of the video's, which they are broadcast to."""
    image_dropout: float = 0.0
    """Share of samples that train without their image (`data.image_dropout`)."""
    supported_options: ClassVar[tuple[str, ...]] = ("data.image_dropout",)

    def with_recipe(self, recipe: Recipe) -> Self:
        return replace(self, image_dropout=recipe.data.image_dropout)

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        # One uniform number per sample decides whether it keeps its image; the draw is true where it does.
        return {"image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout}

    def has_picture(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """True for each sample that keeps its image, bool (B,).

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
        """Timestep of every latent frame (B, F), or of every token (B, S): 0 at the image's."""
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
    """`FirstFrame` of packed latents (B, S, C), one token per latent."""

    def mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, S, 1): 1 at the tokens of the first frame of samples that keep their image, else 0."""
        frames, height, width = batch["latent_mean"].shape[2:]
        # (B,) and (S,) combine to (B, S, 1).
        has_picture = self.has_picture(batch, random_tensors)
        is_first_frame = torch.arange(frames * height * width, device=has_picture.device) < height * width
        return (has_picture.view(-1, 1, 1) & is_first_frame.view(1, -1, 1)).float()
