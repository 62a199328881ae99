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
    """Text only. Tasks that give the network a frame, a clip or a reference override what they need.

    `batch` holds cached tensors, and `random_tensors` those of a training step, which `draw_functions` names.
    """

    supported_options: ClassVar[tuple[str, ...]] = ()
    """Options that this conditioning supports, of those that `refuse_options` rejects by default."""

    def with_recipe(self, recipe: Recipe) -> Self:
        """The conditioning with the recipe's settings."""
        return self

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors of a training step beyond those of the objective."""
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
        """Latents as the transformer takes them, with the given ones in their place."""
        return latents

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timesteps for the transformer: one per sample (B,), or one per token (B, S)."""
        # All tokens of a sample have its noise level.
        return timesteps

    def append_channels(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Noisy latents with further channels, as the transformer takes them."""
        return latents

    def append_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        """The transformer's arguments with further tokens after those of the sample."""
        return transformer_kwargs
