"""Edits one value in a line of JSON, and leaves every other character of the line unchanged."""

import json
import re

from dit_lora.data.sources.caption_text import has_lone_surrogate
from dit_lora.parsing import parse_json_at

_WHITESPACE = re.compile(r"[ \t\r\n]*")


def to_json_text(value: object) -> str:
    """Convert a value to JSON in readable UTF-8; with escapes if it has lone surrogates, as file names may have."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if has_lone_surrogate(text) else text


def set_json_value(line: str, key: str, value: str) -> str:
    """Set a key in a line that contains one JSON object; a missing key is added at the end of the object."""
    position = _skip_space(line, _skip_space(line, 0) + 1)
    # An empty object needs no comma before the new key.
    is_empty = line[position] == "}"
    span, end = None, position
    while line[position] != "}":
        name, position = parse_json_at(line, position)
        start = _skip_space(line, _skip_space(line, position) + 1)
        _, end = parse_json_at(line, start)
        if name == key:
            # JSON readers use the last of several equal keys.
            span = (start, end)
        position = _skip_space(line, end)
        if line[position] == ",":
            position = _skip_space(line, position + 1)
    if span is not None:
        return f"{line[: span[0]]}{to_json_text(value)}{line[span[1] :]}"
    comma = "" if is_empty else ", "
    return f"{line[:end]}{comma}{to_json_text(key)}: {to_json_text(value)}{line[end:]}"


def _skip_space(line: str, position: int) -> int:
    match = _WHITESPACE.match(line, position)
    return position if match is None else match.end()
