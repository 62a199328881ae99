"""Latents with a mean and a log variance: what an autoencoder makes of a video, and draws from it."""

from collections.abc import Mapping
from typing import Any

import torch

from dit_lora.families.base import Tensors
from dit_lora.numerics.streams import moved


def encode_video(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Return the posterior of uint8 (frames, 3, height, width), as the cache keeps it: two tensors (C, F, H, W)."""
    video = (pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
    posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def encode_picture(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Return the posterior of one uint8 image (1, 3, height, width), as the cache keeps it: two tensors (C, H, W)."""
    posterior = vae.encode((pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def rescaled(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """Return latents shifted and scaled, the inverse of what pipelines with Stable Diffusion 3's autoencoder decode."""
    shifted = latents - vae_config["shift_factor"]
    return shifted * vae_config["scaling_factor"]


def normalised(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """Return latents (B, C, F, H, W) normalised per channel, the inverse of what pipelines with Wan's autoencoder decode."""
    mean, deviation = (
        moved(torch.tensor(vae_config[name]), latents.device).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    return (latents - mean) / deviation


def drawn(mean: torch.Tensor, logvar: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return latents (B, ...) in fp32, by standard normal noise of their shape."""
    return mean.float() + torch.exp(0.5 * logvar.float()) * noise
