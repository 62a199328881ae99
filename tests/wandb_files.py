"""What an offline run of Weights & Biases left in its file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(path: Path) -> Iterator[Any]:
    """Of an offline run's file: LevelDB's log format, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        block_left = 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if block_left < 7 or kind == 0:
            at += block_left
            continue
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


def wandb_starts(folder: Path) -> list[list[Any]]:
    paths = folder.glob("wandb/offline-run-*/*.wandb")
    starts = [list(wandb_records(path)) for path in paths]
    return sorted(starts, key=lambda records: len(records), reverse=True)


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records if record.HasField("history")]
    return [{(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in row} for row in rows]
