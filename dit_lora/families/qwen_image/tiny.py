"""A tiny Qwen-Image pipeline with random weights, whose tokenizer takes the prompt's template for as many tokens as Qwen's does."""

import re
from pathlib import Path
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from dit_lora.families.chat.tiny import TEXT_WIDTH, tiny_chat
from dit_lora.families.qwen_image.checkpoint import bare
from dit_lora.families.tiny.vae import qwen_image_vae

_LATENTS = 16
# Every word of the template with the space before it, and the roles: one token each in Qwen's vocabulary.
_WORDS = re.compile(r" ?[A-Za-z]+")


def build_tiny(variant: str, out: Path) -> None:
    """Write the pipeline, with weights from torch's generator."""
    pipeline: Any = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            # Qwen/Qwen-Image, scheduler/scheduler_config.json, as ai-toolkit and SimpleTuner quote it.
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=qwen_image_vae(),
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * _LATENTS,
            out_channels=_LATENTS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
        **_text(),
    )
    pipeline.save_pretrained(out, safe_serialization=True)


def _text() -> dict[str, Any]:
    template: str = bare(QwenImagePipeline).prompt_template_encode
    words = _WORDS.findall(re.sub(r"<\|\w+\|>", "\n", template))
    tokenizer, model = tiny_chat("qwen2.5-vl", sorted({*words}))
    return {"tokenizer": tokenizer, "text_encoder": model}
