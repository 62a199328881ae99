"""A tiny random Qwen-Image 2.1, whose tokenizer has the words of the pipeline's template as single tokens."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import Qwen3VLProcessor

from dit_lora.families.chat.tiny import TEXT_WIDTH
from dit_lora.families.qwen_image.tiny import build_text_components, write_processor
from dit_lora.families.qwen_image21.text import StandInProcessor, read_template
from dit_lora.families.tiny.vae import scale_posterior


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Qwen-Image 2.1 pipeline with weights from torch's default generator."""
    text = build_text_components("qwen3-vl", read_template())
    processor: Any = StandInProcessor()
    pipeline: Any = QwenImage21Pipeline(
        # Values of Qwen/Qwen-Image. The published ones of 2.1 also shift by size.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=_build_vae(),
        text_encoder=text["text_encoder"],
        processor=processor,
        transformer=_build_transformer(),
    )
    # The processor's files are written separately: Transformers' class contains a video processor, which needs
    # torchvision.
    pipeline.register_modules(processor=None)
    pipeline._optional_components = [*pipeline._optional_components, "processor"]
    pipeline.save_pretrained(folder, safe_serialization=True)
    write_processor("qwen3-vl", Qwen3VLProcessor.__name__, text["tokenizer"], folder)


def _build_vae() -> AutoencoderKLQwenImage21:
    # Its latent means and deviations, of 64 channels, are the published ones, the class's defaults.
    vae = AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1)
    return scale_posterior(vae, 24)  # type: ignore[no-any-return]


def _build_transformer() -> QwenImage21Transformer2DModel:
    transformer: Any = QwenImage21Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        # The initial zeros would hide that this norm multiplies by one plus its weight.
        transformer.txt_in.text_norm.weight.normal_(std=0.3)
    return transformer.eval()  # type: ignore[no-any-return]
