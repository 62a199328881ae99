"""Checks that a caption, question or answer is trainable text; used by the audit and by training."""

import re

MAX_CAPTION_CHARS = 100_000
"""Maximum length of a caption in characters: hundreds of times the limit of any supported text encoder."""
MAX_CAPTION_BYTES = 4 * MAX_CAPTION_CHARS
"""Maximum size of a caption file in bytes, at 4 bytes per character in UTF-8; no more is read."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Printable according to Python, but blank in every font: Hangul fillers, and Braille without a dot.
_INVISIBLE_CHARS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_MAX_QUOTED_CHARS = 80

Fault = tuple[str, str]
"""A code of the audit, and a message."""


def find_caption_fault(caption: str) -> Fault | None:
    """Why nothing can be learned from a caption, or no tokenizer accepts it; None if it can be used."""
    if is_blank(caption):
        return "caption_empty", "its caption is empty"
    if has_lone_surrogate(caption):
        message = "its caption contains half of a UTF-16 pair, which tokenizers reject"
        return "caption_not_text", f"{message}: {quote_text_start(caption)}"
    if len(caption) > MAX_CAPTION_CHARS:
        return make_too_long_fault(f"{len(caption):,} characters")
    return None


def make_too_long_fault(length: str) -> Fault:
    """Create the fault of a caption that is too long to be tokenized at all."""
    return "caption_long", f"its caption has {length}, more than the limit of {MAX_CAPTION_CHARS:,}"


def suggest_encoding(error: Exception) -> str:
    """The probable encoding of a text that is not UTF-8, and how to convert it; empty for any other error."""
    if not isinstance(error, UnicodeDecodeError):
        return ""
    # UTF-16 files usually begin with a byte order mark.
    encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "Windows-1252"
    command = f"iconv -f {encoding.replace('Windows-', 'CP')} -t UTF-8 OLD > NEW"
    return f"; it is probably {encoding}: save it as UTF-8, for example with {command}"


def is_blank(text: str) -> bool:
    """True if the text has no visible character."""
    return not any(char.isprintable() and not char.isspace() and char not in _INVISIBLE_CHARS for char in text)


def has_lone_surrogate(text: str) -> bool:
    r"""True if the text contains half of a UTF-16 pair, as from the JSON `\\ud83d` without its second half."""
    return _LONE_SURROGATE.search(text) is not None


def has_word(text: str, word: str) -> bool:
    """True if the text contains the word (or words), not as part of a longer word."""
    # Not `\b`, because the word may begin or end with a character that is not a letter.
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def quote_text_start(text: str) -> str:
    """Quote the beginning of a text on one line."""
    text = " ".join(text.split())
    return repr(text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "…")
