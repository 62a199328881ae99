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


def joined(values: Numbers) -> Values:
    """Return one row for each point with the values that it joins; the last row repeats its last value."""
    column = np.asarray(values, dtype=np.float64)
    width = values_per_point(len(column))
    return np.pad(column, (0, -len(column) % width), mode="edge").reshape(-1, width)


def means(values: Numbers, *, sparse: bool) -> list[float | None]:
    """Return the mean of each point: None where a value is not finite, of a sparse line where all are."""
    rows = joined(values)
    finite = np.isfinite(rows)
    drawn = finite.any(1) if sparse else finite.all(1)
    with np.errstate(over="ignore"):  # a sum beyond the largest float is not drawn
        sums = np.where(finite, rows, 0.0).sum(1)
    return _short(np.where(drawn, sums / np.maximum(1, finite.sum(1)), np.nan))


def extremes(values: Numbers) -> dict[str, list[float | None]]:
    """Return the least finite value of each point, and the greatest."""
    rows = np.ma.masked_invalid(joined(values))
    return {
        "lowest": _short(rows.min(1).filled(np.nan)),
        "highest": _short(rows.max(1).filled(np.nan)),
    }


def _short(values: Values) -> list[float | None]:
    """Return them to five digits, which keeps a page small."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
