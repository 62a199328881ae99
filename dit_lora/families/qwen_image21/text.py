"""Prompts of Qwen-Image 2.1: the processor of its pipeline, set to truncate captions, and its template."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import QwenImage21Pipeline
from transformers import BatchFeature, Qwen3VLProcessor

from dit_lora.environment.pretrained import load_pretrained

MAX_TEXT_TOKENS = 512
"""Number of tokens of an encoded prompt. The pipeline has no limit; this one, for the cache, is other families'."""


class StandInProcessor:
    """Stand-in for the processor that the pipeline reads when it is built."""

    tokenizer = SimpleNamespace(encode=lambda _: [0])
    apply_chat_template = staticmethod(lambda *_, **__: [[]])


class PromptProcessor(Qwen3VLProcessor):
    """`Qwen3VLProcessor` without its video processor, which needs torchvision, that can truncate captions."""

    max_tokens: int | None = None  # of a whole prompt; None truncates nothing
    num_closing_tokens = 0  # of the template after the caption
    num_template_tokens = 0  # of the template that are encoded with a caption

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    def __call__(self, *args: Any, **kwargs: Any) -> BatchFeature:
        inputs = super().__call__(*args, **kwargs)
        # The pipeline also renders its system message, to lists.
        length = inputs["input_ids"].shape[1] if isinstance(inputs["input_ids"], torch.Tensor) else 0
        if self.max_tokens is None or length <= self.max_tokens:
            return inputs
        columns, num_excess, rows = torch.arange(length), length - self.max_tokens, []
        for num_pads in (length - inputs["attention_mask"].sum(1)).tolist():
            # Drop padding, which is on the left, and then the end of the caption.
            start, closing = min(num_pads, num_excess), length - self.num_closing_tokens
            rows.append(torch.cat([columns[start : closing - num_excess + start], columns[closing:]]))
        return BatchFeature({name: tensor.gather(1, torch.stack(rows)) for name, tensor in inputs.items()})


def load_processor(path: Path) -> PromptProcessor:
    """Load a checkpoint's processor, set to truncate prompts to `MAX_TEXT_TOKENS` encoded tokens."""
    processor: PromptProcessor = load_pretrained(PromptProcessor, path / "processor")
    pipeline, tokenizer = _build_pipeline(processor), processor.tokenizer
    before, after = pipeline.prompt_template_t2i.split("{}")
    # The pipeline encodes the system message, and drops it from the embeddings.
    processor.max_tokens = MAX_TEXT_TOKENS + pipeline._drop_idx
    processor.num_closing_tokens = len(tokenizer(after).input_ids)
    processor.num_template_tokens = len(tokenizer(before + after).input_ids) - pipeline._drop_idx
    return processor


def read_template() -> str:
    """The pipeline's template of a prompt."""
    return str(_build_pipeline(StandInProcessor()).prompt_template_t2i)


def _build_pipeline(processor: Any) -> Any:
    nothing: Any = None
    return QwenImage21Pipeline(nothing, vae=nothing, text_encoder=nothing, processor=processor, transformer=nothing)
