"""The lines of a run's files as numbers, read on from where the last reading ended; bounded, however long the run."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.files import (
    MAX_LINE_BYTES,
    MAX_LINES_BYTES,
    bounded_lines,
    json_object,
    open_inside,
)
from dit_lora.report.charts.heat_map import ModuleHistory

GROUPS = ("lr_groups", "grad_norm_groups", "loss_by_timestep", "loss_by_media", "drawn_by_timestep")
"""Fields of a line of metrics.jsonl that hold values by name."""
_PLAIN = ("loss", "grad_norm", "seconds", "data_seconds", "peak_gib", "samples")
_NAMES = 24  # of one of them; a run has 20 ranges of timesteps, and of others fewer than ten
_LARGEST_STEP = 2**53
_KNOWN = 64  # bytes before the place of reading, to see that the file is still the same


class Tail:
    """The objects of a JSON-lines file, each given once, and anew after the file was written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        """True if the last line is not whole."""
        self.bad: list[int] = []
        """Numbers of the whole lines that are no object."""
        self.refused = ""
        """Why the file is not read; empty if it is."""
        self._offset = 0
        self._lines = 0
        self._last = b""

    def is_anew(self) -> bool:
        """Return whether the file was replaced since it was read; the next `lines` then start at its first line."""
        try:
            with open_inside(self.path.parent, self.path, MAX_LINES_BYTES) as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) == self._last:
                    return False
        except OSError:
            if self._offset == 0:
                return False
        self._offset, self._lines, self._last, self.bad, self.torn = 0, 0, b"", [], False
        return True

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that have come since; to be read to its end."""
        try:
            file = open_inside(self.path.parent, self.path, MAX_LINES_BYTES)
        except FileNotFoundError:
            self.refused = ""
            return
        except OSError as error:
            self.refused = f"{self.path.name} is not read: {error.strerror}."
            return
        self.refused = ""
        with file:
            file.seek(self._offset)
            self.torn = False
            for line in bounded_lines(file):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    self.torn = True
                    return
                self._offset += len(line)
                self._last = line[-_KNOWN:]
                self._lines += 1
                record = json_object(line)
                if record is None:
                    self.bad.append(self._lines)
                else:
                    yield record

    def notes(self, *, going: bool) -> Iterator[str]:
        """Yield in words what could not be read; a line that is being written is nothing to note."""
        name = self.path.name
        if self.refused:
            yield self.refused
        if self.torn and not going:
            yield (
                f"The last line of {name} is cut off: the run was stopped while writing it. "
                "It is left out."
            )
        for number in self.bad[:8]:
            yield f"Line {number} of {name} is not a JSON object. It is left out."
        if self.bad[8:]:
            yield f"{len(self.bad) - 8:,} more lines of {name} are left out."


@dataclass
class Metrics:
    """metrics.jsonl by column: eight bytes a value, NaN where a step has none."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    columns: "dict[tuple[str, str], array[float]]" = field(default_factory=dict)
    """Curves by key, and by the name within one of `GROUPS`."""
    modules: ModuleHistory = field(default_factory=ModuleHistory)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. It replaces an earlier line of the same step, which a run that resumed has written again."""
        step = line.get("step")
        if not isinstance(step, int) or not 0 <= step < _LARGEST_STEP:
            return
        if self.steps and step <= self.steps[-1]:
            self._drop(step)
        for key in _PLAIN:
            self._put((key, ""), line.get(key))
        for key in GROUPS:
            for name, value in mapping(line.get(key)).items():
                self._put((key, str(name)), value)
        self.steps.append(step)
        for column in self.columns.values():
            if len(column) < len(self.steps):
                column.append(math.nan)
        if "modules" in line:
            self.modules.add(step, mapping(line["modules"]))

    def column(self, key: str) -> "array[float]":
        """Return one value a step."""
        return self.columns.get((key, "")) or array("d", [math.nan]) * len(self.steps)

    def groups(self, key: str) -> "dict[str, array[float]]":
        """Return one column a name, in the order of appearance."""
        return {name: column for (one, name), column in self.columns.items() if one == key and name}

    def _put(self, key: tuple[str, str], value: Any) -> None:
        if key not in self.columns:
            if key[1] and len(self.groups(key[0])) >= _NAMES:
                return
            self.columns[key] = array("d", [math.nan]) * len(self.steps)
        self.columns[key].append(number_or_nan(value))

    def _drop(self, step: int) -> None:
        kept = bisect_left(self.steps, step)
        del self.steps[kept:]
        for column in self.columns.values():
            del column[kept:]
        self.modules.drop(step)


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number_or_nan(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
