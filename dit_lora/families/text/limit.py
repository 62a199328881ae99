"""How much of a caption a checkpoint's tokenizer accepts."""

from pathlib import Path

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.base import TextLimit


def load_text_limit(path: Path, max_tokens: int | None = None, *, folder: str = "tokenizer") -> TextLimit:
    """Load a checkpoint's tokenizer from this folder, with the caption's token limit.

    Without `max_tokens`, the limit is the tokenizer's.
    """
    # Import here: Transformers takes seconds to import.
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, path / folder)
    return TextLimit(tokenizer, max_tokens or tokenizer.model_max_length)
