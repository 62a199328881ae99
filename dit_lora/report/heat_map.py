"""Statistics of modules over steps: a row a block or a kind of layer, a column a step; page.js draws them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dit_lora.report.charts import number

STEPS = 96
"""Columns at most; of more steps every second is left out, and again."""
ROWS = 96
"""Rows at most of one picture; the last ones are left out."""
STATISTICS = {
    "grad_norm": "gradient norm",
    "update_ratio": "update / weight",
    "abs_max": "largest output",
}
"""Of `numerics.monitor`, with their names."""
_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Values = dict[str, dict[str, float]]
"""By row and statistic."""


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
    """One statistic by row and step, between `low` and `high` on a logarithmic scale; NaN where there is none."""

    grouping: str
    statistic: str
    steps: Sequence[int]
    rows: Mapping[str, Sequence[float]]
    low: float
    high: float

    @property
    def scale(self) -> list[str]:
        """The values at the beginning, the middle and the end of the scale."""
        return [number(self.low * (self.high / self.low) ** part, 2) for part in (0, 0.5, 1)]

    @property
    def named_steps(self) -> list[int]:
        """The first step, the one in the middle and the last, as far as they differ."""
        last = len(self.steps) - 1
        return [self.steps[at] for at in sorted({0, (last + 1) // 2, last})]

    @property
    def has_not_finite(self) -> bool:
        return any(math.isinf(value) for row in self.rows.values() for value in row)

    def data(self) -> dict[str, object]:
        """Return what page.js reads."""
        values = [[_cell(value) for value in row] for row in self.rows.values()]
        return {
            "steps": self.steps,
            "rows": list(self.rows),
            "values": values,
            "low": self.low,
            "high": self.high,
        }


def heat_maps(history: ModuleHistory) -> list[HeatMap]:
    """Return a map for each grouping and statistic that has a value."""
    groupings = {"by block": history.by_block, "by layer": history.by_layer}
    maps = []
    for grouping, columns in groupings.items():
        for statistic, name in STATISTICS.items():
            rows = _rows(columns, statistic)
            if rows:
                maps.append(HeatMap(grouping, name, history.steps, rows, *_scale(rows)))
    return maps


def _scale(rows: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the least and the greatest positive value, at most nine decades apart."""
    drawn = [v for row in rows.values() for v in row if math.isfinite(v) and v > 0]
    high = max(drawn, default=1.0)
    return max(min(drawn, default=1.0), high * 1e-9), high


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


def _rows(columns: Sequence[Values], statistic: str) -> dict[str, list[float]]:
    """Return one list a row, NaN where a step has no value."""
    names = dict.fromkeys(
        name for column in columns for name, values in column.items() if statistic in values
    )
    return {
        name: [column.get(name, {}).get(statistic, math.nan) for column in columns]
        for name in list(names)[:ROWS]
    }


def _cell(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"
