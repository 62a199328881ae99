"""Text in a card: on one line, and shown as it is."""

import re

from dit_lora.redact import redacted_words

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&])")


def plain(text: object) -> str:
    """Return the text on one line that Markdown shows as it is, in a paragraph and in a table."""
    return _SPECIAL.sub(r"\\\1", redacted_words(one_line(str(text))))


def one_line(text: str) -> str:
    """Return the text with every run of spaces and line breaks as one space."""
    return " ".join(text.split())
