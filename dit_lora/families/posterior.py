"""Posteriors of autoencoders (mean and log variance): encoding, sampling and normalising latents."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dit_lora.families.base import Tensors, VideoEncoder
from dit_lora.numerics.streams import move_to_device


def encode_video(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Posterior of a clip, uint8 (frames, 3, height, width), as it is cached: mean and logvar, each (C, F, H, W)."""
    video = (pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
    # (F, 3, H, W) -> (1, 3, F, H, W)
    posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def encode_picture(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Posterior of an image, uint8 (1, 3, height, width), as it is cached: mean and logvar, each (C, H, W)."""
    # (1, 3, height, width), from -1 to 1.
    posterior = vae.encode((pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def make_pixel_encoder(vae: Any, encode: Callable[[Any, torch.Tensor], Tensors]) -> VideoEncoder:
    """A `VideoEncoder` of samples whose tensors are `encode(vae, pixels)`, without a separate first image."""

    @torch.no_grad()
    def encode_pixels(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        return encode(vae, pixels)

    return encode_pixels


def shift_and_scale_latents(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """Shift and scale latents: the inverse of what pipelines with Stable Diffusion 3's VAE do before decoding."""
    shifted = latents - vae_config["shift_factor"]
    return shifted * vae_config["scaling_factor"]


def normalize_latents(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """Normalise latents (B, C, F, H, W) per channel: the inverse of what pipelines with Wan's autoencoder do."""
    # Each is (C,), as (1, C, 1, 1, 1) to broadcast over batch, frames, height and width.
    mean, deviation = (
        move_to_device(torch.tensor(vae_config[name]), latents.device).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    return (latents - mean) / deviation


def sample_posterior(mean: torch.Tensor, logvar: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample latents (B, ...) from a posterior in fp32, using standard normal `noise` of the same shape."""
    # logvar is the logarithm of the variance, so half of it is that of the standard deviation.
    return mean.float() + torch.exp(0.5 * logvar.float()) * noise
