"""Formats text for a card: on one line, with Markdown escaped."""

import re

from dit_lora.redact import redacted_words

# Characters with a meaning in Markdown, tables or HTML.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&])")


def plain(text: object) -> str:
    """The text on one line, escaped so that Markdown shows it literally in paragraphs and tables."""
    return _SPECIAL.sub(r"\\\1", redacted_words(one_line(str(text))))


def one_line(text: str) -> str:
    """The text with every sequence of whitespace replaced by one space."""
    return " ".join(text.split())
