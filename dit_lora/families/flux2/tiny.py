"""Tiny random FLUX.2 pipelines: klein with Qwen3, dev with Mistral 3 and an embedded guidance.

Text is encoded as bytes. The text encoders are deep enough for the layers that the pipelines read.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from dit_lora.families.tiny.chat_text import (
    MODEL_SIZES,
    TEXT_WIDTH,
    build_byte_tokenizer,
    build_qwen3,
    special_token_ids,
)
from dit_lora.families.tiny.vae import LATENT_CHANNELS, narrow_vae_posterior

# Published models have 36 (Qwen3 4B and 8B) and 40 layers (Mistral Small 3); the pipelines read up to layers 27 and
# 30.
_QWEN_LAYERS, _MISTRAL_LAYERS = 28, 31
_MISTRAL_TOKENS = (
    *("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
_MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% set tag = 'SYSTEM_PROMPT' if message['role'] == 'system' "
    "else 'INST' %}{{ '[' + tag + ']' }}{% for part in message['content'] %}{{ part['text'] }}"
    "{% endfor %}{{ '[/' + tag + ']' }}{% endfor %}"
)


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny FLUX.2 pipeline with weights from torch's default generator."""
    klein = variant == "flux2-klein"
    kind = Flux2KleinPipeline if klein else Flux2Pipeline
    if klein:
        tokenizer, config = build_qwen3(_QWEN_LAYERS)
        encoder: Any = Qwen3ForCausalLM(config)
    else:
        tokenizer, encoder = _build_mistral()
    pipeline: Any = kind(
        tokenizer=tokenizer,
        text_encoder=encoder.eval(),
        vae=_build_vae(),
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


def _build_mistral() -> tuple[Any, Any]:
    # Published with Pixtral's processor, which contains such a tokenizer and needs torchvision for images.
    tokenizer = build_byte_tokenizer(_MISTRAL_TOKENS, end_token="</s>")
    tokenizer.chat_template = _MISTRAL_TEMPLATE
    config = Mistral3Config(
        text_config={
            **MODEL_SIZES,
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": _MISTRAL_LAYERS,
            "sliding_window": None,
            **special_token_ids(tokenizer),
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.get_vocab()["[IMG]"],
    )
    return tokenizer, Mistral3ForConditionalGeneration(config)


def _build_vae() -> AutoencoderKLFlux2:
    vae: Any = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    narrow_vae_posterior(vae.encoder, LATENT_CHANNELS)
    # The pipelines normalise latents with these statistics, so they must differ from the initial zeros and ones.
    with torch.no_grad():
        vae.bn.running_mean.normal_(std=0.3)
        vae.bn.running_var.uniform_(0.5, 2.0)
    return vae.eval()
