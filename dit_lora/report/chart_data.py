"""Long columns made short: what a page holds of a line, however many values it has."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POINTS = 2000
"""Points of one line at most; more values are joined, equally many neighbours to a point."""

Values = npt.NDArray[np.float64]
Numbers = Sequence[float] | Values


def values_per_point(count: int) -> int:
    """Return how many of `count` values are joined to one point."""
    return max(1, -(-count // POINTS))


def joined(values: Numbers) -> "np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]":
    """Return one row for each point with the values that it joins; those that are not finite are masked."""
    column = np.asarray(values, dtype=np.float64)
    width = values_per_point(len(column))
    padded = np.full(-(-len(column) // width) * width, np.nan)
    padded[: len(column)] = column
    rows: np.ma.MaskedArray[tuple[int, int], np.dtype[np.float64]]
    rows = np.ma.masked_invalid(padded.reshape(-1, width))
    return rows


def last_of_each_point(steps: Sequence[int]) -> list[int]:
    """Return the place of each point: the last of the steps that it joins, which rise."""
    width = values_per_point(len(steps))
    return [*steps[width - 1 : len(steps) : width], *(steps[-1:] if len(steps) % width else [])]


def means(values: Numbers) -> list[float | None]:
    """Return the mean of the finite values of each point, None where there is none."""
    with np.errstate(over="ignore"):  # the mean of values near the largest float; not drawn
        return _short(joined(values).mean(1))


def lowest_and_highest(values: Numbers) -> list[list[float | None]]:
    """Return the least finite value of each point, and the greatest."""
    rows = joined(values)
    return [_short(rows.min(1)), _short(rows.max(1))]


def _short(values: "np.ma.MaskedArray[tuple[int], np.dtype[np.float64]]") -> list[float | None]:
    """Return them to five digits, which keeps a page small."""
    return [
        float(f"{value:.5g}") if np.isfinite(value) else None for value in values.filled(np.nan)
    ]
