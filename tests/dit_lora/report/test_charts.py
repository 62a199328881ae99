"""Charts draw what they are given, mark what they cannot draw, and never crash on a bad number."""

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from dit_lora.report.chart_data import POINTS, chart_data, smooth
from dit_lora.report.charts import (
    Bar,
    Mark,
    Series,
    bar_chart,
    line_chart,
    log_ticks,
    number,
    ticks,
    wants_log,
)


def chart(*series: Series, **options: bool) -> ElementTree.Element:
    text = line_chart("Loss", series, x_label="step", y_label="loss", x_range=(0, 8), **options)
    return ElementTree.fromstring(text)


def points(path: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The strokes of a path, each as its points in thousandths of the plot from its top left corner."""
    strokes = path.attrib["d"].split("M")[1:]
    return [
        [(float(x), float(y)) for x, y in (point.split() for point in stroke.split("L"))]
        for stroke in strokes
    ]


def test_a_line_passes_through_its_values() -> None:
    """Steps map linearly onto the width, and equal differences of loss onto equal heights."""
    root = chart(Series("train", [2, 4, 8], [0.9, 0.5, 0.1]))
    [stroke] = points(next(root.iter("path")))
    assert [x for x, _ in stroke] == [250, 500, 1000]
    heights = [y for _, y in stroke]
    assert heights[0] < heights[1] < heights[2]  # downwards on the screen
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])


def test_a_tick_lies_at_the_height_of_its_value() -> None:
    """A value equal to a tick is drawn on that tick's grid line."""
    root = chart(Series("train", [0, 4, 8], [0.1, 0.4, 0.7]))
    labels = [text for text in root.iter("text") if text.text == "0.4"]
    [stroke] = points(next(root.iter("path")))
    assert [float(text.attrib["y"].rstrip("%")) for text in labels] == [
        pytest.approx(stroke[1][1] / 10, abs=0.01)
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_a_marked_gap(bad: float) -> None:
    root = chart(Series("train", [1, 2, 3, 4, 5], [0.5, 0.4, bad, 0.3, 0.2]))
    assert [len(stroke) for stroke in points(next(root.iter("path")))] == [2, 2]
    [mark] = [line for line in root.iter("line") if line.get("class") == "bad"]
    assert mark.attrib["x1"] == "37.5%"
    assert "not finite" in [text for item in root.iter("li") for text in item.itertext()]


def test_a_value_between_two_gaps_is_still_seen() -> None:
    root = chart(Series("train", [1, 2, 3], [math.nan, 0.4, math.nan]))
    [dot] = root.iter("circle")
    assert dot.attrib["cx"] == "25.00%"


def test_a_logarithmic_axis_spaces_ratios_evenly_and_leaves_out_zero() -> None:
    root = chart(Series("lr", [1, 2, 3, 4], [0.0, 1e-2, 1e-3, 1e-4]), log_y=True)
    [stroke] = points(next(root.iter("path")))
    first, second, third = (y for _, y in stroke)
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert not [line for line in root.iter("line") if line.get("class") == "bad"]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [math.nan, math.nan],
        [0.0, 0.0],
        [2.5, 2.5],
        [-3.0, -3.0],
        [1.0, 1.0 + 2e-16],
        [1.7e308, -1.7e308],
        [3.4e38, 1e-38],
        [5e-324, 1e-320],
    ],
)
@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("from_zero", [False, True])
def test_no_values_crash_a_chart(values: list[float], log_y: bool, from_zero: bool) -> None:
    """Empty, constant, huge, tiny or not finite: what comes out is well-formed and free of nan."""
    series = Series("train", range(len(values)), values)
    root = chart(series, log_y=log_y, from_zero=from_zero)
    placed = [
        value
        for element in root.iter()
        for key, value in element.attrib.items()
        if key in ("x", "y", "x1", "y1", "cx", "cy", "d")
    ]
    assert not re.search("nan|inf", " ".join(placed))


def test_a_long_line_is_thinned_without_losing_its_spike() -> None:
    values = [1.0 + 0.01 * (step % 7) for step in range(50_000)]
    values[31_234] = 9.0
    text = line_chart("Loss", [Series("train", range(50_000), values)], x_label="s", y_label="l")
    [stroke] = points(next(ElementTree.fromstring(text).iter("path")))
    assert len(stroke) <= 2500
    assert min(stroke, key=lambda point: point[1])[0] == pytest.approx(
        1000 * 31_234 / 49_999, abs=0.1
    )


