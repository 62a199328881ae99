"""A tiny random AuraFlow pipeline."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_tokenizer, build_umt5_encoder
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_image_vae


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny AuraFlow pipeline with weights from torch's default generator."""
    tokenizer = build_t5_tokenizer()
    pipeline: Any = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=build_umt5_encoder(len(tokenizer)),
        # The scale of Stable Diffusion XL's VAE (ComfyUI, comfy/latent_formats.py, SDXL).
        vae=build_image_vae(scaling_factor=0.13025, shift_factor=None),
        transformer=_build_transformer(),
        # ComfyUI samples AuraFlow with this shift (comfy/supported_models.py).
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer() -> AuraFlowTransformer2DModel:
    transformer: Any = AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    with torch.no_grad():
        # At the class's initial size, blocks add so little to their input that adapters barely change the output.
        for block in (*transformer.joint_transformer_blocks, *transformer.single_transformer_blocks):
            block.norm1.linear.weight.normal_(std=0.3)  # gates, among others
            block.ff.out_projection.weight.normal_(std=0.5)
    return transformer.eval()  # type: ignore[no-any-return]
