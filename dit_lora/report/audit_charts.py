"""Charts of a data set as inline SVG: how many samples have a value, and what the channels of its latents are."""

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from dit_lora.report.charts import number, ticks

_BINS = 24
_DISTINCT = 8  # values that are counted one by one, such as 24, 25 and 30 frames per second
_RATIOS = ("9:21", "9:16", "2:3", "3:4", "1:1", "4:3", "3:2", "16:9", "21:9")


def counted(title: str, names: Iterable[str], order: Sequence[str] = ()) -> str:
    """A `<figure>` of one bar a name, of the most frequent, in the order given or by count."""
    counts = Counter(names)
    if not counts:
        return ""
    kept = counts.most_common(_DISTINCT)
    highest, total = kept[0][1], counts.total()
    if order:
        kept.sort(key=lambda item: order.index(item[0]))
    rest = total - sum(count for _, count in kept)
    bars = [*kept, *([("others", rest)] if rest else [])]
    step = 100 / len(bars)
    rows = []
    for index, (name, count) in enumerate(bars):
        middle = step * (index + 0.5)
        length = 65 * min(1.0, count / highest)  # the number needs the rest, on a phone too
        rows.append(
            f'<text x="-8" y="{middle:.2f}%" dy="0.35em" text-anchor="end">{html.escape(name)}</text>'
            f'<rect class="c0" x="0" y="{middle - 0.32 * step:.2f}%" width="{length:.2f}%"'
            f' height="{0.64 * step:.2f}%" rx="2"/>'
            f'<text class="value" x="{length:.2f}%" dx="6" y="{middle:.2f}%" dy="0.35em">{count:,}'
            f'<tspan class="detail" dx="6">{100 * count / total:.0f}%</tspan></text>'
        )
    about = f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in bars)
    return _figure(title, about, "".join(rows), "bars", height=28 * len(bars))


def aspect_ratios(sizes: Iterable[tuple[float, float]]) -> str:
    """Samples by the nearest of the usual ratios; sizes are width and height, pixels."""
    names = (_ratio_name(width / height) for width, height in sizes)
    return counted("Aspect ratio", names, order=_RATIOS)


def histogram(title: str, values: Sequence[float], unit: str) -> str:
    """A `<figure>` of counts by value; what lies far beyond the rest is in an open last bin."""
    distinct = sorted({round(value, 2) for value in values})
    if len(distinct) <= _DISTINCT:
        names = (f"{round(value, 2):g}" for value in values)
        return counted(f"{title}, {unit}", names, order=[f"{value:g}" for value in distinct])
    edges, counts, open_end = _binned(sorted(values))
    columns, highest = len(counts), max(counts)
    rows = []
    for index, count in enumerate(counts):
        last = index == columns - 1 and open_end
        span = f"{edges[index]:g} and more" if last else f"{edges[index]:g} to {edges[index + 1]:g}"
        height = 100 * count / highest
        rows.append(
            f'<rect class="c0" x="{100 * index / columns + 0.3:.2f}%" width="{100 / columns - 0.6:.2f}%"'
            f' y="{100 - height:.2f}%" height="{height:.2f}%"><title>{span} {unit}: {count:,}</title></rect>'
        )
    every = math.ceil(columns / 6)
    for index in range(0, columns + (not open_end), every):
        rows.append(
            f'<text x="{100 * index / columns:.2f}%" y="100%" dy="1.5em" text-anchor="middle">'
            f"{edges[index]:,g}</text>"
        )
    rows.append(
        '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'
        f'<text x="0" y="0" dy="-0.9em">{highest:,} samples at the highest bar</text>'
        f'<text x="100%" y="100%" dy="2.9em" text-anchor="end">{html.escape(unit)}</text>'
    )
    about = f"{title}: from {number(min(values))} to {number(max(values))} {unit}"
    return _figure(title, about, "".join(rows), "histogram")


def _ratio_name(ratio: float) -> str:
    """The nearest of the usual ones, width to height."""

    def distance(name: str) -> float:
        width, height = name.split(":")
        return abs(math.log(ratio * int(height) / int(width)))

    return min(_RATIOS, key=distance)


def _binned(values: Sequence[float]) -> tuple[list[float], list[int], bool]:
    """Edges, counts, and whether the last bin is open, of sorted values that are not all alike."""
    top = values[int(0.98 * (len(values) - 1))]
    open_end = values[-1] > top + 2 * (top - values[0]) and top > values[0]
    inner = ticks(values[0], top if open_end else values[-1], _BINS)
    step = inner[1] - inner[0]
    edges = [inner[0] - step, *inner, inner[-1] + step, inner[-1] + 2 * step]
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = math.floor((value - edges[0]) / step + 1e-9)
        counts[min(place, len(counts) - 1)] += 1
    first = next(index for index, count in enumerate(counts) if count)
    last = max(index for index, count in enumerate(counts) if count)
    return [round(e, 9) for e in edges[first : last + 2]], counts[first : last + 1], open_end


def _figure(title: str, about: str, body: str, plot: str, height: int = 190) -> str:
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<div class="plot {plot}" style="height: {height}px">'
        f'<svg role="img" aria-label="{html.escape(about)}" width="100%" height="100%">{body}</svg>'
        "</div></figure>"
    )


def channel_chart(name: str, means: Sequence[float], stds: Sequence[float]) -> str:
    """Mean and standard deviation of each channel, upright beside each other."""
    low = min(mean - std for mean, std in zip(means, stds, strict=True))
    high = max(mean + std for mean, std in zip(means, stds, strict=True))
    span = (high - low) or 1.0
    step = 100 / len(means)

    def y(value: float) -> str:
        return f"{100 * (high - value) / span:.2f}%"

    rows = [
        f'<line class="grid" x1="0" x2="100%" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="-8" y="{y(tick)}" dy="0.35em" text-anchor="end">{tick:g}</text>'
        for tick in (round(tick, 9) for tick in ticks(low, low + span))
    ]
    for index, (mean, std) in enumerate(zip(means, stds, strict=True)):
        at = f"{step * (index + 0.5):.2f}%"
        rows.append(
            f'<g class="c0"><title>channel {index}: mean {number(mean)}, standard deviation {number(std)}</title>'
            f'<line class="whisker" x1="{at}" x2="{at}" y1="{y(mean + std)}" y2="{y(mean - std)}"/>'
            f'<circle cx="{at}" cy="{y(mean)}" r="3.5"/></g>'
        )
    every = math.ceil(len(means) / 8)
    rows += [
        f'<text x="{step * (index + 0.5):.2f}%" y="100%" dy="1.5em" text-anchor="middle">{index}</text>'
        for index in range(0, len(means), every)
    ]
    rows.append('<text x="100%" y="100%" dy="2.9em" text-anchor="end">channel</text>')
    about = f"Mean and standard deviation of each channel of {name}"
    return _figure("Mean ± standard deviation by channel", about, "".join(rows), "channels")
