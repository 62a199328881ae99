"""Checks that a caption, question or answer is text to train on: the same for the audit and for training."""

import re

MOST_CHARACTERS = 100_000
"""The longest caption in characters: hundreds of times what the text encoder with the most room reads."""
MOST_BYTES = 4 * MOST_CHARACTERS
"""The most bytes of a file that holds a caption alone, at 4 bytes a character in UTF-8; no more is read."""

_LONE = re.compile("[\ud800-\udfff]")
# Printable to Python, and blank in every font: fillers of Hangul, and Braille without a dot.
_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_SHOWN = 80  # characters of a caption in a message

Fault = tuple[str, str]
"""One of the audit's codes, and a message."""


def caption_fault(caption: str) -> Fault | None:
    """Return why nothing can be learned from a caption, or no tokenizer takes it; None if it can be used."""
    if is_blank(caption):
        return "caption_empty", "its caption is empty"
    if has_lone_surrogate(caption):
        message = "its caption holds half of a UTF-16 pair, which no tokenizer takes"
        return "caption_not_text", f"{message}: {short(caption)}"
    if len(caption) > MOST_CHARACTERS:
        return too_long(f"{len(caption):,} characters")
    return None


def too_long(length: str) -> Fault:
    """Return the fault of a caption that is too long to be worth counting in tokens."""
    return "caption_long", f"its caption has {length}, and {MOST_CHARACTERS:,} are read at most"


def is_blank(text: str) -> bool:
    """Return True if nothing of the text would be seen on paper."""
    return not any(
        char.isprintable() and not char.isspace() and char not in _UNSEEN for char in text
    )


def has_lone_surrogate(text: str) -> bool:
    r"""Return True if the text holds half of a UTF-16 pair, as JSON's `\\ud83d` alone."""
    return _LONE.search(text) is not None


def has_word(text: str, word: str) -> bool:
    """Return True if the text has a word, or words, that are no part of others."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def short(text: str) -> str:
    """Return the text's beginning in quotes, on one line."""
    text = " ".join(text.split())
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
