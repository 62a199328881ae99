"""Small random autoencoders whose posteriors are as narrow as those of trained ones."""

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage


def build_qwen_image_vae() -> AutoencoderKLQwenImage:
    """Build Qwen-Image's VAE in small.

    Its latent means and deviations are the published ones, the class's defaults.
    """
    return scale_posterior(AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1), 24)


def scale_posterior(vae: Any, width: float) -> Any:
    """Make a tiny VAE's posterior narrow and its mean as wide as `latents_std`, as in a trained VAE."""
    # The first half of the output channels is the mean, the second the log variance.
    head, latents = vae.quant_conv, vae.config.z_dim
    with torch.no_grad():
        head.weight[:latents] *= width
        head.weight[latents:] *= 0.1
        head.bias[latents:] = -6.0
    return vae.eval()
