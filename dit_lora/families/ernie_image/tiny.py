"""A tiny random ERNIE-Image pipeline, without the prompt enhancer. Text is encoded as bytes."""

from pathlib import Path
from typing import Any

import torch
from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import Mistral3Model

from dit_lora.families.tiny.chat_text import TEXT_WIDTH, build_mistral3
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_flux2_vae


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny ERNIE-Image pipeline with weights from torch's default generator."""
    # Enough layers for the second to last hidden states, which the pipeline reads.
    tokenizer, config = build_mistral3(num_layers=2)
    pipeline: Any = ErnieImagePipeline(
        tokenizer=tokenizer,
        text_encoder=Mistral3Model(config).eval(),
        vae=build_flux2_vae(),
        transformer=_build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer() -> ErnieImageTransformer2DModel:
    transformer: Any = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=48,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=4 * LATENT_CHANNELS,
        text_in_dim=TEXT_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    with torch.no_grad():
        # The class starts them at zero, with which no layer would get a gradient.
        for layer in (transformer.adaLN_modulation[-1], transformer.final_linear):
            layer.weight.normal_(std=0.1)
    return transformer.eval()  # type: ignore[no-any-return]