def test_names_are_escaped_in_legend_title_and_label() -> None:
    name = '<script>"&'
    text = line_chart(
        name, [Series(name, [1, 2], [1, 2], style="dots")], x_label=name, y_label=name
    )
    text += bar_chart(name, [Bar(name, 1.0, name)], label=name)
    assert "<script>" not in text
    ElementTree.fromstring(f"<div>{text}</div>")


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar("0-249", 0.8), Bar("250-499", 0.2), Bar("500-749", math.nan)]
    root = ElementTree.fromstring(bar_chart("Loss", bars, label="mean"))
    lengths = [float(rect.attrib["width"].rstrip("%")) for rect in root.iter("rect")]
    assert lengths[0] == pytest.approx(4 * lengths[1])
    assert lengths[2] == 0
    assert "NaN" in "".join(root.itertext())


def test_smoothing_is_a_trailing_mean_of_finite_values() -> None:
    smoothed = list(smooth([4.0, 2.0, math.nan, 6.0, 1.0], 3))
    assert smoothed[:2] == [4.0, 3.0]
    assert math.isnan(smoothed[2])
    assert smoothed[3:] == [4.0, 3.5]  # (2 + 6) / 2, (6 + 1) / 2


@pytest.mark.parametrize("window", [1, 2, 7, 50, 103, 500])
def test_smoothing_is_the_plain_mean_at_every_place(window: int) -> None:
    rng = random.Random(3)
    values = [rng.gauss(0, 1) if rng.random() > 0.1 else math.nan for _ in range(103)]
    for index, found in enumerate(smooth(values, window)):
        last = [v for v in values[max(0, index + 1 - window) : index + 1] if math.isfinite(v)]
        expected = sum(last) / len(last) if math.isfinite(values[index]) else math.nan
        assert found == pytest.approx(expected, nan_ok=True)


def test_a_huge_value_leaves_nothing_behind_when_its_window_has_passed() -> None:
    values = [0.1 * step for step in range(40)]
    values[7] = 1e30
    assert list(smooth(values, 5)[12:]) == pytest.approx(
        list(smooth([*values[:7], 0, *values[8:]], 5)[12:])
    )


def test_a_smoothed_line_keeps_its_values_faint_below_and_its_axis_to_itself() -> None:
    values = [1.0] * 200
    values[100] = 50.0
    series = Series("train", range(200), values, window=40, faint=True)
    text = line_chart("Loss", [series], x_label="s", y_label="l")
    faint, line = ElementTree.fromstring(text).iter("path")
    assert "faint" in faint.attrib["class"]
    assert line.attrib["data-series"] == "0"
    assert (
        min(y for stroke in points(faint) for _, y in stroke) < 0
    )  # beyond the frame, which cuts it
    assert min(y for stroke in points(line) for _, y in stroke) > 0


def test_marks_say_what_happened_and_where() -> None:
    words = '<b>"NaN"</b>'
    text = line_chart(
        "Loss",
        [Series("a", [0, 8], [1, 2])],
        x_label="step",
        y_label="l",
        marks=[Mark(2, words), Mark(2, "x")],
    )
    root = ElementTree.fromstring(text)
    [mark] = [line for line in root.iter("line") if line.get("class") == "mark"]
    assert mark.attrib["x1"] == "25.0%"
    assert "".join(mark.itertext()) == f"step 2: {words}"
    assert "guard" in [item for li in root.iter("li") for item in li.itertext()]


def test_what_the_script_reads_is_short_and_has_the_means() -> None:
    """Of 100,000 values 167 make a point; null stands where none of them is finite."""
    values = [float(step) for step in range(100_000)]
    values[:167] = [math.nan] * 167
    series = [Series("a", range(100_000), values, window=100)]
    data = json.loads(chart_data(series, [Mark(5, "w" * 999)], (0, 1), (0, 1), False))
    [line] = data["series"]
    assert len(line["y"]) == len(data["x"][0]) <= POINTS
    assert line["each"] == 167
    assert line["y"][:2] == [None, 250.0]  # 167 to 333
    assert data["x"][0][:2] == [166, 333]
    assert data["x"][0][-1] == 99_999
    assert len(data["marks"][0][1]) < 200


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.03, 0.31, [0.1, 0.2, 0.3]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_log_ticks_are_powers_of_ten_or_finer_where_those_are_few() -> None:
    assert log_ticks(1e-4, 2.0) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert log_ticks(0.15, 3.0) == pytest.approx([0.2, 0.5, 1, 2])
    assert log_ticks(0.31, 0.39) == pytest.approx(ticks(0.31, 0.39))


def test_a_log_axis_is_wanted_for_a_wide_range_of_positive_values() -> None:
    assert wants_log([0.1, 4.0, math.nan])
    assert not wants_log([0.2, 4.0, 0.0])
    assert not wants_log([])


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
    assert number(value) == text
