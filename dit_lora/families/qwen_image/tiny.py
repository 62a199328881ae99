"""Tiny random Qwen-Image pipelines, whose tokenizer splits the prompt templates into as many tokens as Qwen's.

`qwen-image-edit` is like Qwen-Image-Edit, `qwen-image-edit-plus` like Qwen-Image-Edit-2511.
"""

import json
import re
from pathlib import Path
from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2VLProcessor

from dit_lora.families.chat.tiny import TEXT_WIDTH, VARIANTS, tiny_chat
from dit_lora.families.qwen_image.checkpoint import bare
from dit_lora.families.tiny.vae import qwen_image_vae
from dit_lora.files import read_json

_LATENTS = 16
# Every word of a template with the space before it, the roles, and these signs are single tokens in Qwen's vocabulary.
_WORDS = re.compile(r"'s|\),| \(| ?[A-Za-z]+")
_KINDS: dict[str, Any] = {
    "qwen-image": QwenImagePipeline,
    "qwen-image-edit": QwenImageEditPipeline,
    "qwen-image-edit-plus": QwenImageEditPlusPipeline,
}


def build_tiny(variant: str, out: Path) -> None:
    """Write the pipeline with weights from torch's default generator."""
    kind = _KINDS[variant]
    text = _text(kind)
    # The processor's files are written separately: Transformers' class contains a video processor, which needs
    # torchvision.
    processor = {} if kind is QwenImagePipeline else {"processor": None}
    pipeline: Any = kind(
        scheduler=FlowMatchEulerDiscreteScheduler(
            # Values of Qwen/Qwen-Image, scheduler/scheduler_config.json, as quoted by ai-toolkit and SimpleTuner.
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
            zero_cond_t=kind is QwenImageEditPlusPipeline,
        ),
        **text,
        **processor,
    )
    pipeline._optional_components = [*pipeline._optional_components, *processor]
    pipeline.save_pretrained(out, safe_serialization=True)
    if processor:
        _write_processor(text["tokenizer"], out)


def _write_processor(tokenizer: Any, out: Path) -> None:
    """Write the folder `processor` and add it to the pipeline's index."""
    name = Qwen2VLProcessor.__name__
    tokenizer.save_pretrained(out / "processor")
    files = VARIANTS["qwen2.5-vl"].files
    files = {**files, "processor_config.json": {"processor_class": name}}
    for file, values in files.items():
        _write(out / "processor" / file, values)
    index = out / "model_index.json"
    _write(index, {**read_json(index), "processor": ["transformers", name]})


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _text(kind: Any) -> dict[str, Any]:
    template: str = bare(kind).prompt_template_encode
    # Special tokens are in the vocabulary already, so replace them by a separator.
    template_words = _WORDS.findall(re.sub(r"<\|\w+\|>", "\n", template))
    tokenizer, model = tiny_chat("qwen2.5-vl", sorted({*template_words}))
    return {"tokenizer": tokenizer, "text_encoder": model}
