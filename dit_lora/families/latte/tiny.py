"""A complete random Latte pipeline, small enough for tests and demos on a CPU."""

from pathlib import Path
from typing import Any

from diffusers import LattePipeline, LatteTransformer3DModel

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_encoder, build_t5_tokenizer
from dit_lora.families.tiny.vae import build_sd_vae
from dit_lora.models.video_dit_base import build_iddpm_scheduler


def build_tiny_checkpoint(_variant: str, folder: Path) -> None:
    """Write a tiny pipeline like Latte-1; its native shape is 4 frames of 32x32."""
    tokenizer = build_t5_tokenizer()
    pipeline: Any = LattePipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5_encoder(len(tokenizer)),
        vae=build_sd_vae(),
        transformer=LatteTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            # Noise and variance.
            out_channels=8,
            num_layers=1,
            cross_attention_dim=32,
            attention_bias=True,
            sample_size=4,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=TEXT_WIDTH,
            video_length=4,
        ),
        scheduler=build_iddpm_scheduler(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
