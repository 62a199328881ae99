"""Tiny random FLUX.1 pipelines. Dev and Kontext shift by resolution and take guidance; schnell does neither."""

from pathlib import Path
from typing import Any

from diffusers import (
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
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_image_vae


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
