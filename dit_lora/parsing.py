"""Parse JSON from untrusted sources, with limits on depth and digits.

Python's parser reports deep nesting as a `RecursionError` and long numbers with messages about Python. Here each of
these is a one-line error. Uses only the standard library; `config.yaml_parsing` does the same for YAML.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dit_lora.errors import DitLoraError

MAX_LEVELS = 100
"""Maximum depth of lists and objects. Recipes, annotations and checkpoints have at most a dozen levels."""
MAX_DIGITS = 100
"""Maximum digits of an integer: floats have up to 309, and Python does not convert more than 4,300 to text."""

DEPTH_MESSAGE = f"it is nested deeper than {MAX_LEVELS} levels"
DIGITS_MESSAGE = f"it holds a whole number of more than {MAX_DIGITS} digits"


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ParseError(DIGITS_MESSAGE)
    return int(digits)


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # If keys are equal, the last one remains.
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in value if names.count(name) > 1)
        raise ParseError(f"it holds {duplicate[:80]!r} twice")
    return value


# `json.loads` would make a decoder for each call, which takes as long as to parse a line of a table.
_DECODER = json.JSONDecoder(parse_int=_parse_integer)


class ParseError(DitLoraError, ValueError):
    """Raised if JSON cannot be parsed or has the wrong types. Its message is one line, fit to show to the user."""

    def __init__(self, message: str, *, position: int | None = None, location: str = "") -> None:
        super().__init__(f"{message}{location}")
        self.message = message
        self.position = position
        """Index of the character in the text; None if unknown."""


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse a JSON text; raises `ParseError`, also for text that is not UTF-8.

    With `unique`, duplicate keys in an object are an error; without, the last one counts, as in most parsers.
    """
    try:
        if isinstance(text, bytes):
            # Some editors write a byte order mark before UTF-8, which JSON does not allow.
            text = text.decode("utf-8-sig")
        if unique:
            value = json.loads(text, parse_int=_parse_integer, object_pairs_hook=_require_unique_keys)
        else:
            value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f": line {error.lineno} column {error.colno} (char {error.pos})"
        # The position is kept separately, for callers that parse a part of a larger text.
        raise ParseError(error.msg, position=error.pos, location=where) from error
    except (RecursionError, ValueError) as error:
        raise convert_to_parse_error(error) from error
    _require_max_json_depth(value, text)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that starts at index `start`; also returns the index after it. Raises `ParseError`."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ParseError(error.msg, position=error.pos) from error
    except (RecursionError, ValueError) as error:
        raise convert_to_parse_error(error, start) from error
    _require_max_json_depth(value, text, start)
    return value, end


def convert_to_parse_error(error: Exception, position: int | None = None) -> ParseError:
    if isinstance(error, ParseError):
        return error
    message = DEPTH_MESSAGE if isinstance(error, RecursionError) else " ".join(str(error).split())
    return ParseError(message, position=position)


def _require_max_json_depth(value: object, text: str, start: int = 0) -> None:
    # Most texts have fewer brackets than the allowed levels, and need no check.
    if text.count("[", start) + text.count("{", start) <= MAX_LEVELS:
        return
    # Breadth first, without recursion: a value that is too deep cannot exhaust the stack.
    level = [value]
    for _ in range(MAX_LEVELS):
        level = [inner for outer in level for inner in _iterate_nested(outer)]
        if not level:
            return
    raise ParseError(DEPTH_MESSAGE, position=start)


def _iterate_nested(value: object) -> Iterator[object]:
    """Yield the lists and objects that are direct elements of a parsed JSON value."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        if isinstance(item, list | dict):
            yield item
