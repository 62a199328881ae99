"""Reduce long columns to the limited number of points that a page contains."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_POINTS = 2000
"""Maximum number of points of one line; longer columns combine equally many neighbours in each point."""

Values = npt.NDArray[np.float64]
Numbers = Sequence[float] | Values


def count_values_per_point(count: int) -> int:
    """Number of steps that one point of a chart combines, for a column of `count` values."""
    # Ceiling division.
    return max(1, -(-count // MAX_POINTS))


def group_values_by_chart_point(values: Numbers) -> Values:
    """Values of a column grouped by chart point, (points, values per point); the last value pads the last row."""
    column = np.asarray(values, dtype=np.float64)
    # -n % width is the number of values missing in the last row.
    width = count_values_per_point(len(column))
    return np.pad(column, (0, -len(column) % width), mode="edge").reshape(-1, width)


def compute_means(values: Numbers, *, sparse: bool) -> list[float | None]:
    """Mean of each chart point. None if a value is not finite; with `sparse`, only if no value is finite."""
    rows = group_values_by_chart_point(values)
    finite = np.isfinite(rows)
    has_mean = finite.any(1) if sparse else finite.all(1)
    with np.errstate(over="ignore"):  # a sum that overflows is not drawn
        sums = np.where(finite, rows, 0.0).sum(1)
    return _round_values(np.where(has_mean, sums / np.maximum(1, finite.sum(1)), np.nan))


def compute_extremes(values: Numbers) -> dict[str, list[float | None]]:
    """Smallest and largest finite value of each chart point; None if it has none."""
    # Masked values are ignored by min and max; a fully masked row gives NaN.
    rows = np.ma.masked_invalid(group_values_by_chart_point(values))
    return {"lowest": _round_values(rows.min(1).filled(np.nan)), "highest": _round_values(rows.max(1).filled(np.nan))}


def _round_values(values: Values) -> list[float | None]:
    """Round chart values to five significant digits, which keeps a page small."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
