"""The one reader of JSON and the one of YAML: texts that strangers may have written, with bounds on what they become.

Python's JSON reader and PyYAML end deep nesting in a `RecursionError` and long numbers in words about Python; a few
lines of YAML aliases stand for more nodes than fit a memory. Here each of them is an error of one line.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dit_lora.errors import DitLoraError

MOST_LEVELS = 100
"""Lists and objects within one another. Those of recipes, annotations and checkpoints have a dozen at most."""
MOST_NODES = 100_000
"""The most nodes of a YAML text, an alias counted as what it stands for."""
MOST_YAML = 1_000_000
"""Characters of a YAML text, which PyYAML reads slowly."""
MOST_DIGITS = 100
"""The most digits of a whole number: no float holds four times as many, and Python refuses to write four thousand."""

_DEEP = f"it is nested deeper than {MOST_LEVELS} levels"
_LONG = f"it holds a whole number of more than {MOST_DIGITS} digits"


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ParseError(_LONG)
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


class ParseError(DitLoraError, ValueError):
    """Says what is wrong with a text, in one line: where nobody knows better what to do, the user reads that."""

    def __init__(self, words: str, *, at: int | None = None, where: str = "") -> None:
        super().__init__(f"{words}{where}")
        self.words = words
        self.at = at
        """The place of the character in the text, where it is known."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raises `ParseError`, also for what is not UTF-8."""
    try:
        if isinstance(text, bytes):
            # Some editors begin UTF-8 with a byte order mark, which JSON does not allow.
            text = text.decode("utf-8-sig")
        value = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        where = f": line {error.lineno} column {error.colno} (char {error.pos})"
        raise ParseError(error.msg, at=error.pos, where=where) from error
    except (RecursionError, ValueError) as error:
        raise _refused(error) from error
    _require_shallow(value, text)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at `start`, and where it ends; raises `ParseError` with its place."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ParseError(error.msg, at=error.pos) from error
    except (RecursionError, ValueError) as error:
        raise _refused(error, start) from error
    _require_shallow(value, text, start)
    return value, end


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raises `OSError`, or `ParseError` that names the file."""
    try:
        return parse_json(path.read_bytes())
    except ParseError as error:
        raise ParseError(f"{path} is not valid JSON: {error}") from error


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text by the safe tags; raises `ParseError`.

    Keys that are given twice, of which YAML would keep the last, are refused; so are texts that are no Unicode.
    """
    if len(text) > MOST_YAML:
        raise ParseError(f"it has {len(text):,} characters, and {MOST_YAML:,} are read at most")
    try:
        _require_few(text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ParseError(" ".join(str(error).split())) from error
    except (RecursionError, OverflowError, TypeError, ValueError) as error:
        raise _refused(error) from error  # also of a number or a date that is none


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file; raises `OSError`, or `ParseError` that names the file."""
    try:
        with path.open(encoding="utf-8") as file:
            return parse_yaml(file.read(MOST_YAML + 1))
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not UTF-8 text: {error}") from error
    except ParseError as error:
        raise ParseError(f"{path} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice."""

    # The anchor is a name or None; the type is that of PyYAML's stubs.
    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted(value for (_, value), count in Counter(keys).items() if count > 1)
        if twice:
            words = f"given twice: {', '.join(twice)}"
            raise yaml.composer.ComposerError(None, None, words, node.start_mark)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MOST_DIGITS:  # in any base
            raise ParseError(_LONG)
        value: int = super().construct_yaml_int(node)
        if not -(2**63) <= value < 2**63:
            raise ParseError(f"{value} does not fit 64 bits, as counts and seeds must")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refused(error: Exception, at: int | None = None) -> ParseError:
    if isinstance(error, ParseError):
        return error
    words = _DEEP if isinstance(error, RecursionError) else " ".join(str(error).split())
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
    raise ParseError(_DEEP, at=start)


def _inner(value: object) -> Iterator[object]:
    """Yield the lists and objects in a value."""
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    for item in items:
        if isinstance(item, list | dict):
            yield item


@dataclass
class _Open:
    """A list or mapping of a YAML text that has not ended."""

    anchor: str | None
    before: int
    """Number of nodes before it."""
    levels: int = 1
    """Number of its levels: its own, and those of the deepest in it."""


def _require_few(text: str) -> None:
    """Count levels and nodes as the text's events come, before anything is built of them; raises `ParseError`."""
    sizes: dict[str | None, tuple[int, int]] = {}
    """The nodes and levels that an alias stands for, by anchor."""
    around: list[_Open] = []
    count = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        nodes, levels = 1, 0
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (collection.anchor for collection in around):
                raise ParseError(f"*{event.anchor} stands for what it is in itself")
            nodes, levels = sizes.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = (1, 0)
            _require_unicode(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            around.append(_Open(event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = around.pop()
            sizes[ended.anchor] = (count - ended.before, ended.levels)
            nodes, levels = 0, ended.levels
        else:
            continue
        count += nodes
        if around:
            around[-1].levels = max(around[-1].levels, 1 + levels)
        if len(around) + levels > MOST_LEVELS:
            raise ParseError(_DEEP)
        if count > MOST_NODES:
            raise ParseError(
                f"it has more than {MOST_NODES:,} values, its aliases counted as what they stand for"
            )


def _require_unicode(value: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ParseError(f"a value holds half of a UTF-16 pair: {value[:80]!a}") from None
