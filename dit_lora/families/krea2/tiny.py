"""A tiny random Krea 2 Raw. Text is encoded as bytes, except the words of the pipeline's template."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel

from dit_lora.families.tiny.chat_text import QWEN3_VL_TOKENS, TEXT_WIDTH, build_byte_tokenizer, build_qwen3_vl
from dit_lora.families.tiny.vae import build_qwen_image_vae

# One token each, as in Qwen's vocabulary: the pipeline assumes 34 tokens before the prompt and 5 after it.
_TEMPLATE_WORDS = (
    *("system", "user", "assistant", "Describe", " the", " image", " by", " detailing", " color"),
    *(" shape", " size", " texture", " quantity", " text", " spatial", " relationships", " of"),
    *(" objects", " and", " background"),
)
# Published models have 36 layers and use every third from 2 to 35.
_LAYERS, _SELECTED = 5, (1, 2, 4)


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Krea 2 pipeline with weights from torch's default generator."""
    tokenizer = build_byte_tokenizer((*QWEN3_VL_TOKENS, *_TEMPLATE_WORDS), end_token="<|im_end|>")
    pipeline: Any = Krea2Pipeline(
        tokenizer=tokenizer,
        text_encoder=build_qwen3_vl(tokenizer, _LAYERS),
        vae=build_qwen_image_vae(),
        transformer=_build_transformer(),
        # The options that the pipeline expects.
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        text_encoder_select_layers=_SELECTED,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_transformer() -> Any:
    transformer: Any = Krea2Transformer2DModel(
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        timestep_embed_dim=32,
        text_hidden_dim=TEXT_WIDTH,
        num_text_layers=len(_SELECTED),
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=24,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            # The initial zeros would hide the order of these parameters, and that norms multiply by one plus the
            # weight.
            if "norm" in name or name.endswith("scale_shift_table"):
                parameter.normal_(std=0.3)
    return transformer
