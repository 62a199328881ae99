"""A tiny random Anima pipeline. Qwen3 reads text as bytes, T5's tokenizer as characters."""

from pathlib import Path
from typing import Any

from diffusers import AnimaAutoBlocks, AnimaTextConditioner, CosmosTransformer3DModel, FlowMatchEulerDiscreteScheduler
from transformers import Qwen3Model

from dit_lora.environment.pipeline_index import MODULAR_INDEX_FILE, set_component_source
from dit_lora.families.tiny.chat_text import TEXT_WIDTH, build_qwen3
from dit_lora.families.tiny.text import build_t5_tokenizer
from dit_lora.families.tiny.vae import build_qwen_image_vae
from dit_lora.files import read_json, write_json

_LATENT_CHANNELS = 16


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Anima pipeline with weights from torch's default generator."""
    tokenizer, text_config = build_qwen3(num_layers=2)
    t5_tokenizer = build_t5_tokenizer()
    conditioner: Any = AnimaTextConditioner(
        source_dim=TEXT_WIDTH,
        target_dim=TEXT_WIDTH,
        model_dim=TEXT_WIDTH,
        num_layers=2,
        num_attention_heads=2,
        mlp_ratio=2.0,
        target_vocab_size=len(t5_tokenizer),
    )
    transformer: Any = CosmosTransformer3DModel(
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        adaln_lora_dim=8,
        # Values of Cosmos-2.0-Diffusion-2B-Text2Image in Diffusers' scripts/convert_cosmos_to_diffusers.py.
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )
    blocks: Any = AnimaAutoBlocks()
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        text_encoder=Qwen3Model(text_config).eval(),
        text_conditioner=conditioner.eval(),
        transformer=transformer.eval(),
        vae=build_qwen_image_vae(),
        # scripts/convert_anima_to_diffusers.py of Diffusers.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipeline.save_pretrained(str(folder), safe_serialization=True, overwrite_modular_index=True)
    # The index names this folder, which may be moved.
    index = folder / MODULAR_INDEX_FILE
    write_json(index, set_component_source(read_json(index), None))
