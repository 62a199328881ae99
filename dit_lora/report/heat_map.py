"""Statistics of modules over steps as pictures: a row a block or a kind of layer, a column a step, a logarithmic scale."""

import base64
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
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
# matplotlib's viridis at eighths: even in lightness, and told apart by the colour-blind.
_COLORS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
_LEVELS = 240
_ZERO, _BAD, _NONE = 240, 241, 242
_ROW = 15  # pixels of the screen, as the page's style has them

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
        """Norms of one row's modules are joined, of ratios and outputs the largest counts; null was not finite."""
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


def heat_maps(history: ModuleHistory) -> list[tuple[str, str, str]]:
    """Pictures as (grouping, statistic, HTML), those without a value left out."""
    groupings = {"by block": history.by_block, "by layer": history.by_layer}
    found = []
    for grouping, columns in groupings.items():
        for statistic, words in STATISTICS.items():
            rows = _rows(columns, statistic)
            if rows:
                found.append(
                    (grouping, words, _picture(history.steps, rows, f"{words}, {grouping}"))
                )
    return found


def _block(module: str) -> str:
    found = _BLOCK.match(module)
    return found[1] if found else module.partition(".")[0]


def _layer(module: str) -> str:
    return _NUMBER.sub("*", module)


def _joined(modules: Mapping[str, Any], row_of: Any) -> Values:
    joined: Values = {}
    for module, statistics in modules.items():
        if not isinstance(statistics, dict):
            continue
        row = joined.setdefault(row_of(module), {})
        for name in STATISTICS:
            if name not in statistics:
                continue
            given = statistics[name]
            value = float(given) if isinstance(given, int | float) else math.inf
            before = row.get(name, 0.0)
            both = math.hypot(before, value) if name == "grad_norm" else max(before, value)
            row[name] = math.inf if math.isnan(both) else both
    return joined


def _rows(columns: Sequence[Values], statistic: str) -> dict[str, list[float]]:
    """One list a row, NaN where a step has no value."""
    names = dict.fromkeys(
        name for column in columns for name, values in column.items() if statistic in values
    )
    return {
        name: [column.get(name, {}).get(statistic, math.nan) for column in columns]
        for name in list(names)[:ROWS]
    }


def _picture(steps: Sequence[int], rows: Mapping[str, Sequence[float]], about: str) -> str:
    drawn = [v for row in rows.values() for v in row if math.isfinite(v) and v > 0]
    low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
    low = max(low, high * 1e-9)
    values = [[_cell(value) for value in row] for row in rows.values()]
    data = json.dumps(
        {"steps": list(steps), "rows": list(rows), "values": values}, separators=(",", ":")
    )
    labels = "".join(f'<span title="{html.escape(n)}">{html.escape(n)}</span>' for n in rows)
    middle = steps[len(steps) // 2] if len(steps) > 2 else None
    marks = [steps[0], *([middle] if middle is not None else []), *steps[1:][-1:]]
    scale = "".join(f"<span>{number(low * (high / low) ** part, 2)}</span>" for part in (0, 0.5, 1))
    others = any(math.isinf(v) for row in rows.values() for v in row)
    return (
        f'<div class="heat-scroll"><div class="heat-rows" aria-hidden="true">{labels}</div>'
        f'<div class="heat" tabindex="0" role="group" aria-label="{html.escape(about)}: arrow keys read values"'
        f' data-heat="{html.escape(data)}">'
        f'<img alt="{html.escape(about)}, {len(rows)} rows over steps {steps[0]:,} to {steps[-1]:,}"'
        f' style="height: {_ROW * len(rows)}px" src="{_png(rows, low, high)}"><i class="cell" hidden></i>'
        f'<div class="heat-steps" aria-hidden="true">{"".join(f"<span>{step:,}</span>" for step in marks)}</div>'
        "</div></div>"
        f'<div class="scale"><span class="ramp"></span><div class="scale-ends">{scale}</div>'
        f'<span class="key zero"></span>zero{" <span class=" + chr(34) + "key bad" + chr(34) + "></span>not finite" if others else ""}'
        "</div>"
    )


def _cell(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"


def _png(rows: Mapping[str, Sequence[float]], low: float, high: float) -> str:
    """One pixel a cell; the browser enlarges it."""
    from PIL import Image

    width = len(next(iter(rows.values())))
    image = Image.new("P", (width, len(rows)))
    image.putpalette(_palette())
    image.putdata([_level(value, low, high) for row in rows.values() for value in row])
    stream = io.BytesIO()
    image.save(stream, "PNG", transparency=_NONE)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _level(value: float, low: float, high: float) -> int:
    if math.isnan(value):
        return _NONE
    if math.isinf(value):
        return _BAD
    if value <= 0:
        return _ZERO
    part = math.log(max(value, low) / low) / math.log(high / low) if high > low else 0.5
    return min(_LEVELS - 1, int(part * _LEVELS))


def _palette() -> list[int]:
    stops = [[int(color[i : i + 2], 16) for i in (0, 2, 4)] for color in _COLORS]
    found = []
    for level in range(_LEVELS):
        at = level / (_LEVELS - 1) * (len(stops) - 1)
        index = min(int(at), len(stops) - 2)
        first, second = stops[index], stops[index + 1]
        found += [round(a + (b - a) * (at - index)) for a, b in zip(first, second, strict=True)]
    return [*found, 128, 128, 128, 226, 30, 110, 0, 0, 0]
