"""Long lines made short: means and extremes of many values, and what a chart's script reads of them."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

POINTS = 600
"""Of one line in `chart_data`, and columns of a drawn one: a screen shows no more."""
_MARKS = 200
_WORDS = 160  # of one mark

Values = npt.NDArray[np.float64]
Numbers = Sequence[float] | Values


class Line(Protocol):
    """What is drawn, as `charts.Series`."""

    @property
    def name(self) -> str: ...
    @property
    def x(self) -> Numbers: ...
    @property
    def y(self) -> Numbers: ...
    @property
    def color(self) -> int: ...
    @property
    def window(self) -> int: ...


class Happened(Protocol):
    """What is marked, as `charts.Mark`."""

    @property
    def x(self) -> float: ...
    @property
    def words(self) -> str: ...


def chart_data(
    series: Sequence[Line],
    marks: Sequence[Happened],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    log_y: bool,
) -> str:
    """JSON of at most `POINTS` points a line; what is not finite is null."""
    places: list[list[float | None]] = []
    known: dict[int, int] = {}
    lines: list[dict[str, Any]] = []
    for one in series:
        if id(one.x) not in known:
            known[id(one.x)] = len(places)
            places.append(_short(_ends(one.x), 9))
        lines.append(
            {
                "name": one.name,
                "color": one.color,
                "x": known[id(one.x)],
                "y": _short(_means(one.y)),
                "window": one.window,
                "each": _each(len(one.y)),
            }
        )
    data = {
        "range": [*x_range, *_short(y_range, 9)],
        "log": log_y,
        "x": places,
        "series": lines,
        "marks": [[mark.x, mark.words[:_WORDS]] for mark in marks[:_MARKS]],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def smooth(values: Numbers, window: int) -> Values:
    """The mean of the finite values among the last `window`; NaN where the value itself is not finite."""
    given = np.asarray(values, dtype=np.float64)
    window = min(window, len(given))
    if window <= 1:
        return given
    finite = np.isfinite(given)
    means = np.full(len(given), np.nan)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is not drawn
        sums = _window_sums(np.where(finite, given, 0.0), window)
        np.divide(sums, _window_sums(finite, window), out=means, where=finite)
    return means


def extremes(values: Numbers) -> npt.NDArray[np.intp]:
    """Indices that a drawn line needs: of each of `POINTS` columns the ends, the lowest, the highest, and one gap."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) <= 4 * POINTS:
        return np.arange(len(given))
    each = _each(len(given))
    columns = _columns(given, each)
    finite = np.isfinite(columns)
    starts = np.arange(len(columns)) * each
    kept = [
        starts,
        starts + each - 1,
        starts + np.where(finite, columns, np.inf).argmin(1),
        starts + np.where(finite, columns, -np.inf).argmax(1),
        (starts + (~finite).argmax(1))[~finite.all(1)],
        np.array([len(given) - 1]),
    ]
    found: npt.NDArray[np.intp] = np.unique(np.concatenate(kept))
    return found[found < len(given)]


def _window_sums(values: npt.ArrayLike, window: int) -> Values:
    """Sums of the last `window` values, by additions alone: a huge value leaves nothing behind when it has passed.

    Of blocks of `window` values, each sum is the end of one and the beginning of the next.
    """
    given = np.asarray(values, dtype=np.float64)
    padded = np.zeros(-(-len(given) // window) * window)
    padded[: len(given)] = given
    blocks = padded.reshape(-1, window)
    begins = blocks.cumsum(1).ravel()
    ends = blocks[:, ::-1].cumsum(1)[:, ::-1].copy()
    ends[:, 0] = 0.0  # a whole block is a beginning alone
    sums: Values = begins[: len(given)]
    sums[window - 1 :] += ends.ravel()[: len(given) - window + 1]
    return sums


def _means(values: Numbers) -> Values:
    """At most `POINTS` means of the finite values, NaN where there is none."""
    given = np.asarray(values, dtype=np.float64)
    each = _each(len(given))
    if each == 1:
        return given
    columns = _columns(given, each)
    finite = np.isfinite(columns)
    counts = finite.sum(1)
    means = np.full(len(columns), np.nan)
    np.divide(np.where(finite, columns, 0.0).sum(1), counts, out=means, where=counts > 0)
    return means


def _ends(values: Numbers) -> Values:
    """The last value of each that `_means` gives."""
    given = np.asarray(values, dtype=np.float64)
    each = _each(len(given))
    lasts = np.minimum(np.arange(each - 1, len(given) + each - 1, each), len(given) - 1)
    return given[lasts]


def _columns(values: Values, each: int) -> Values:
    """Rows of `each` values; what the last lacks is NaN."""
    padded = np.full(-(-len(values) // each) * each, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, each)


def _each(count: int) -> int:
    return max(1, -(-count // POINTS))


def _short(values: Numbers, digits: int = 5) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in map(float, values)]
