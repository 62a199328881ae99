"""Parts of charts: bars, ticks, and numbers as people write them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dit_lora.report.charts.data import Numbers


@dataclass(frozen=True)
class Bar:
    """One labelled bar; `words` tell its value, and `detail` follows them."""

    name: str
    value: float
    words: str
    detail: str = ""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars that start at zero, for bars.html; `label` says what they count."""

    title: str
    bars: Sequence[Bar]
    label: str = ""

    def percent(self, bar: Bar) -> float:
        """Return a bar's length relative to the longest; 0 for what cannot be drawn."""
        drawn = [one.value for one in self.bars if math.isfinite(one.value)]
        longest = max(drawn, default=0.0)
        if not math.isfinite(bar.value) or bar.value <= 0:
            return 0.0
        return round(100 * (bar.value / longest), 2)


def wants_log(values: Numbers, ratio: float = 30.0) -> bool:
    """Return whether positive values differ by more than `ratio`, so that a linear axis would hide the small."""
    column = np.asarray(values, dtype=np.float64)
    positive = column[np.isfinite(column) & (column > 0)]
    return bool(positive.size and positive.max() / ratio > positive.min())


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten, all within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float, digits: int = 4) -> str:
    """Write a value to `digits` significant digits, as a person does: 0.1618, 2,048, 1e-4, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"
