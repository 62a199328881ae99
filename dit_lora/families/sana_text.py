"""Sana's and SANA-Video's text encoder, Gemma 2, as their pipelines use it."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder
from dit_lora.pretrained import load_pretrained


def gemma_encoder(
    pipeline_class: Any, path: Path, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Gemma as the pipeline uses it: its instruction before each caption, the first token and the last 299 kept.

    "" is encoded as the pipeline encodes its negative prompt, without the instruction.
    """
    pipeline = load_pretrained(
        pipeline_class, path, transformer=None, vae=None, dtype=dtype, use_safetensors=True
    ).to(device)
    defaults = prompt_defaults(pipeline_class)

    def encode_one(caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings, mask, _, _ = pipeline.encode_prompt(
            caption,
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=defaults["max_sequence_length"],
            complex_human_instruction=defaults["complex_human_instruction"] if caption else None,
        )
        return embeddings, mask

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        embeddings, masks = zip(*[encode_one(caption) for caption in captions], strict=True)
        return {
            "prompt_embeds": torch.cat(embeddings),
            "prompt_attention_mask": torch.cat(masks),
        }

    return encode


def prompt_defaults(pipeline_class: Any) -> dict[str, Any]:
    """Text length and instruction, the defaults of the pipeline's own call."""
    parameters = inspect.signature(pipeline_class.__call__).parameters
    names = ("max_sequence_length", "complex_human_instruction")
    return {name: parameters[name].default for name in names}
