"""Statistics of modules over steps: a row a block or a kind of layer, a column a step; page.js draws them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 96
"""Columns at most; of more steps every second is left out, and again."""
ROWS = 96
"""Rows at most of one picture; the last ones are left out."""
STATISTICS = {
    "grad_norm": "gradient norm",
    "update_ratio": "update / weight",
    "abs_max": "largest output",
}
"""Statistics of `numerics.monitor`, with their names."""
_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Values = dict[str, dict[str, float]]
"""Values by row and statistic."""


@dataclass
class ModuleHistory:
    """At most `STEPS` steps of joined statistics, evenly spread over those that had any."""

    steps: list[int] = field(default_factory=list)
    by_block: list[Values] = field(default_factory=list)
    by_layer: list[Values] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, step: int, modules: Mapping[str, Any]) -> None:
        """Add a step: a row has its modules' joined norm, and their largest ratio and output; null was not finite."""
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        self.steps.append(step)
        self.by_block.append(_joined(modules, _block))
        self.by_layer.append(_joined(modules, _layer))
        if len(self.steps) > STEPS:
            self._every *= 2
            for kept in (self.steps, self.by_block, self.by_layer):
                del kept[1::2]

    def drop(self, step: int) -> None:
        """Forget a step and those after it."""
        while self.steps and self.steps[-1] >= step:
            for kept in (self.steps, self.by_block, self.by_layer):
                kept.pop()
            self._seen -= self._every


@dataclass(frozen=True)
class HeatMap:
    """One statistic by row and step: null where there is none, and in words where it was not finite."""

    grouping: str
    statistic: str
    steps: Sequence[int]
    rows: Sequence[str]
    values: Sequence[Sequence[float | str | None]]


def heat_maps(history: ModuleHistory) -> list[HeatMap]:
    """Return a map for each grouping and statistic that has a value."""
    groupings = {"by block": history.by_block, "by layer": history.by_layer}
    maps = []
    for grouping, columns in groupings.items():
        for statistic, name in STATISTICS.items():
            filled = (row for column in columns for row in column if statistic in column[row])
            rows = list(dict.fromkeys(filled))[:ROWS]
            values = [
                [_cell(column.get(row, {}).get(statistic)) for column in columns] for row in rows
            ]
            if rows:
                maps.append(HeatMap(grouping, name, history.steps, rows, values))
    return maps


def _block(module: str) -> str:
    block = _BLOCK.match(module)
    return block[1] if block else module.partition(".")[0]


def _layer(module: str) -> str:
    return _NUMBER.sub("*", module)


def _joined(modules: Mapping[str, Any], row_of: Callable[[str], str]) -> Values:
    joined: Values = {}
    for module, statistics in modules.items():
        if not isinstance(statistics, dict):
            continue
        row = joined.setdefault(row_of(module), {})
        for name in STATISTICS:
            if name not in statistics:
                continue
            logged = statistics[name]
            value = float(logged) if isinstance(logged, int | float) else math.inf
            before = row.get(name, 0.0)
            both = math.hypot(before, value) if name == "grad_norm" else max(before, value)
            row[name] = math.inf if math.isnan(both) else both
    return joined


def _cell(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"
