"""Parse YAML from untrusted sources, with limits on depth, digits and number of nodes.

PyYAML reports deep nesting as a `RecursionError` and long numbers with messages about Python, and a few lines of
aliases can stand for more nodes than fit into memory. Here each of these is a one-line error.
"""

from collections import Counter
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import yaml

from dit_lora.files import open_regular_file
from dit_lora.parsing import DEPTH_MESSAGE, DIGITS_MESSAGE, MAX_DIGITS, MAX_LEVELS, ParseError, convert_to_parse_error

MAX_NODES = 100_000
"""Maximum number of nodes; an alias counts as many as the nodes it stands for."""
MAX_YAML_CHARACTERS = 1_000_000
"""Maximum number of characters, because PyYAML is slow."""
MAX_YAML_BYTES = 4 * MAX_YAML_CHARACTERS
"""Maximum size of a YAML file: a character has at most four bytes."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML text with the safe tags; raises `ParseError`.

    Duplicate keys, which YAML would resolve to the last one, and texts that are not Unicode are errors too.
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise ParseError(f"it has {len(text):,} characters, more than the limit of {MAX_YAML_CHARACTERS:,}")
    try:
        _check_document_size(text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ParseError(" ".join(str(error).split())) from error
    except (RecursionError, OverflowError, TypeError, ValueError) as error:
        raise convert_to_parse_error(error) from error  # also raised for invalid numbers and dates


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; raises `OSError` as `open_regular_file` does, or `ParseError` that names the file."""
    try:
        # A named pipe would wait for its writer.
        with TextIOWrapper(open_regular_file(path), encoding="utf-8") as file:
            # One character more than allowed, so that a longer file is refused without being read completely.
            return parse_yaml(file.read(MAX_YAML_CHARACTERS + 1))
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not UTF-8 text: {error}") from error
    except ParseError as error:
        raise ParseError(f"{path} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses duplicate keys."""

    # The anchor is a name or None; the type is that of PyYAML's stubs.
    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Keys by tag and text: `1` and `"1"` are different keys.
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        duplicates = sorted(value for (_, value), count in Counter(keys).items() if count > 1)
        if duplicates:
            message = f"given twice: {', '.join(duplicates)}"
            raise yaml.composer.ComposerError(None, None, message, node.start_mark)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:  # in any base
            raise ParseError(DIGITS_MESSAGE)
        value: int = super().construct_yaml_int(node)
        # Seeds and counts are passed to torch, which has 64-bit integers.
        if not -(2**63) <= value < 2**63:
            raise ParseError(f"{value} does not fit 64 bits, as counts and seeds must")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


@dataclass
class _OpenCollection:
    """A list or mapping of a YAML text whose end has not been reached."""

    anchor: str | None
    num_nodes_before: int
    """Number of nodes before it."""
    depth: int = 1
    """Its depth, including the deepest node inside it."""


def _check_document_size(text: str) -> None:
    """Raise `ParseError` if a document has too many nodes or levels; they are counted before any value is built."""
    sizes: dict[str | None, tuple[int, int]] = {}
    """Numbers of nodes and levels by anchor, for aliases."""
    open_collections: list[_OpenCollection] = []
    count = 0
    # Events come one at a time, so a text is refused before its aliases are expanded.
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        # The number of nodes that this event adds, and its depth.
        nodes, levels = 1, 0
        if isinstance(event, yaml.AliasEvent):
            # An alias inside the collection that it names: the value would contain itself.
            if event.anchor in (collection.anchor for collection in open_collections):
                raise ParseError(f"*{event.anchor} refers to a value that contains it")
            # An undefined alias is counted as one node; PyYAML reports it.
            nodes, levels = sizes.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = (1, 0)
            _require_unicode(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(_OpenCollection(event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            # Its nodes were counted one by one, so only its depth is passed on.
            ended = open_collections.pop()
            sizes[ended.anchor] = (count - ended.num_nodes_before, ended.depth)
            nodes, levels = 0, ended.depth
        else:
            continue
        count += nodes
        if open_collections:
            open_collections[-1].depth = max(open_collections[-1].depth, 1 + levels)
        # An alias adds the levels of the nodes that it stands for.
        if len(open_collections) + levels > MAX_LEVELS:
            raise ParseError(DEPTH_MESSAGE)
        if count > MAX_NODES:
            raise ParseError(f"it has more than {MAX_NODES:,} values, with aliases expanded")


def _require_unicode(value: str) -> None:
    if value.isascii():
        return
    try:
        # Fails for surrogates, which `\ud800` in a quoted text creates.
        value.encode()
    except UnicodeEncodeError:
        raise ParseError(f"a value contains half of a UTF-16 pair: {value[:80]!a}") from None
