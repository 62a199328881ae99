"""Tiny random Z-Image pipelines: base and Turbo differ in the scheduler's shift, as the published ones do."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from dit_lora.families.tiny.chat_text import TEXT_WIDTH, build_qwen3
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_image_vae
from dit_lora.families.z_image.checkpoint import BASE_SHIFT, TURBO_SHIFT


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Z-Image pipeline with weights from torch's default generator."""
    # Enough layers for the second to last hidden states, which the pipeline reads.
    tokenizer, config = build_qwen3(num_layers=3)
    pipeline: Any = ZImagePipeline(
        tokenizer=tokenizer,
        text_encoder=Qwen3Model(config).eval(),
        vae=build_image_vae(),
        transformer=_build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=TURBO_SHIFT if variant == "z-image-turbo" else BASE_SHIFT),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer() -> ZImageTransformer2DModel:
    transformer: Any = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 32, 32],
    )
    with torch.no_grad():
        # The class leaves these tokens at zero or undefined, but a trained model attends to them.
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    return transformer.eval()  # type: ignore[no-any-return]
