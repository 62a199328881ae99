"""Tiny random FLUX.1 pipelines. Dev and Kontext shift by resolution and take guidance; schnell does neither."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from dit_lora.families.tiny.text import (
    POOLED_WIDTH,
    TEXT_WIDTH,
    build_clip_encoder,
    build_clip_tokenizer,
    build_t5_encoder,
    build_t5_tokenizer,
)

# Published: 16.
LATENT_CHANNELS = 4


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny FLUX.1 pipeline with weights from torch's default generator."""
    # Schnell is the only variant without guidance embedding and dynamic shift.
    dev, kontext = variant != "flux-schnell", variant == "flux-kontext"
    kind = FluxKontextPipeline if kontext else FluxPipeline
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    pipeline: Any = kind(
        tokenizer=clip,
        text_encoder=build_clip_encoder(clip),
        tokenizer_2=t5,
        text_encoder_2=build_t5_encoder(len(t5)),
        vae=build_image_vae(),
        transformer=FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=POOLED_WIDTH,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=dev,
        ),
        # The published checkpoints' values (Diffusers' scripts/convert_flux_to_diffusers.py has none).
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def build_image_vae(scaling_factor: float = 0.3611, shift_factor: float = 0.1159, width: float = 8.0) -> AutoencoderKL:
    """A small image autoencoder, by default with FLUX.1's scaling and shift; `width` scales its latents to match."""
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
    narrow_vae_posterior(vae.encoder, LATENT_CHANNELS, width)
    return vae.eval()


def narrow_vae_posterior(encoder: Any, channels: int, width: float = 8.0) -> None:
    """Make a random encoder's posterior as narrow as a trained one's.

    Otherwise the posterior would be as wide as the latents, which leaves nothing to learn.
    """
    head = encoder.conv_out
    with torch.no_grad():
        # The first half of the output channels is the mean, the second the log variance.
        head.weight[:channels] *= width
        head.weight[channels:] *= 0.1
        head.bias[channels:] = -6.0
