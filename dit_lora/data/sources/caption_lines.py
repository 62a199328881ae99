"""Edits one value in a line of JSON, and leaves every other character of the line unchanged."""

import json
import re

from dit_lora.data.sources.caption_text import has_lone_surrogate
from dit_lora.parsing import parse_json_at

_SPACE = re.compile(r"[ \t\r\n]*")


def json_text(value: object) -> str:
    """JSON in readable UTF-8; with escapes if it has lone surrogates, as file names that are not UTF-8 do."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if has_lone_surrogate(text) else text


def set_value(line: str, key: str, value: str) -> str:
    """Set a key of a line that contains one JSON object; a missing key is added at the end of the object."""
    at = _skip_space(line, _skip_space(line, 0) + 1)
    is_empty = line[at] == "}"
    span, end = None, at
    while line[at] != "}":
        name, at = parse_json_at(line, at)
        start = _skip_space(line, _skip_space(line, at) + 1)  # after the colon
        _, end = parse_json_at(line, start)
        if name == key:
            span = (start, end)  # JSON readers use the last of several equal keys
        at = _skip_space(line, end)
        if line[at] == ",":
            at = _skip_space(line, at + 1)
    if span is not None:
        return f"{line[: span[0]]}{json_text(value)}{line[span[1] :]}"
    comma = "" if is_empty else ", "
    return f"{line[:end]}{comma}{json_text(key)}: {json_text(value)}{line[end:]}"


def _skip_space(line: str, at: int) -> int:
    """Position of the next character that is not white space."""
    match = _SPACE.match(line, at)
    return at if match is None else match.end()
