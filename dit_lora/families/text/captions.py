"""Captions as tensors named like the pipeline's arguments, and back to those arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder


def make_caption_encoder(encode_caption: Callable[[str], Tensors]) -> TextEncoder:
    """A caption encoder that encodes captions one at a time, so that no result depends on the rest of its batch.

    Args:
        encode_caption: Encodes one caption to tensors (1, ...).
    """

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # Tensors (1, ...) by name, one dict per caption.
        rows = [encode_caption(caption) for caption in captions]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return encode


def make_padded_encoder(pipeline: Any, num_tokens: int, device: torch.device) -> TextEncoder:
    """Create a caption encoder that pads every caption to `num_tokens`, so that none influences the others."""

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # (B, T, D)
        embeddings, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=num_tokens, device=device
        )
        return {"prompt_embeds": embeddings}

    return encode


def make_prompt_kwargs(prompt: str | Tensors, empty_prompt: Tensors | None) -> dict[str, Any]:
    """Pipeline arguments for a prompt; the arguments are those of `Sampler.prompt_kwargs`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    # Cached tensors have the names of the pipeline's arguments.
    negative = {f"negative_{name}": tensor for name, tensor in (empty_prompt or {}).items()}
    return {**prompt, **negative}
