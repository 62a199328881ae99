"""Small random autoencoders whose posteriors are as narrow as those of trained ones."""

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage

# Of the image VAEs. Published: 4 to 32.
LATENT_CHANNELS = 4


def build_image_vae(
    scaling_factor: float = 0.3611, shift_factor: float | None = 0.1159, width: float = 8.0
) -> AutoencoderKL:
    """A small image autoencoder, by default with FLUX.1's scaling and shift.

    `width` scales the mean of its posterior, so that scaled latents have a variance of about 1.
    """
    vae: Any = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        # Without these convolutions, the encoder's last one gives mean and log variance directly.
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    narrow_posterior(vae.encoder.conv_out, LATENT_CHANNELS, width)
    return vae.eval()


def narrow_posterior(head: Any, num_channels: int, width: float = 8.0) -> None:
    """Make the posterior of a random VAE narrow and its mean wider, as in a trained VAE.

    Otherwise the posterior would be as wide as the latents, which leaves nothing to learn.

    Args:
        head: The encoder's last convolution. The first half of its output channels is the mean, the second the log
            variance.
        num_channels: Number of latent channels.
        width: Scale of the mean, so that latents have a variance of about 1 once they are normalised.
    """
    with torch.no_grad():
        head.weight[:num_channels] *= width
        head.weight[num_channels:] *= 0.1
        head.bias[num_channels:] = -6.0


def build_sd_vae() -> AutoencoderKL:
    """Build a tiny VAE like Stable Diffusion's: 8 pixels per latent, 4 channels, scaling factor 0.18215."""
    vae: Any = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.18215,
    )
    narrow_posterior(vae.quant_conv, LATENT_CHANNELS)
    return vae.eval()  # type: ignore[no-any-return]


def build_qwen_image_vae() -> AutoencoderKLQwenImage:
    """Build Qwen-Image's VAE in small.

    Its latent means and deviations are the published ones, the class's defaults.
    """
    return scale_posterior(AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1), 24)


def scale_posterior(vae: Any, width: float) -> Any:
    """Make a tiny VAE's posterior narrow and its mean as wide as `latents_std`, as in a trained VAE."""
    narrow_posterior(vae.quant_conv, vae.config.z_dim, width)
    return vae.eval()


def build_flux2_vae() -> AutoencoderKLFlux2:
    """Build FLUX.2's VAE in small, with random statistics for its normalisation."""
    vae: Any = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    narrow_posterior(vae.encoder.conv_out, LATENT_CHANNELS)
    # The pipelines normalise latents with these statistics, so they must differ from the initial zeros and ones.
    with torch.no_grad():
        vae.bn.running_mean.normal_(std=0.3)
        vae.bn.running_var.uniform_(0.5, 2.0)
    return vae.eval()
