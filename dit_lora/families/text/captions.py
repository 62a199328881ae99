"""Captions as tensors that are named as the arguments of a pipeline are, and back to these arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder


def one_by_one(encode_one: Callable[[str], Tensors]) -> TextEncoder:
    """Return an encoder of captions that takes each alone, to tensors (1, ...): none depends on its neighbours then."""

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        rows = [encode_one(caption) for caption in captions]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return encode


def as_arguments(prompt: str | Tensors, empty: Tensors | None) -> dict[str, Any]:
    """Return a pipeline's arguments for a prompt, as text or as tensors with those of "", which it is guided away from."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    negative = {f"negative_{name}": tensor for name, tensor in (empty or {}).items()}
    return {**prompt, **negative}
