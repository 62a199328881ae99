"""Tiny random Wan pipelines, one of each published kind."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_tokenizer, build_umt5_encoder
from dit_lora.families.tiny.vae import scale_posterior

_LATENTS, _IMAGE_WIDTH, _WIDTH = 16, 16, 24
_PICTURE, _PATCH = 28, 14  # CLIP's sizes: four patch tokens and a class token
# Noisy latents, condition, and a mask of four channels.
_CONDITION_CONFIG = {"in_channels": 2 * _LATENTS + 4}
_CLIP_CONDITION_CONFIG = {**_CONDITION_CONFIG, "image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": _WIDTH}
VARIANTS: dict[str, dict[str, Any]] = {
    "wan-2.1-t2v": {},
    "wan-2.1-i2v": _CLIP_CONDITION_CONFIG,
    "wan-2.1-flf2v": {**_CLIP_CONDITION_CONFIG, "pos_embed_seq_len": 2 * ((_PICTURE // _PATCH) ** 2 + 1)},
    "wan-2.2-t2v-a14b": {},
    "wan-2.2-i2v-a14b": _CONDITION_CONFIG,
    "wan-2.2-ti2v-5b": {"in_channels": 8, "out_channels": 8},
}
"""Changes of each variant to the transformer's config."""
# Shifts of the published checkpoints (diffusers: scripts/convert_wan_to_diffusers.py).
_SHIFTS = {"wan-2.1-flf2v": 16.0, "wan-2.2-ti2v-5b": 5.0}
_INDEX_VALUES: dict[str, dict[str, Any]] = {
    "wan-2.2-t2v-a14b": {"boundary_ratio": 0.875},
    "wan-2.2-i2v-a14b": {"boundary_ratio": 0.9},
    "wan-2.2-ti2v-5b": {"expand_timesteps": True},
}


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Wan pipeline with weights from torch's default generator; two experts have different weights."""
    changes, tokenizer = VARIANTS[variant], build_t5_tokenizer()
    components: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": build_umt5_encoder(len(tokenizer)),
        "vae": _build_vae_5b() if variant == "wan-2.2-ti2v-5b" else _build_vae(),
        "transformer": _build_transformer(changes),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=_SHIFTS.get(variant, 3.0),
        ),
        **_INDEX_VALUES.get(variant, {}),
    }
    # A second call draws other weights.
    if "boundary_ratio" in components:
        components["transformer_2"] = _build_transformer(changes)
    if "image_dim" in changes:
        components["image_encoder"], components["image_processor"] = _build_clip()
    # TI2V-5B takes an image too, but its published pipeline is text-to-video.
    from_image = changes.get("in_channels") == _CONDITION_CONFIG["in_channels"]
    pipeline: Any = (WanImageToVideoPipeline if from_image else WanPipeline)(**components)
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer(changes: dict[str, Any]) -> WanTransformer3DModel:
    common: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": _WIDTH // 2,
        "in_channels": _LATENTS,
        "out_channels": _LATENTS,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    transformer: Any = WanTransformer3DModel(**{**common, **changes})
    image_embedder = transformer.condition_embedder.image_embedder
    with torch.no_grad():
        # The initial zeros would hide which of the two images is which.
        if image_embedder is not None and image_embedder.pos_embed is not None:
            image_embedder.pos_embed.normal_()
    return transformer


def _build_vae() -> AutoencoderKLWan:
    """Build Wan 2.1's VAE in small. Its latent means and deviations are the published ones, the class's defaults."""
    return scale_posterior(AutoencoderKLWan(base_dim=4, z_dim=_LATENTS, dim_mult=[1, 1, 1, 1], num_res_blocks=1), 10)


def _build_vae_5b() -> AutoencoderKLWan:
    """Build Wan 2.2's VAE in small: pixels in patches of 2x2, residual paths, a decoder of another width."""
    return scale_posterior(
        AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=8,
            z_dim=8,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            latents_mean=[-0.2, 0.3, 0.1, -0.4, 0.0, 0.2, -0.1, 0.5],
            latents_std=[0.8, 1.3, 0.6, 1.1, 0.5, 0.9, 1.2, 0.7],
        ),
        5,
    )


def _build_clip() -> tuple[CLIPVisionModel, CLIPImageProcessor]:
    config = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=32,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_PICTURE,
        patch_size=_PATCH,
        initializer_range=0.2,
    )
    size = {"height": _PICTURE, "width": _PICTURE}
    return CLIPVisionModel(config).eval(), CLIPImageProcessor(size={"shortest_edge": _PICTURE}, crop_size=size)
