"""The one reader of JSON: texts that strangers may have written, with bounds on what they become.

Python's own ends deep nesting in a `RecursionError` and long numbers in words about Python. Here each of them is an
error of one line. Needs the standard library alone; `config.yaml_parsing` is the same for YAML.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dit_lora.errors import DitLoraError

MOST_LEVELS = 100
"""Lists and objects within one another. Those of recipes, annotations and checkpoints have a dozen at most."""
MOST_DIGITS = 100
"""The most digits of a whole number: no float holds four times as many, and Python refuses to write four thousand."""

DEEP = f"it is nested deeper than {MOST_LEVELS} levels"
LONG = f"it holds a whole number of more than {MOST_DIGITS} digits"


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ParseError(LONG)
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ParseError(f"it holds {twice[:80]!r} twice")
    return value


_DECODER = json.JSONDecoder(parse_int=_whole)


class ParseError(DitLoraError, ValueError):
    """Says what is wrong with a text, in one line: where nobody knows better what to do, the user reads that."""

    def __init__(self, words: str, *, at: int | None = None, where: str = "") -> None:
        super().__init__(f"{words}{where}")
        self.words = words
        self.at = at
        """The place of the character in the text, where it is known."""


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return the value of a JSON text; raises `ParseError`, also for what is not UTF-8.

    With `unique`, an object that holds a key twice is refused; without, the last one counts, as for most readers.
    """
    try:
        if isinstance(text, bytes):
            # Some editors begin UTF-8 with a byte order mark, which JSON does not allow.
            text = text.decode("utf-8-sig")
        value = json.loads(text, parse_int=_whole, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as error:
        where = f": line {error.lineno} column {error.colno} (char {error.pos})"
        raise ParseError(error.msg, at=error.pos, where=where) from error
    except (RecursionError, ValueError) as error:
        raise refused(error) from error
    _require_shallow(value, text)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at `start`, and where it ends; raises `ParseError` with its place."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ParseError(error.msg, at=error.pos) from error
    except (RecursionError, ValueError) as error:
        raise refused(error, start) from error
    _require_shallow(value, text, start)
    return value, end


def refused(error: Exception, at: int | None = None) -> ParseError:
    if isinstance(error, ParseError):
        return error
    words = DEEP if isinstance(error, RecursionError) else " ".join(str(error).split())
    return ParseError(words, at=at)


def _require_shallow(value: object, text: str, start: int = 0) -> None:
    # Most texts have fewer brackets than levels are allowed, and are not walked.
    if text.count("[", start) + text.count("{", start) <= MOST_LEVELS:
        return
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise ParseError(DEEP, at=start)


def _inner(value: object) -> Iterator[object]:
    """Yield the lists and objects in a value."""
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    for item in items:
        if isinstance(item, list | dict):
            yield item
