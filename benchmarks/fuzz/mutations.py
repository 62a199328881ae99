"""Seeded mutations of a file: of its bytes, and of the values of its JSON."""

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz.parsers import Parser

_TEXTS: tuple[Any, ...] = (
    *(
        "",
        "\0",
        "../../x",
        "a\nerror: b",
        "\ud800",
        "x" * 10_000,
        "torch.nan",
        "/dev/zero",
        "1e999",
    ),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**90, -0.5, 1e308, math.nan, math.inf, [], {}, [None], {"": 0}),
    *([[]], {"a": {"b": []}}, *_TEXTS),
)


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with a key of it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _nodes(value[key])


def _mutate_json(value: Any, parser: Parser, random_: random.Random) -> tuple[Any, str, bool]:
    """Replace, remove or nest a random node; returns the value, the mutation and whether the damage is certain."""
    nodes = list(_nodes(value))
    if not nodes or random_.random() < 0.05:
        replaced = random_.choice(_VALUES)
        return replaced, f"all is {str(replaced)[:20]!r}", False
    container, key = random_.choice(nodes)
    kind = random_.random()
    if kind < 0.1:
        nested: Any = container[key]
        for _ in range(random_.choice((2, 90, 1200))):
            nested = [nested]
        container[key] = nested
        return value, f"{key} is nested", False
    if kind < 0.2:
        del container[key]
        return value, f"{key} is missing", key in parser.required
    container[key] = random_.choice(_VALUES)
    is_certain = key in parser.required and container[key] is None
    return value, f"{key} is {str(container[key])[:20]!r}", is_certain


def _dumped(value: Any, random_: random.Random) -> bytes:
    """Write JSON whose nesting may be deeper than Python's writer goes."""
    sys.setrecursionlimit(5000)
    try:
        text = json.dumps(value)
    finally:
        sys.setrecursionlimit(1000)
    if random_.random() < 0.1 and text.startswith("{") and len(text) > 2:
        # The first key once more, with another value.
        name = json.dumps(next(iter(value)))
        text = f"{{{name}: 7, {text[1:]}"
    return text.encode("utf-8", errors="surrogatepass")


def _mutate_bytes(data: bytes, parser: Parser, random_: random.Random) -> tuple[bytes, str, bool]:
    position = random_.randrange(len(data) + 1)
    kind = random_.choice(("cut", "flip", "insert", "remove", "repeat", "fill"))
    length = random_.choice((1, 2, 8, 100, 5000))
    if kind == "cut":
        # White space at the end is no damage.
        is_certain = parser.cut_is_certain and len(data[position:].strip()) > 0
        return data[:position], f"cut at {position}", is_certain
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(random_.choice((1, 1, 3, 20))):
            if changed:
                changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
        return bytes(changed), "bits flipped", False
    inserted = {
        "insert": random_.randbytes(length),
        "remove": b"",
        "repeat": data[max(0, position - length) : position] * random_.choice((2, 50)),
        "fill": bytes([random_.choice((0, 255, 0x5B, 0x7B, 0x39, 0x2C))]) * length,
    }[kind]
    end = position + (length if kind in ("remove", "fill") else 0)
    return data[:position] + inserted + data[end:], f"{kind} at {position}", False


def _mutate_safetensors(data: bytes, parser: Parser, random_: random.Random) -> tuple[bytes, str, bool]:
    """Change the JSON of the header, and of the JSON texts in its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__")
    if metadata and random_.random() < 0.7:
        key = random_.choice(list(metadata))
        try:
            inner = json.loads(metadata[key])
        except ValueError:
            inner = metadata[key]
        inner, mutation, _ = _mutate_json(inner, parser, random_)
        metadata[key] = _dumped(inner, random_).decode("utf-8", errors="replace")
    else:
        header, mutation, _ = _mutate_json(header, parser, random_)
    text = _dumped(header, random_)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :], f"header: {mutation}", False


def damage(folder: Path, parser: Parser, random_: random.Random) -> tuple[str, bool]:
    """Damage one file of a folder; returns what was done, and whether that is certainly no sound file any more."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    texts = [path for path in files if path.suffix not in (".png",)]
    path = random_.choice(texts or files)
    data = path.read_bytes()
    is_json = path.suffix == ".json"
    if random_.random() < 0.6 and is_json:
        value, mutation, is_certain = _mutate_json(json.loads(data), parser, random_)
        changed = _dumped(value, random_)
    elif random_.random() < 0.6 and path.suffix == ".jsonl" and data.strip():
        lines = data.splitlines()
        at = random_.randrange(len(lines))
        value, mutation, is_certain = _mutate_json(json.loads(lines[at]), parser, random_)
        lines[at] = _dumped(value, random_)
        changed = b"\n".join(lines) + b"\n"
    elif random_.random() < 0.6 and path.suffix == ".safetensors":
        changed, mutation, is_certain = _mutate_safetensors(data, parser, random_)
    else:
        changed, mutation, is_certain = _mutate_bytes(data, parser, random_)
    path.write_bytes(changed)
    return f"{path.relative_to(folder)}: {mutation}", is_certain and changed != data
