"""Loss masks: from the pixels of a mask image to loss weights of latents.

Shapes: B batch, H and W latent size.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

LOSS_MASK = "loss_mask"
"""Key of the mask in a batch, fp32 (B, H, W) from 0 to 1. Only data with masks has it."""


def downscale_mask(mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Downscale a pixel mask (height, width) to latent size by averaging, fp32 (H, W), on the CPU."""
    # (height, width) -> (1, 1, height, width) for interpolate; `area` averages the pixels of each latent.
    size = latents.shape[-2:]
    return F.interpolate(mask[None, None].float(), size=size, mode="area")[0, 0]


def compute_loss_weights(
    batch: Mapping[str, torch.Tensor], min_weight: float, latents: torch.Tensor
) -> torch.Tensor | None:
    """Loss weights (B, ..., H, W), broadcastable to `latents`: `min_weight` where the mask is 0, 1 where it is 1.

    None for data without masks.
    """
    mask = batch.get(LOSS_MASK)
    if mask is None:
        return None
    # Linear in the mask: `min_weight` at 0 (black) and 1 at 1 (white).
    weights = min_weight + (1 - min_weight) * mask
    # (B, H, W) -> (B, 1, ..., 1, H, W), with as many dimensions as `latents`.
    return weights.view(len(mask), *[1] * (latents.ndim - 3), *mask.shape[-2:])


def compute_packed_loss_weights(
    batch: Mapping[str, torch.Tensor], min_weight: float, pack_latents: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """Loss weights of a batch's masked latents, packed into tokens like the latents. None for data without masks."""
    latents = batch["latent_mean"]
    weights = compute_loss_weights(batch, min_weight, latents)
    # Expanded to all channels and frames first, so that every packed value has its weight.
    return None if weights is None else pack_latents(weights.expand_as(latents))
