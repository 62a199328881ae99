"""Formats text for a card: on one line, with Markdown escaped."""

import re

from dit_lora.redact import redact_model_text

# Characters with a meaning in Markdown, tables or HTML.
_MARKDOWN_CHARACTERS = re.compile(r"([\\`*_\[\]<>|~$&])")


def escape_markdown(text: object) -> str:
    """The text on one line, escaped so that Markdown shows it literally in paragraphs and tables."""
    return _MARKDOWN_CHARACTERS.sub(r"\\\1", redact_model_text(collapse_whitespace(str(text))))


def collapse_whitespace(text: str) -> str:
    """The text with every sequence of whitespace replaced by one space."""
    return " ".join(text.split())
