"""Read a run's JSON-lines files incrementally and store them as numbers, in bounded memory."""

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
    iterate_bounded_lines,
    open_file_inside_folder,
    parse_json_object,
)
from dit_lora.report.charts.heat_map import ModuleHistory

GROUP_FIELDS = ("lr_groups", "grad_norm_groups", "loss_by_timestep", "loss_by_media", "drawn_by_timestep")
"""Fields of metrics.jsonl that are dicts of values by name."""
_SCALAR_FIELDS = ("loss", "grad_norm", "seconds", "data_seconds", "peak_gib", "samples")
_MAX_NAMES = 24  # maximum names in one field; a run has 20 timestep ranges, and fewer than ten names in others
_MAX_STEP = 2**53
_NUM_COMPARED_BYTES = 64  # bytes before the read position, compared to detect that the file was replaced


class JsonLinesReader:
    """Incremental reader of a JSON-lines file.

    It returns each object once, and all of them again after the file was replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_last_line_incomplete = False
        self.damaged_lines: list[int] = []
        """Numbers of the complete lines that are not JSON objects."""
        self.read_error = ""
        """The reason why the file cannot be read; empty if it can."""
        self._offset = 0
        self._num_lines = 0
        self._last_bytes = b""

    def reset_if_replaced(self) -> bool:
        """True if the JSON-lines file was replaced since it was read.

        The next `read_new_lines` then start at its first line.
        """
        try:
            with open_file_inside_folder(self.path.parent, self.path, MAX_LINES_BYTES) as file:
                # The bytes just before the read position differ if another file is in its place.
                file.seek(self._offset - len(self._last_bytes))
                if file.read(len(self._last_bytes)) == self._last_bytes:
                    return False
        except OSError:
            # Nothing was read so far, so a missing file is not a replaced one.
            if self._offset == 0:
                return False
        self._offset, self._num_lines, self._last_bytes = 0, 0, b""
        self.damaged_lines, self.is_last_line_incomplete = [], False
        return True

    def read_new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that were added to the file since the last call, as dicts.

        The iterator must be exhausted.
        """
        try:
            file = open_file_inside_folder(self.path.parent, self.path, MAX_LINES_BYTES)
        except FileNotFoundError:
            self.read_error = ""
            return
        except OSError as error:
            self.read_error = f"Cannot read {self.path.name}: {error.strerror}."
            return
        self.read_error = ""
        with file:
            file.seek(self._offset)
            self.is_last_line_incomplete = False
            for line in iterate_bounded_lines(file):
                # The line is still being written; read it again next time.
                # A piece of a longer line also lacks its end, but has the maximum length.
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    self.is_last_line_incomplete = True
                    return
                self._offset += len(line)
                # Remember the end of the line, to recognise the file at the next read.
                self._last_bytes = line[-_NUM_COMPARED_BYTES:]
                self._num_lines += 1
                record = parse_json_object(line)
                if record is None:
                    self.damaged_lines.append(self._num_lines)
                else:
                    yield record

    def describe_problems(self, *, is_running: bool) -> Iterator[str]:
        """Yield messages about unreadable lines; with `is_running`, an incomplete last line is normal."""
        name = self.path.name
        if self.read_error:
            yield self.read_error
        if self.is_last_line_incomplete and not is_running:
            yield f"The last line of {name} is incomplete and ignored: the run was stopped while writing it."
        for number in self.damaged_lines[:8]:
            yield f"Line {number} of {name} is not a JSON object and is ignored."
        if self.damaged_lines[8:]:
            yield f"{len(self.damaged_lines) - 8:,} more lines of {name} are ignored."


@dataclass
class MetricColumns:
    """The content of metrics.jsonl as columns of float64, NaN for steps without a value."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    columns: "dict[tuple[str, str], array[float]]" = field(default_factory=dict)
    """Columns by field, and by the name within one of `GROUP_FIELDS`; the name is empty for plain fields."""
    modules: ModuleHistory = field(default_factory=ModuleHistory)

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl.

        It replaces the earlier lines of the same step and of later ones, which a resumed run repeats.
        """
        step = line.get("step")
        if not isinstance(step, int) or not 0 <= step < _MAX_STEP:
            return
        # A resumed run repeats steps, so drop the earlier values of this step and of later ones.
        if self.steps and step <= self.steps[-1]:
            num_kept = bisect_left(self.steps, step)
            del self.steps[num_kept:]
            for column in self.columns.values():
                del column[num_kept:]
            self.modules.drop_steps_from(step)
        for key in _SCALAR_FIELDS:
            # A missing field becomes NaN.
            self._append_value((key, ""), line.get(key))
        for key in GROUP_FIELDS:
            for name, value in ensure_dict(line.get(key)).items():
                self._append_value((key, str(name)), value)
        self.steps.append(step)
        for column in self.columns.values():
            # This line had no value for the column.
            if len(column) < len(self.steps):
                column.append(math.nan)
        if "modules" in line:
            self.modules.add_step(step, ensure_dict(line["modules"]))

    def get_metric_column(self, key: str) -> "array[float]":
        """Values of a field of metrics.jsonl, one per step."""
        return self.columns.get((key, "")) or array("d", [math.nan]) * len(self.steps)

    def get_grouped_columns(self, key: str) -> "dict[str, array[float]]":
        """Columns of a field of metrics.jsonl by name, in the order of appearance."""
        return {name: column for (field_name, name), column in self.columns.items() if field_name == key and name}

    def _append_value(self, key: tuple[str, str], value: Any) -> None:
        if key not in self.columns:
            # A damaged or hostile file could have a new name in every line.
            if key[1] and len(self.get_grouped_columns(key[0])) >= _MAX_NAMES:
                return
            self.columns[key] = array("d", [math.nan]) * len(self.steps)
        self.columns[key].append(to_float_or_nan(value))


def ensure_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def get_diagnosis(event: Mapping[str, Any]) -> dict[str, Any]:
    """A guard event's diagnosis. In events.jsonl its key is `verdict`, and its message is called `words`."""
    return ensure_dict(event.get("verdict"))


def to_float_or_nan(value: Any) -> float:
    # In Python, True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    # An integer with more than about 308 digits.
    except OverflowError:
        return math.nan
