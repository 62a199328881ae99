"""What charts hold of a run: short, exact as far as they go, and nothing that JSON or a browser cannot read."""

import hashlib
import json
import math
import re
from pathlib import Path

import pytest

import dit_lora.report
from dit_lora.report.charts.bars import (
    Bar,
    BarChart,
    compute_ticks,
    format_number,
    should_use_log_scale,
)
from dit_lora.report.charts.data import MAX_POINTS, compute_extremes, compute_means, group_values_by_chart_point
from dit_lora.report.run.charts import Curve, LineChart


def test_a_short_line_is_held_as_it_is() -> None:
    assert compute_means([0.9, math.nan, 0.1], sparse=False) == [0.9, None, 0.1]
    assert Curve("training", [1.0, 2.0], faint=True).data()["range"] is None


def test_a_long_line_is_held_by_means_and_extremes() -> None:
    """A point stands for 50 of 100,000 values; a spike is among the highest, and non-finite values leave a gap."""
    values = [float(step) for step in range(100_000)]
    values[31_234], values[70] = 1e9, math.nan
    assert group_values_by_chart_point(range(100_000))[:2, -1].tolist() == [49, 99]
    line = compute_means(values, sparse=False)
    assert len(line) == MAX_POINTS
    assert line[:3] == [24.5, None, 124.5]
    assert compute_means(values, sparse=True)[1] == pytest.approx((sum(range(50, 100)) - 70) / 49, rel=1e-4)
    ends = compute_extremes(values)
    assert ends["lowest"][:3] == [0.0, 50.0, 100.0]
    assert ends["highest"][:3] == [49.0, 99.0, 149.0]
    assert max(filter(None, ends["highest"])) == 1e9


def test_the_last_point_joins_what_is_left() -> None:
    values = [2.0] * MAX_POINTS + [5.0]
    assert compute_means(values, sparse=False)[-1] == 5.0
    assert len(compute_means(values, sparse=False)) == MAX_POINTS // 2 + 1


@pytest.mark.parametrize(
    "values",
    [[math.nan] * 3, [0.0, 0.0], [1.7e308, -1.7e308] * 3000, [math.inf, 5e-324], [1.7e308] * 5000],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_chart_holds_is_json(values: list[float], sparse: bool) -> None:
    curve = Curve("a", values, sparse=sparse, faint=True)
    chart = LineChart("Loss", "loss", [curve], should_use_log_scale(values), False)
    json.dumps(chart.data(), allow_nan=False)


def test_bars_are_as_long_as_their_values() -> None:
    chart = BarChart("Loss", [Bar("a", 0.8, "0.8"), Bar("b", 0.2, "0.2"), Bar("c", math.nan, "NaN")])
    assert [chart.percent(bar) for bar in chart.bars] == [100, 25, 0]
    empty_chart = BarChart("Loss", [Bar("a", 0.0, "0"), Bar("b", -1.0, "-1")])
    assert [empty_chart.percent(bar) for bar in empty_chart.bars] == [0, 0]


def test_the_files_of_others_are_as_they_were_published() -> None:
    folder = Path(dit_lora.report.__file__).parent / "vendor"
    digests = re.findall(r"^([0-9a-f]{64})  (\S+)$", (folder / "README.md").read_text(), re.MULTILINE)
    filenames = {path.name for path in folder.iterdir()}
    assert {name for _, name in digests} == filenames - {"README.md"}
    for digest, name in digests:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.03, 0.31, [0.1, 0.2, 0.3]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert compute_ticks(low, high) == pytest.approx(expected)


def test_a_log_axis_is_wanted_for_a_wide_range_of_positive_values() -> None:
    assert should_use_log_scale([0.1, 4.0, math.nan])
    assert not should_use_log_scale([0.2, 4.0, 0.0])
    assert not should_use_log_scale([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.093776, "2.094"),
        (0.16180330, "0.1618"),
        (1e-4, "1e-4"),
        (2.5e-5, "2.5e-5"),
        (2048.4, "2,048"),
        (0.0, "0"),
        (999.96, "1000"),
        (3.4e38, "3.4e38"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert format_number(value) == text
