"""Tiny random Qwen-Image pipelines, whose tokenizer splits the prompt templates into as many tokens as Qwen's.

`qwen-image-edit` is like Qwen-Image-Edit, `qwen-image-edit-plus` like Qwen-Image-Edit-2511.
"""

import json
import re
from collections.abc import Sequence
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

from dit_lora.families.chat.tiny import TEXT_WIDTH, VARIANTS, build_tiny_chat
from dit_lora.families.opening import build_empty_pipeline
from dit_lora.families.tiny.vae import build_qwen_image_vae
from dit_lora.files import read_json

_LATENT_CHANNELS = 16
# Every word of a template with the space before it, the roles, and these signs are single tokens in Qwen's vocabulary.
_TEMPLATE_WORD = re.compile(r"'s|\),| \(| ?[A-Za-z]+")
_PIPELINE_CLASSES: dict[str, Any] = {
    "qwen-image": QwenImagePipeline,
    "qwen-image-edit": QwenImageEditPipeline,
    "qwen-image-edit-plus": QwenImageEditPlusPipeline,
}


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Qwen-Image pipeline with weights from torch's default generator."""
    kind = _PIPELINE_CLASSES[variant]
    text = build_text_components("qwen2.5-vl", build_empty_pipeline(kind).prompt_template_encode)
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
        vae=build_qwen_image_vae(),
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
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
    pipeline.save_pretrained(folder, safe_serialization=True)
    if processor:
        write_processor("qwen2.5-vl", Qwen2VLProcessor.__name__, text["tokenizer"], folder)


def write_processor(chat_variant: str, name: str, tokenizer: Any, folder: Path, component: str = "processor") -> None:
    """Write the folder `component` of a tiny pipeline and add it to the pipeline's index, as class `name`."""
    tokenizer.save_pretrained(folder / component)
    files = {**VARIANTS[chat_variant].files, "processor_config.json": {"processor_class": name}}
    for file, values in files.items():
        _write_json(folder / component / file, values)
    index = folder / "model_index.json"
    _write_json(index, {**read_json(index), component: ["transformers", name]})


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def build_text_components(chat_variant: str, template: str, extra_tokens: Sequence[str] = ()) -> dict[str, Any]:
    """Tokenizer and model of a tiny chat checkpoint, with each word of a prompt template as a single token."""
    # Special tokens are in the vocabulary already, so replace them by a separator.
    template_words = _TEMPLATE_WORD.findall(re.sub(r"<\|\w+\|>", "\n", template))
    tokenizer, model = build_tiny_chat(chat_variant, sorted({*template_words, *extra_tokens}))
    return {"tokenizer": tokenizer, "text_encoder": model}
