"""Tiny random FLUX.2 pipelines: klein with Qwen3, dev with Mistral 3 and an embedded guidance.

Text is encoded as bytes. The text encoders are deep enough for the layers that the pipelines read.
"""

from pathlib import Path
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from dit_lora.families.tiny.chat_text import TEXT_WIDTH, build_mistral3, build_qwen3
from dit_lora.families.tiny.vae import LATENT_CHANNELS, build_flux2_vae

# Published models have 36 (Qwen3 4B and 8B) and 40 layers (Mistral Small 3); the pipelines read up to layers 27 and
# 30.
_QWEN_LAYERS, _MISTRAL_LAYERS = 28, 31


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny FLUX.2 pipeline with weights from torch's default generator."""
    klein = variant == "flux2-klein"
    kind = Flux2KleinPipeline if klein else Flux2Pipeline
    if klein:
        tokenizer, qwen_config = build_qwen3(_QWEN_LAYERS)
        encoder: Any = Qwen3ForCausalLM(qwen_config)
    else:
        tokenizer, mistral_config = build_mistral3(_MISTRAL_LAYERS)
        encoder = Mistral3ForConditionalGeneration(mistral_config)
    pipeline: Any = kind(
        tokenizer=tokenizer,
        text_encoder=encoder.eval(),
        vae=build_flux2_vae(),
        transformer=Flux2Transformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            # Hidden states of three layers.
            joint_attention_dim=3 * TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
