"""Latents of images in squares of two by two, one token each, as FLUX, Krea 2 and Qwen-Image take them.

Shapes: B batch, C latent channels, H and W latent size, S image tokens (H W / 4), P packed channels (4 C).
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from dit_lora.families.references import get_reference_latents
from dit_lora.numerics.streams import DrawFunctions, normal

PACK_SIZE = 2
"""Side of the square of latents that becomes one token."""


def compute_token_grid(latents: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the token grid of image latents (..., H, W)."""
    height, width = latents.shape[-2:]
    return height // PACK_SIZE, width // PACK_SIZE


def describe_packed_noise(latents: torch.Tensor) -> DrawFunctions:
    """The noise (S, P) of each sample of latents (B, C, ..., H, W) of one frame, for `Denoiser.draw_functions`."""
    # Latents of a video VAE have a frame dimension of size 1 between channels and height.
    rows, columns = compute_token_grid(latents)
    return {"noise": partial(normal, (rows * columns, PACK_SIZE**2 * latents.shape[1]))}


def append_references(
    hidden_states: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    pack_latents: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Tokens (B, S, P), followed by those of each of the batch's references, clean."""
    # Packed in fp32 and rounded afterwards, like the noisy latents.
    references = [pack_latents(latents.float()).to(hidden_states.dtype) for latents in get_reference_latents(batch)]
    return torch.cat([hidden_states, *references], dim=1)
