"""Rows of a long benchmark in a file of JSON lines, so that a stopped run goes on where it was."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class StoredRows:
    """Rows by key, kept in `path` if there is one."""

    path: Path | None
    minutes: float | None = None
    """Time after which no further row is computed; None for no limit."""
    rows: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    _began: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            self.rows[row["key"]] = row

    @property
    def is_time_over(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._began > 60 * self.minutes

    def has(self, *key: object) -> bool:
        return _join_key(key) in self.rows

    def get(self, *key: object) -> dict[str, Any]:
        return self.rows[_join_key(key)]

    def add(self, key: Sequence[object], row: dict[str, Any]) -> None:
        row = {"key": _join_key(key), **row}
        self.rows[row["key"]] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _join_key(key: Sequence[object]) -> str:
    return "/".join(map(str, key))
