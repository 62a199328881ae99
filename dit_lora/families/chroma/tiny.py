"""A tiny random Chroma pipeline."""

from pathlib import Path
from typing import Any

from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_encoder, build_t5_tokenizer
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_image_vae


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Chroma pipeline with weights from torch's default generator."""
    tokenizer = build_t5_tokenizer()
    pipeline: Any = ChromaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5_encoder(len(tokenizer)),
        vae=build_image_vae(),
        transformer=ChromaTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=16,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
        # As lodestones/Chroma, which shifts by size. Chroma1-HD has shift 3 at every size.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
