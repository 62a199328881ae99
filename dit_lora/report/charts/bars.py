"""Parts of charts: bars, axis ticks and formatted numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dit_lora.report.charts.data import Numbers


@dataclass(frozen=True)
class Bar:
    """One labeled bar of a bar chart. `words` is its formatted value, followed by `detail`."""

    name: str
    value: float
    words: str
    detail: str = ""


@dataclass(frozen=True)
class BarChart:
    """Data of a horizontal bar chart that starts at zero, for the template bars.html. `label` names the quantity."""

    title: str
    bars: Sequence[Bar]
    label: str = ""

    def percent(self, bar: Bar) -> float:
        """A bar's length in percent of the longest; 0 for values that are negative or not finite."""
        finite_values = [bar_value.value for bar_value in self.bars if math.isfinite(bar_value.value)]
        # Bars are drawn relative to the longest one.
        longest = max(finite_values, default=0.0)
        if not math.isfinite(bar.value) or bar.value <= 0:
            return 0.0
        # Divide first: 100 * value could overflow.
        return round(100 * (bar.value / longest), 2)


def should_use_log_scale(values: Numbers, ratio: float = 30.0) -> bool:
    """True if positive values differ by more than `ratio`, so that a linear axis would hide the small ones."""
    column = np.asarray(values, dtype=np.float64)
    positive = column[np.isfinite(column) & (column > 0)]
    return bool(positive.size and positive.max() / ratio > positive.min())


def compute_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Positions of chart ticks: about `count` multiples of 1, 2 or 5 times a power of ten, all within [low, high]."""
    # The smallest step of 1, 2 or 5 times a power of ten that gives at most about `count` ticks.
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first_index, last_index = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first_index, last_index + 1)]


def format_number(value: float, digits: int = 4) -> str:
    """Format a value to `digits` significant digits, such as 0.1618, 2,048, 1e-4, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}"
    if value == 0:
        return "0"
    # Large numbers are written with thousands separators and without decimals.
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".")
    # Shorten 1.000e-04 to 1e-4.
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"
