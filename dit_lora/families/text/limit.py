"""The part of a caption that a checkpoint's tokenizer lets through."""

from pathlib import Path

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.base import TextLimit


def text_limit(
    path: Path, max_tokens: int | None = None, *, folder: str = "tokenizer"
) -> TextLimit:
    """The tokenizer in that folder of a checkpoint; without `max_tokens`, its own limit."""
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, path / folder)
    return TextLimit(tokenizer, max_tokens or tokenizer.model_max_length)
