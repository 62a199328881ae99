"""Module statistics over steps: one row per block or kind of layer, one column per step; page.js draws them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 96
"""Maximum number of columns. Beyond it, every second step is dropped, repeatedly."""
MAX_ROWS = 96
"""Maximum number of rows of one heat map; further rows are dropped."""
STATISTICS = {"grad_norm": "gradient norm", "update_ratio": "update / weight", "abs_max": "largest output"}
"""Statistics of `numerics.monitor`, with their names."""
# Everything up to the first number, such as `transformer_blocks.12`.
_BLOCK_PATTERN = re.compile(r"^(.*?\.\d+)(?:\.|$)")
# A path component that is only digits.
_NUMBER_PATTERN = re.compile(r"(?<=\.)\d+(?=\.|$)")

RowStatistics = dict[str, dict[str, float]]
"""Values by row and statistic."""


@dataclass
class ModuleHistory:
    """Per-module statistics of at most `MAX_STEPS` steps for heat maps, evenly spaced over the steps that have any."""

    steps: list[int] = field(default_factory=list)
    by_block: list[RowStatistics] = field(default_factory=list)
    by_layer: list[RowStatistics] = field(default_factory=list)
    _step_interval: int = 1
    _num_steps_seen: int = 0

    def add_step(self, step: int, modules: Mapping[str, Any]) -> None:
        """Add a step to the heat maps.

        A row combines its modules: joint norm, largest ratio and output. null is a non-finite value.
        """
        # Counts every step offered, also those that are not recorded.
        self._num_steps_seen += 1
        if (self._num_steps_seen - 1) % self._step_interval:
            return
        self.steps.append(step)
        self.by_block.append(_combine_module_statistics(modules, _find_block_name))
        self.by_layer.append(_combine_module_statistics(modules, lambda module: _NUMBER_PATTERN.sub("*", module)))
        # Halve the resolution: drop every second column, and from now on record only every second step.
        if len(self.steps) > MAX_STEPS:
            self._step_interval *= 2
            for columns in (self.steps, self.by_block, self.by_layer):
                del columns[1::2]

    def drop_steps_from(self, step: int) -> None:
        """Remove a step and the later ones from the heat maps."""
        # A resumed run repeats steps: remove what it will report again.
        while self.steps and self.steps[-1] >= step:
            for columns in (self.steps, self.by_block, self.by_layer):
                columns.pop()
            # Each recorded column stands for this many steps.
            self._num_steps_seen -= self._step_interval


@dataclass(frozen=True)
class HeatMap:
    """One statistic by heat map row and step: None if missing, a text if it was not finite."""

    grouping: str
    statistic: str
    steps: Sequence[int]
    rows: Sequence[str]
    values: Sequence[Sequence[float | str | None]]


def build_heat_maps(history: ModuleHistory) -> list[HeatMap]:
    """Heat map data: one map for each grouping of modules and each statistic that has a value."""
    groupings = {"by block": history.by_block, "by layer": history.by_layer}
    maps = []
    for grouping, columns in groupings.items():
        for statistic, name in STATISTICS.items():
            # Rows in order of first appearance. A column lacks rows whose modules had no value at that step.
            filled = (row for column in columns for row in column if statistic in column[row])
            rows = list(dict.fromkeys(filled))[:MAX_ROWS]
            values = [[_format_cell(column.get(row, {}).get(statistic)) for column in columns] for row in rows]
            if rows:
                maps.append(HeatMap(grouping, name, history.steps, rows, values))
    return maps


def _find_block_name(module: str) -> str:
    # Modules outside numbered blocks are grouped by their first component.
    block = _BLOCK_PATTERN.match(module)
    return block[1] if block else module.partition(".")[0]


def _combine_module_statistics(modules: Mapping[str, Any], get_row_name: Callable[[str], str]) -> RowStatistics:
    joined: RowStatistics = {}
    for module, statistics in modules.items():
        if not isinstance(statistics, dict):
            continue
        row = joined.setdefault(get_row_name(module), {})
        for name in STATISTICS:
            if name not in statistics:
                continue
            # JSON has no NaN or infinity: null in the file stands for them.
            logged = statistics[name]
            value = float(logged) if isinstance(logged, int | float) else math.inf
            previous = row.get(name, 0.0)
            # The joint norm of several tensors is the root of the sum of their squared norms.
            combined = math.hypot(previous, value) if name == "grad_norm" else max(previous, value)
            # Inf marks a value that is not finite, since max() and comparisons do not propagate NaN reliably.
            row[name] = math.inf if math.isnan(combined) else combined
    return joined


def _format_cell(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"
