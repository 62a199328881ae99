"""Latents of images in squares of two by two, one token each, as FLUX, Krea 2 and Qwen-Image take them.

Shapes: B batch, C latent channels, H and W latent size, S image tokens (H W / 4), P packed channels (4 C).
"""

from functools import partial

import torch

from dit_lora.numerics.streams import DrawFunctions, normal

PACK_SIZE = 2
"""Side of the square of latents that becomes one token."""


def compute_token_grid(latents: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the image tokens of latents (..., H, W)."""
    height, width = latents.shape[-2:]
    return height // PACK_SIZE, width // PACK_SIZE


def describe_packed_noise(latents: torch.Tensor) -> DrawFunctions:
    """The noise (S, P) of each sample of latents (B, C, ..., H, W) of one frame, for `Denoiser.draw_functions`."""
    rows, columns = compute_token_grid(latents)
    return {"noise": partial(normal, (rows * columns, PACK_SIZE**2 * latents.shape[1]))}
