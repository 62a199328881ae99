"""Latents with a mean and a log variance: what an autoencoder makes of a video, and draws from it."""

from collections.abc import Sequence
from typing import Any

import torch

from dit_lora.families.base import Tensors
from dit_lora.numerics.streams import moved, normal


def encode_video(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Return the posterior of uint8 (frames, 3, height, width), as the cache keeps it: two tensors (C, F, H, W)."""
    video = (pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
    posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def drawn(
    mean: torch.Tensor, logvar: torch.Tensor, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Return latents (B, ...) in fp32, each row's noise from its own generator."""
    noise = moved(normal(mean.shape[1:], generators), mean.device)
    return mean.float() + torch.exp(0.5 * logvar.float()) * noise
