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


def encoding_hint(error: Exception) -> str:
    """Return which encoding a text seems to have that is no UTF-8, and how to convert it; empty for any other error."""
    if not isinstance(error, UnicodeDecodeError):
        return ""
    start = error.object[:2]
    encoding = "UTF-16" if start in (b"\xff\xfe", b"\xfe\xff") else "Windows-1252"
    command = f"iconv -f {encoding.replace('Windows-', 'CP')} -t UTF-8 OLD > NEW"
    return f"; it is probably {encoding}: save it as UTF-8, for example with {command}"


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
