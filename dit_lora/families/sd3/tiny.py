"""Tiny random Stable Diffusion 3.5 pipelines: medium has a second attention in its first block, large has none."""

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from dit_lora.families.tiny.text import (
    TEXT_WIDTH,
    build_clip_tokenizer,
    build_projected_clip_encoder,
    build_t5_encoder,
    build_t5_tokenizer,
)
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_image_vae

# Concatenated, they are narrower than T5 and get padded, as in the published models.
_CLIP_WIDTHS = (8, 16)


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny SD3 pipeline with weights from torch's default generator."""
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    clip_l, clip_g = (build_projected_clip_encoder(clip, width) for width in _CLIP_WIDTHS)
    pipeline: Any = StableDiffusion3Pipeline(
        tokenizer=clip,
        text_encoder=clip_l,
        tokenizer_2=clip,
        text_encoder_2=clip_g,
        tokenizer_3=t5,
        text_encoder_3=build_t5_encoder(len(t5)),
        # The factors of Diffusers' scripts/convert_sd3_to_diffusers.py.
        vae=build_image_vae(scaling_factor=1.5305, shift_factor=0.0609, width=2.0),
        transformer=SD3Transformer2DModel(
            sample_size=8,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=TEXT_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=sum(_CLIP_WIDTHS),
            pos_embed_max_size=8,
            qk_norm="rms_norm",
            dual_attention_layers=(0,) if variant == "sd3.5-medium" else (),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
