"""A tiny random Krea 2 Raw. Text is encoded as bytes, except the words of the pipeline's template."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from dit_lora.families.tiny.chat_text import MODEL_SIZES, TEXT_WIDTH, build_byte_tokenizer, special_token_ids
from dit_lora.families.tiny.vae import build_qwen_image_vae

_CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
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
    tokenizer = build_byte_tokenizer(
        (*_CHAT_TOKENS, *_VISION_TOKENS.values(), *_TEMPLATE_WORDS), end_token="<|im_end|>"
    )
    pipeline: Any = Krea2Pipeline(
        tokenizer=tokenizer,
        text_encoder=_build_text_encoder(tokenizer),
        vae=build_qwen_image_vae(),
        transformer=_build_transformer(),
        # The options that the pipeline expects.
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        text_encoder_select_layers=_SELECTED,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_text_encoder(tokenizer: Any) -> Qwen3VLModel:
    ids: dict[str, Any] = {name: tokenizer.get_vocab()[token] for name, token in _VISION_TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={
            **MODEL_SIZES,
            **special_token_ids(tokenizer),
            "vocab_size": len(tokenizer),
            "num_hidden_layers": _LAYERS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **ids,
    )
    return Qwen3VLModel(config).eval()


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
