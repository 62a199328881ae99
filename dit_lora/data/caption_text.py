"""What makes a caption, a question or an answer no text to train on: one judgement for the audit and for training."""

import re

MOST_CHARACTERS = 100_000
"""The longest caption: hundreds of times what the text encoder with the most room reads."""
MOST_BYTES = 4 * MOST_CHARACTERS
"""The most bytes of a file that holds a caption alone, as UTF-8; more is not read."""

_LONE = re.compile("[\ud800-\udfff]")
# Printable to Python, and blank in every font: fillers of Hangul, and Braille without a dot.
_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_SHOWN = 80  # characters of a caption in a message

Fault = tuple[str, str]
"""One of the audit's codes, and words."""


def caption_fault(caption: str) -> Fault | None:
    """Why nothing can be learned from it, or a tokenizer would not take it; None if it can be used."""
    if is_blank(caption):
        return "caption_empty", "its caption is empty"
    if has_lone_surrogate(caption):
        words = "its caption holds half of a UTF-16 pair, which no tokenizer takes"
        return "caption_not_text", f"{words}: {short(caption)}"
    if len(caption) > MOST_CHARACTERS:
        return too_long(f"{len(caption):,} characters")
    return None


def too_long(length: str) -> Fault:
    """Say that a caption is not worth counting in tokens."""
    return "caption_long", f"its caption has {length}, and {MOST_CHARACTERS:,} are read at most"


def is_blank(text: str) -> bool:
    """Whether nothing of it would be seen on paper."""
    return not any(
        char.isprintable() and not char.isspace() and char not in _UNSEEN for char in text
    )


def has_lone_surrogate(text: str) -> bool:
    """Whether it holds half of a UTF-16 pair, as JSON's `\\ud83d` alone."""
    return _LONE.search(text) is not None


def short(text: str) -> str:
    """Its beginning in quotes, on one line."""
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
