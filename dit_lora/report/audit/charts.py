"""Charts of a data set: histograms of sample properties, and statistics of latent channels."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dit_lora.report.charts.bars import Bar, BarChart, compute_ticks, format_number

_MAX_BINS = 24
_MAX_DISTINCT = 8  # up to this many distinct values are counted separately, such as 24, 25 and 30 frames per second
_RATIOS = ("9:21", "9:16", "2:3", "3:4", "1:1", "4:3", "3:2", "16:9", "21:9")


@dataclass(frozen=True)
class Bin:
    """One column of a histogram. `left` is its lower edge, and `percent` its height relative to the highest column."""

    left: str
    span: str
    count: int
    percent: float


@dataclass(frozen=True)
class Histogram:
    """A histogram of the data set for the audit page: counts by value; `about` is a text description."""

    title: str
    unit: str
    about: str
    bins: Sequence[Bin]


class ChannelChart:
    """Mean and standard deviation of each latent channel, drawn as bars on the same axis."""

    def __init__(self, means: Sequence[float], stds: Sequence[float]) -> None:
        self.channels = list(zip(means, stds, strict=True))
        self._low = min(mean - std for mean, std in self.channels)
        high = max(mean + std for mean, std in self.channels)
        self._span = (high - self._low) or 1.0

    def percent(self, value: float) -> float:
        """Position of a value on the chart's axis, in percent of its height."""
        return round(100 * (value - self._low) / self._span, 2)

    @property
    def ticks(self) -> list[tuple[str, float]]:
        """Ticks of the chart's axis, as (label, percent of its height)."""
        values = compute_ticks(self._low, self._low + self._span)
        return [(f"{round(tick, 9):g}", self.percent(tick)) for tick in values]


def make_count_chart(title: str, names: Iterable[str], order: Sequence[str] = ()) -> BarChart | None:
    """Count the most frequent names, one bar per name, in the given `order` or by count; None without names."""
    counts = Counter(names)
    if not counts:
        return None
    # Rare names are added up in one last bar.
    top_counts, total = counts.most_common(_MAX_DISTINCT), counts.total()
    if order:
        top_counts.sort(key=lambda item: order.index(item[0]))
    num_others = total - sum(count for _, count in top_counts)
    if num_others:
        top_counts.append(("others", num_others))
    bars = [Bar(name, count, f"{count:,}", f"{100 * count / total:.0f}%") for name, count in top_counts]
    return BarChart(title, bars)


def make_aspect_ratio_chart(sizes: Iterable[tuple[float, float]]) -> BarChart | None:
    """Count samples by the nearest common aspect ratio; `sizes` are (width, height) in pixels."""
    # Ordered from upright to wide, not by their counts.
    names = (_find_ratio_name(width / height) for width, height in sizes)
    return make_count_chart("Aspect ratio", names, order=_RATIOS)


def make_histogram(title: str, values: Sequence[float], unit: str) -> Histogram | BarChart | None:
    """Count samples by value. Values far beyond the others are collected in an open last bin."""
    # Few distinct values, such as frame rates, get a bar each instead of bins.
    distinct = sorted({round(value, 2) for value in values})
    if len(distinct) <= _MAX_DISTINCT:
        names = (f"{round(value, 2):g}" for value in values)
        return make_count_chart(f"{title}, {unit}", names, order=[f"{value:g}" for value in distinct])
    # Many values: bins of equal width.
    edges, counts, open_end = _compute_bins(sorted(values))
    bins = []
    for index, count in enumerate(counts):
        is_open_bin = index == len(counts) - 1 and open_end
        end = "and more" if is_open_bin else f"to {edges[index + 1]:g}"
        percent = round(100 * count / max(counts), 2)
        bins.append(Bin(f"{edges[index]:,g}", f"{edges[index]:g} {end}", count, percent))
    about = f"{title}: from {format_number(min(values))} to {format_number(max(values))} {unit}"
    return Histogram(title, unit, about, bins)


def _find_ratio_name(ratio: float) -> str:
    """The nearest common aspect ratio, width to height."""

    def compute_log_distance(name: str) -> float:
        width, height = name.split(":")
        # Compare logarithms, so that 2:1 and 1:2 are equally far from 1:1.
        return abs(math.log(ratio * int(height) / int(width)))

    return min(_RATIOS, key=compute_log_distance)


def _compute_bins(values: Sequence[float]) -> tuple[list[float], list[int], bool]:
    """Edges and counts of a histogram, and whether the last bin is open, for sorted values that are not all equal."""
    # The 98th percentile; the last bin is open if the maximum is far beyond it.
    top = values[int(0.98 * (len(values) - 1))]
    open_end = values[-1] > top + 2 * (top - values[0]) and top > values[0]
    # Bin edges at round numbers.
    inner = compute_ticks(values[0], top if open_end else values[-1], _MAX_BINS)
    step = inner[1] - inner[0]
    # Ticks lie inside the range of values, so add bins at both ends and trim empty ones below.
    edges = [inner[0] - step, *inner, inner[-1] + step, inner[-1] + 2 * step]
    counts = [0] * (len(edges) - 1)
    for value in values:
        # The small term keeps a value on an edge from falling into the lower bin by rounding.
        index = math.floor((value - edges[0]) / step + 1e-9)
        counts[min(index, len(counts) - 1)] += 1
    first_bin = next(index for index, count in enumerate(counts) if count)
    last_bin = max(index for index, count in enumerate(counts) if count)
    return ([round(edge, 9) for edge in edges[first_bin : last_bin + 2]], counts[first_bin : last_bin + 1], open_end)
