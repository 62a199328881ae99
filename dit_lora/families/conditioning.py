"""Conditioning of a denoiser by more than text: what differs between the tasks of a family.

Shapes: B batch, S tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.numerics.streams import DrawFunctions

TensorMap = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Base class for conditioning by more than the text, and itself conditioning by text only.

    Tasks that give the network a frame, a clip or a reference override the methods they need. `batch` holds cached
    tensors, and `random_tensors` those of a training step, which `draw_functions` names.
    """

    supported_options: ClassVar[tuple[str, ...]] = ()
    """Options that this conditioning supports, of those that `refuse_options` rejects by default."""

    def with_recipe(self, recipe: Recipe) -> Self:
        """Copy of the conditioning with the recipe's settings."""
        return self

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors (by name) that the conditioning needs in a training step.

        Those of the objective are not included.
        """
        # Names are streams: a new name does not change the numbers of the others.
        return {}

    def mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor | None:
        """Conditioning mask: 1 where latents are given clean, 0 where they are denoised. None without conditioning.

        It broadcasts to the latents. Clean latents get no noise and no loss.
        """
        # Everything is denoised.
        return None

    def replace_given_latents(
        self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap
    ) -> torch.Tensor:
        """Latents for the transformer, in which those that are given clean replace the noisy ones."""
        return latents

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timesteps for the transformer: one per sample (B,), or one per token (B, S)."""
        # All tokens of a sample have its noise level.
        return timesteps

    def append_channels(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Noisy latents for the transformer, with the conditioning appended as further channels."""
        return latents

    def append_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        """The transformer's arguments, with conditioning tokens appended after those of the sample."""
        return transformer_kwargs
