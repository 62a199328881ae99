"""Charts as inline SVG from plain numbers: no file beside them, light or dark, whole without a script.

The outer `<svg>` is the plot area itself, with positions in percent, so text keeps its size on a phone and
on a desktop; the lines sit in a nested `<svg>` that stretches. Margins and colours are the page's CSS. What
page.js needs to name values and to smooth otherwise is in `data-chart`.
"""

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dit_lora.report.chart_data import Numbers, chart_data, extremes, smooth

PALETTE_SIZE = 6  # .c0 to .c5 in style.css
_LOG_DECADES = 6.0
_LARGEST = 1e300  # beyond it, padding a range overflows


@dataclass(frozen=True)
class Series:
    """One line, or dots joined by a thin line; `x` counts steps, and `y` is as long."""

    name: str
    x: Numbers
    y: Numbers
    color: int = 0
    style: Literal["line", "dots"] = "line"
    window: int = 1
    """Values that the line averages."""
    faint: bool = False
    """Whether the values themselves are drawn below the averages."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, as an upright line."""

    x: float
    words: str


@dataclass(frozen=True)
class Bar:
    """One labelled bar; `detail` follows its value."""

    name: str
    value: float
    detail: str = ""


@dataclass(frozen=True)
class _Drawn:
    """The points of a series that a screen shows: its values, its averages, and what the axis has to hold of them."""

    series: Series
    values: list[tuple[float, float]]
    averages: list[tuple[float, float]]
    reach: list[float]

    @classmethod
    def of(cls, one: Series) -> "_Drawn":
        values = _points(one.x, one.y)
        if one.window <= 1:
            return cls(one, values, values, [y for _, y in values])
        # Not every spike of a faint line: they would press the averages flat.
        bulk = smooth(one.y, max(1, one.window // 4))
        reach = [y for _, y in _points(one.x, bulk)]
        return cls(one, values, _points(one.x, smooth(one.y, one.window)), reach)

    @property
    def color(self) -> str:
        return f"c{self.series.color % PALETTE_SIZE}"


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float | None:
        """Where a value lies, 0 at `low` and 1 at `high`; None for what cannot be drawn."""
        if not _drawable(value, self.log):
            return None
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    log_y: bool = False,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """A `<figure>` with title, legend, axes and lines; a value that is not finite leaves a marked gap."""
    lines = [_Drawn.of(one) for one in series]
    drawn = [y for one in lines for y in one.reach if _drawable(y, log_y)]
    bad = sorted({x for one in lines for x, y in one.values if not math.isfinite(y)})
    legend = "".join(_legend_item(f"c{s.color % PALETTE_SIZE} {s.style}", s.name) for s in series)
    if bad:
        legend += _legend_item("bad", "not finite")
    if marks:
        legend += _legend_item("mark", "guard")
    head = f"<figcaption>{html.escape(title)}</figcaption>"
    if not drawn:
        return (
            f'<figure class="chart">{head}<p class="absent">No finite value to draw.</p></figure>'
        )
    y_axis = _y_axis(drawn, log_y, from_zero)
    x_axis = _x_axis(x_range or _extent([x for one in lines for x, _ in one.values]))
    about = (
        f"{title}: {y_label} by {x_label}, from {number(min(drawn))} to {number(max(drawn))}"
        + (", logarithmic" if log_y else "")
    )
    parts = [
        _grid(x_axis, y_axis),
        f'<text class="label" x="0" y="0" dy="-0.9em">{html.escape(y_label)}'
        f"{' (logarithmic)' if log_y else ''}</text>",
        f'<text class="label" x="100%" y="100%" dy="2.9em" text-anchor="end">{html.escape(x_label)}</text>',
        *_bad_marks(bad, x_axis, x_label),
        *_marks(marks, x_axis, x_label),
        *_strokes(lines, x_axis, y_axis, x_label),
    ]
    points = chart_data(series, marks, (x_axis.low, x_axis.high), (y_axis.low, y_axis.high), log_y)
    return (
        f'<figure class="chart">{head}<ul class="legend">{legend}</ul>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{html.escape(title)}: arrow keys read values"'
        f' data-chart="{html.escape(points)}">'
        f'<svg role="img" aria-label="{html.escape(about)}" width="100%" height="100%">{"".join(parts)}</svg>'
        "</div></figure>"
    )


def bar_chart(title: str, bars: Sequence[Bar], *, label: str) -> str:
    """A `<figure>` of horizontal bars that start at zero, each with its value written at its end."""
    finite = [bar.value for bar in bars if _drawable(bar.value) and bar.value > 0]
    longest = max(finite, default=1.0)
    about = f"{title}: " + ", ".join(f"{bar.name} {number(bar.value)}" for bar in bars)
    step = 100 / max(1, len(bars))
    rows = []
    for index, bar in enumerate(bars):
        middle = step * (index + 0.5)
        # Half at most: the value and its detail need the rest, on a phone too.
        length = 50 * max(0.0, bar.value) / longest if _drawable(bar.value) else 0.0
        rows.append(
            f'<text x="-8" y="{middle:.2f}%" dy="0.35em" text-anchor="end">{html.escape(bar.name)}</text>'
            f'<rect class="c0" x="0" y="{middle - 0.3 * step:.2f}%" width="{length:.2f}%"'
            f' height="{0.6 * step:.2f}%" rx="2"/>'
            f'<text class="value" x="{length:.2f}%" dx="6" y="{middle:.2f}%" dy="0.35em">'
            f'{number(bar.value)}<tspan class="detail" dx="6">{html.escape(bar.detail)}</tspan></text>'
        )
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<ul class="legend">{_legend_item("c0 bar", label)}</ul><div class="plot bars" style="height: {40 * len(bars)}px">'
        f'<svg role="img" aria-label="{html.escape(about)}" width="100%" height="100%">{"".join(rows)}</svg>'
        "</div></figure>"
    )


def wants_log(values: Sequence[float], ratio: float = 30.0) -> bool:
    """Whether positive values differ by more than `ratio`, so that a linear axis would hide the small."""
    positive = [value for value in values if _drawable(value, log=True)]
    return bool(positive) and max(positive) > ratio * min(positive)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, all within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with 2 and 5 between them, or linear ticks, where they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for stride, multiples in ((max(1, (last - first) // 5), (1,)), (1, (1, 2, 5))):
        found = [m * 10.0**e for e in range(first, last + 1, stride) for m in multiples]
        inside = [tick for tick in found if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]
        if len(inside) >= 3:
            return inside
    return ticks(low, high)


def number(value: float, digits: int = 4) -> str:
    """A value to `digits` significant digits, as a person writes it: 0.1618, 2,048, 1e-4, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".")
    return _scientific(value, digits)


def _scientific(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def _tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Labels with as many decimals as the distance between ticks needs; on a log axis, as each needs."""
    if log:
        plain = [1e-3 <= value < 1e6 for value in values]
        return [
            f"{value:,.6g}" if short else _scientific(value, 3)
            for value, short in zip(values, plain, strict=True)
        ]
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 1e6 or 0 < largest < 1e-3:
        return ["0" if value == 0 else _scientific(value, 3) for value in values]
    gaps = [b - a for a, b in itertools.pairwise(values)]
    finest = min([*gaps, *(abs(value) for value in values if value and not gaps)], default=1.0)
    decimals = max(0, -math.floor(math.log10(finest) + 1e-9))
    if decimals > 4:
        return [number(value) for value in values]
    return [f"{value + 0.0:,.{decimals}f}" for value in values]


def _drawable(value: float, log: bool = False) -> bool:
    return math.isfinite(value) and abs(value) < _LARGEST and (value > 0 or not log)


def _pairs(series: Series) -> Iterator[tuple[float, float]]:
    return zip(series.x, series.y, strict=True)


def _extent(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if _drawable(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _x_axis(extent: tuple[float, float]) -> _Axis:
    low, high = extent
    return _Axis(low, high if high > low else low + 1)


def _y_axis(values: Sequence[float], log: bool, from_zero: bool) -> _Axis:
    """The range of the values with room around it, so that no line runs along the frame."""
    low, high = min(values), max(values)
    if log:
        low = max(low, high / 10**_LOG_DECADES)
        room = max(1.05, (high / low) ** 0.06)
        return _Axis(low / room, high * room, log=True)
    if from_zero:
        low = min(0.0, low)
    span = high - low
    if span < 1e-9 * max(abs(low), abs(high)):
        span = 0.0  # rounding alone: ticks within it would coincide
    # A constant series gets a range of its own size; zero alone gets one around zero.
    room = 0.06 * span or abs(high) or 1.0
    return _Axis(low if from_zero and low == 0 else low - room, high + room)


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    y_ticks = y_axis.ticks()
    for value, label in zip(y_ticks, _tick_labels(y_ticks, y_axis.log), strict=True):
        at = f"{_percent(y_axis, value, flipped=True)}%"
        parts.append(
            f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>'
            f'<text x="-8" y="{at}" dy="0.35em" text-anchor="end">{label}</text>'
        )
    x_ticks = [value for value in x_axis.ticks() if value == int(value)]
    for value, label in zip(x_ticks, _tick_labels(x_ticks), strict=True):
        at = f"{_percent(x_axis, value)}%"
        parts.append(
            f'<line class="tick" x1="{at}" x2="{at}" y1="100%" y2="100%"/>'
            f'<text x="{at}" y="100%" dy="1.5em" text-anchor="middle">{label}</text>'
        )
    return "".join(parts) + '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'


def _percent(axis: _Axis, value: float, flipped: bool = False) -> str:
    fraction = axis.fraction(value) or 0.0
    return f"{100 * (1 - fraction if flipped else fraction):.2f}"


def _strokes(lines: Sequence[_Drawn], x_axis: _Axis, y_axis: _Axis, x_label: str) -> Iterator[str]:
    """The lines, in an `<svg>` that stretches, and the dots, in the one that does not."""
    yield '<svg class="lines" width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    for one in lines:
        if one.series.faint and one.series.window > 1:
            yield _path(one.values, f"{one.color} faint", x_axis, y_axis)
    for index, one in enumerate(lines):
        yield _path(one.averages, f"{one.color} {one.series.style}", x_axis, y_axis, index)
    yield "</svg>"
    for one in lines:
        if one.series.style == "dots":
            yield _dots(one.series, x_axis, y_axis, x_label)
        else:
            yield _lone_points(one, x_axis, y_axis)


def _points(xs: Numbers, ys: Numbers) -> list[tuple[float, float]]:
    return [(float(xs[index]), float(ys[index])) for index in extremes(ys)]


def _path(
    points: Sequence[tuple[float, float]],
    classes: str,
    x_axis: _Axis,
    y_axis: _Axis,
    index: int | None = None,
) -> str:
    """One `<path>`, lifted off the paper at every value that cannot be drawn; `index` is the series' own."""
    strokes = "".join(
        "M" + "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in run)
        for run in _runs(points, x_axis, y_axis)
    )
    number_of = "" if index is None else f' data-series="{index}"'
    return f'<path class="{classes}"{number_of} d="{strokes}"/>'


def _lone_points(one: _Drawn, x_axis: _Axis, y_axis: _Axis) -> str:
    """A dot for each value between two gaps, which a path would not show."""
    return "".join(
        f'<circle class="lone {one.color} {one.series.style}" cx="{100 * run[0][0]:.2f}%"'
        f' cy="{100 * (1 - run[0][1]):.2f}%" r="2"/>'
        for run in _runs(one.averages, x_axis, y_axis)
        if len(run) == 1
    )


def _runs(
    points: Sequence[tuple[float, float]], x_axis: _Axis, y_axis: _Axis
) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in points:
        at_x, at_y = x_axis.fraction(x), y_axis.fraction(y)
        if at_x is not None and at_y is not None:
            run.append((at_x, max(-1.0, min(2.0, at_y))))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _dots(series: Series, x_axis: _Axis, y_axis: _Axis, x_label: str) -> str:
    return "".join(
        f'<circle class="c{series.color % PALETTE_SIZE}" cx="{_percent(x_axis, x)}%"'
        f' cy="{_percent(y_axis, y, flipped=True)}%" r="4">'
        f"<title>{html.escape(series.name)}, {html.escape(x_label)} {x:g}: {number(y)}</title></circle>"
        for x, y in _pairs(series)
        if _drawable(y, y_axis.log)
    )


def _bad_marks(steps: Sequence[float], x_axis: _Axis, x_label: str) -> Iterator[str]:
    """A thin vertical line at each place without a finite value; places that coincide share one."""
    for at, step in {_percent(x_axis, step)[:-1]: step for step in steps}.items():
        yield (
            f'<line class="bad" x1="{at}%" x2="{at}%" y1="0" y2="100%">'
            f"<title>not finite at {html.escape(x_label)} {step:g}</title></line>"
        )


def _marks(marks: Sequence[Mark], x_axis: _Axis, x_label: str) -> Iterator[str]:
    """An upright line a place; those that coincide share one, and the first says what it was."""
    places = {_percent(x_axis, mark.x)[:-1]: mark for mark in reversed(marks)}
    for at, mark in places.items():
        yield (
            f'<line class="mark" x1="{at}%" x2="{at}%" y1="0" y2="100%">'
            f"<title>{html.escape(x_label)} {mark.x:g}: {html.escape(mark.words)}</title></line>"
        )


def _legend_item(classes: str, name: str) -> str:
    return f'<li><span class="swatch {classes}"></span>{html.escape(name)}</li>'
