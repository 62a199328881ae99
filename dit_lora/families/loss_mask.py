"""Masks of the loss: from a picture's pixels to weights of its latents.

Shapes: B batch, H and W latent size.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

LOSS_MASK = "loss_mask"
"""Name of a batch's tensor, fp32 (B, H, W) from 0 to 1; only data with masks has it."""


def mask_of_latents(mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Return a mask of pixels, (height, width), as the mean over each latent's pixels, fp32 (H, W), on the CPU."""
    size = latents.shape[-2:]
    return F.interpolate(mask[None, None].float(), size=size, mode="area")[0, 0]


def loss_weights(
    batch: Mapping[str, torch.Tensor], floor: float, like: torch.Tensor
) -> torch.Tensor | None:
    """Return weights of latents (B, ..., H, W), broadcast to `like`: `floor` where a mask is 0, 1 where it is 1.

    None for data without masks.
    """
    mask = batch.get(LOSS_MASK)
    if mask is None:
        return None
    weights = floor + (1 - floor) * mask
    return weights.view(len(mask), *[1] * (like.ndim - 3), *mask.shape[-2:])
