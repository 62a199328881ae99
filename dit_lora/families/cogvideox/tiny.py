"""Tiny CogVideoX pipelines, one of each published kind. Their native shape is 9x64x96 (1.5: any shape)."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_encoder, build_t5_tokenizer
from dit_lora.families.tiny.vae import narrow_posterior

_LATENT_CHANNELS = 4
_ROTARY_CONFIG = {"use_rotary_positional_embeddings": True}
_IMAGE_CONFIG = {"in_channels": 2 * _LATENT_CHANNELS}
# 1.5 has a position table of 300 x 300 latents; this one ends at 160 pixels. Its card says 224 tokens.
_VERSION_1_5_CONFIG = {
    **_ROTARY_CONFIG,
    "patch_size_t": 2,
    "patch_bias": False,
    "sample_height": 20,
    "sample_width": 20,
    "max_text_seq_length": 224,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "cogvideox-2b": {},
    "cogvideox-5b": _ROTARY_CONFIG,
    "cogvideox-5b-i2v": {**_ROTARY_CONFIG, **_IMAGE_CONFIG, "use_learned_positional_embeddings": True},
    "cogvideox-1.5": _VERSION_1_5_CONFIG,
    "cogvideox-1.5-i2v": {**_VERSION_1_5_CONFIG, **_IMAGE_CONFIG, "ofs_embed_dim": 32},
}
"""Changes of each variant to the transformer's config."""


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny CogVideoX pipeline with weights from torch's default generator."""
    changes = VARIANTS[variant]
    # 5B and 1.5 have rotary positions, and with them other values of the VAE and the scheduler.
    rotary = "use_rotary_positional_embeddings" in changes
    kind = CogVideoXImageToVideoPipeline if variant.endswith("i2v") else CogVideoXPipeline
    tokenizer = build_t5_tokenizer()
    pipeline: Any = kind(
        tokenizer=tokenizer,
        text_encoder=build_t5_encoder(len(tokenizer)),
        vae=_build_vae(scaling_factor=0.7 if rotary else 1.15258426, inverts_scale="1.5" in variant),
        transformer=_build_transformer(changes),
        scheduler=_build_scheduler(rotary),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer(changes: dict[str, Any]) -> CogVideoXTransformer3DModel:
    common: dict[str, Any] = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "time_embed_dim": 32,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 2,
        "sample_width": 12,
        "sample_height": 8,
        "sample_frames": 9,
    }
    transformer: Any = CogVideoXTransformer3DModel(**{**common, **changes})
    if changes.get("use_learned_positional_embeddings"):
        table = transformer.patch_embed.pos_embedding  # initialised with sincos positions
        table += 0.1 * torch.randn(table.shape)
    return transformer


def _build_vae(scaling_factor: float, inverts_scale: bool) -> AutoencoderKLCogVideoX:
    vae: Any = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=_LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
        sample_height=64,
        sample_width=96,
        scaling_factor=scaling_factor,
        invert_scale_latents=inverts_scale,
    )
    narrow_posterior(vae.encoder.conv_out.conv, _LATENT_CHANNELS, width=2.5 / scaling_factor)
    return vae.eval()  # type: ignore[no-any-return]


def _build_scheduler(has_rotary: bool) -> CogVideoXDDIMScheduler | CogVideoXDPMScheduler:
    # The published checkpoints' values: snr_shift_scale is 3.0 in 2B and 1.0 in the others.
    kind = CogVideoXDPMScheduler if has_rotary else CogVideoXDDIMScheduler
    return kind(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0 if has_rotary else 3.0,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
    )
