"""The charts of a run: curves over its steps, which page.js draws, and bars for its end."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dit_lora.errors import format_event_kind
from dit_lora.report.charts.bars import Bar, BarChart, format_number, should_use_log_scale
from dit_lora.report.charts.data import (
    Numbers,
    Values,
    compute_extremes,
    compute_means,
    count_values_per_point,
    group_values_by_chart_point,
)
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import MetricColumns, ensure_dict, get_diagnosis, to_float_or_nan

_WINDOW_SIZES = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_NUM_COLORS = 6  # --c0 to --c5 in style.css
_MARKS, _WORDS = 200, 160  # maximum number of marked events, and of characters of each


@dataclass(frozen=True)
class Curve:
    """One line of a chart in the report, with a value for each step of the run."""

    name: str
    values: Numbers
    color: int = 0
    smooth: bool = True
    """True if the page draws means over the window that its reader chooses."""
    faint: bool = False
    """True if the raw values are drawn behind the means."""
    sparse: bool = False
    """True if most steps have no value, so that missing values do not interrupt the line."""
    steps: Sequence[int] = ()
    """The curve's steps if they differ from the run's, drawn as dots; else empty."""

    def data(self) -> dict[str, object]:
        """One line of a chart as JSON values for the script page.js."""
        # If points combine several values, the page draws their range instead of the values.
        thinned = self.faint and count_values_per_point(len(self.values)) > 1
        return {
            "name": self.name,
            "color": self.color % _NUM_COLORS,
            "y": compute_means(self.values, sparse=self.sparse),
            "range": compute_extremes(self.values) if thinned else None,
            "smooth": self.smooth,
            "faint": self.faint,
            "sparse": self.sparse,
            "steps": list(self.steps) or None,
        }


@dataclass(frozen=True)
class LineChart:
    """One chart of the report: curves over the steps of a run; `unit` is the unit of their values."""

    title: str
    unit: str
    curves: Sequence[Curve]
    log: bool
    from_zero: bool

    def data(self) -> dict[str, object]:
        """A line chart as JSON values for the script page.js."""
        unit = f"{self.unit} (log)" if self.log else self.unit
        return {
            "unit": unit,
            "log": self.log,
            "fromZero": self.from_zero,
            "curves": [curve.data() for curve in self.curves],
        }


@dataclass(frozen=True)
class ChartGroup:
    """Charts below one heading, which is empty for the first group."""

    title: str
    charts: Sequence[LineChart | BarChart]


def choose_smoothing_window(run: RunFiles) -> int:
    """Number of steps that a smoothed line averages: a twentieth of the run, at least 5 and at most 100."""
    count = len(run.metrics.steps)
    return max(1, min(count, 100, max(5, count // 20)))


def list_smoothing_windows(run: RunFiles) -> list[int]:
    """The smoothing windows, in steps, that the page offers; they include `choose_smoothing_window`."""
    count = len(run.metrics.steps)
    return sorted(
        {choose_smoothing_window(run), *(window for window in _WINDOW_SIZES if window <= max(1, count // 2))}
    )


def build_run_charts(run: RunFiles) -> list[ChartGroup]:
    """The report's charts in order; charts and groups without data are left out."""
    metrics = run.metrics
    losses = [Curve("training", metrics.get_metric_column("loss"), 0, faint=True)]
    for name, color, measured in (("eval", 1, run.eval_losses), ("validation", 2, run.validation_losses)):
        if measured:
            losses.append(Curve(name, list(measured.values()), color, smooth=False, steps=list(measured)))
    norms = metrics.get_grouped_columns("grad_norm_groups")
    # With one parameter group, its norm is the total norm.
    total_name = "all groups" if len(norms) > 1 else "gradient norm"
    gradients = [Curve(total_name, metrics.get_metric_column("grad_norm"), 0, faint=True)]
    if len(norms) > 1:
        gradients += [Curve(*item, color) for color, item in enumerate(norms.items(), start=1)]
    rates = metrics.get_grouped_columns("lr_groups")
    rate_curves = [Curve(*item, color, smooth=False) for color, item in enumerate(rates.items())]
    # Compare the peaks: a warm-up or a decay to zero is readable on a linear axis.
    log = should_use_log_scale([np.max(rate, where=np.isfinite(rate), initial=0.0) for rate in rates.values()])
    seconds, waiting = metrics.get_metric_column("seconds"), metrics.get_metric_column("data_seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        # Steps without a duration give NaN, which the page leaves out.
        share = 100 * (np.asarray(waiting) / np.asarray(seconds))
    throughput = Curve("samples per second", compute_samples_per_second(metrics), 2, faint=True)
    whole_step, waiting_part = Curve("whole step", seconds, 0, faint=True), Curve("waiting for data", waiting, 1)
    percentage = Curve("waiting for data", share, 1)
    peak = Curve("peak", metrics.get_metric_column("peak_gib"), 4, smooth=False)
    training = [
        _build_chart("Loss", "loss", losses),
        _build_line_chart(metrics, "loss_by_timestep", "Loss by timestep, over the run"),
        _build_line_chart(metrics, "loss_by_media", "Loss by kind of media, over the run"),
        _build_chart("Gradient norm", "norm before clipping", gradients),
        _build_chart("Learning rate", "learning rate", rate_curves, log=log, from_zero=True),
    ]
    ends = [
        _build_bar_chart(metrics, "loss_by_timestep", "Loss by timestep, at the end"),
        _build_bar_chart(metrics, "loss_by_media", "Loss by kind of media, at the end"),
    ]
    device = [
        _build_chart("Throughput", "samples per second", [throughput], from_zero=True),
        _build_chart("Time per step", "seconds", [whole_step, waiting_part], from_zero=True),
        _build_chart("Time waiting for data", "percent of the step", [percentage], from_zero=True),
        _build_chart("Peak memory so far", "GiB", [peak], from_zero=True),
    ]
    devices = run.environment.get("devices")
    names = [str(ensure_dict(entry).get("name")) for entry in devices] if isinstance(devices, list) else []
    # Several equal devices are named once; a CPU is not listed.
    device_title = f"Device: {', '.join(dict.fromkeys(names))}" if names else "Device"
    groups: dict[str, Sequence[LineChart | BarChart | None]] = {
        "": training,
        "Loss at the end": ends,
        device_title: device,
    }
    filled = {title: [chart for chart in charts if chart is not None] for title, charts in groups.items()}
    return [ChartGroup(title, charts) for title, charts in filled.items() if charts]


def build_axes(run: RunFiles) -> list[dict[str, object]]:
    """What the charts can be drawn over: steps, epochs, and the time in steps.

    Each is a name, and the position of each point on this axis; None for steps, which are their own position.
    """
    metrics = run.metrics
    axes: list[dict[str, object]] = [{"name": "step", "x": None}]
    per_epoch = to_float_or_nan(run.data.get("samples"))
    elapsed = np.cumsum(metrics.get_metric_column("seconds"))
    total = elapsed[-1] if elapsed.size else math.nan
    scale, unit = (3600, "hours") if total >= 10_800 else (60, "minutes") if total >= 180 else (1, "seconds")
    samples = np.asarray(metrics.get_metric_column("samples"))
    columns = {f"{unit} in steps": elapsed / scale}
    if per_epoch > 0:
        columns = {"epoch": samples / per_epoch, **columns}
    for name, column in columns.items():
        # An axis needs a new position for each step.
        if len(column) and np.isfinite(column).all() and (np.diff(column, prepend=0.0) > 0).all():
            axes.append(
                {"name": name, "x": [float(f"{value:.7g}") for value in group_values_by_chart_point(column)[:, -1]]}
            )
    return axes


def build_curve_data(run: RunFiles) -> dict[str, object]:
    """Data for page.js that all charts of a run share: steps, and the guard's messages by step."""
    steps = run.metrics.steps
    return {
        # Each point stands at the last of the steps that it combines.
        "steps": group_values_by_chart_point(steps)[:, -1].astype(int).tolist() if steps else [],
        "axes": build_axes(run),
        "end": run.last_step,
        "stepsPerPoint": count_values_per_point(len(steps)),
        "marks": list_event_marks(run)[:_MARKS],
    }


def list_event_marks(run: RunFiles) -> list[tuple[int, str]]:
    """Steps and messages of the guard's events, for marks in the charts."""
    labels = []
    for event in run.events:
        step, diagnosis = event.get("step"), get_diagnosis(event)
        if isinstance(step, int):
            kind = format_event_kind(str(event.get("kind", "event")))
            message = f": {diagnosis['words']}" if diagnosis.get("words") else ""
            label = f"{kind}, {event.get('action', 'report')}{message}"
            labels.append((step, label[:_WORDS]))
    return labels


def compute_samples_per_second(metrics: MetricColumns) -> Values:
    """Samples per second of each step; metrics.jsonl counts samples from the beginning of the run."""
    counts, seconds = (
        np.asarray(metrics.get_metric_column("samples")),
        np.asarray(metrics.get_metric_column("seconds")),
    )
    # Steps without new samples or without a duration have no rate.
    new = np.diff(counts, prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((new > 0) & (seconds > 0), new / seconds, np.nan)


def _build_line_chart(metrics: MetricColumns, key: str, title: str) -> LineChart | None:
    """Line chart of losses by part of the batch, such as a range of timesteps."""
    parts = _sort_parts(metrics.get_grouped_columns(key))
    curves = [Curve(_format_range(name), values, color, sparse=True) for color, (name, values) in enumerate(parts)]
    return _build_chart(title, "loss", curves)


def _build_bar_chart(metrics: MetricColumns, key: str, title: str) -> BarChart | None:
    """Bar chart of mean losses over the last quarter of the run, by part of the batch.

    Over all steps, the first ones would hide the final level.
    """
    # At least one step, also in a run of one to four steps.
    start = len(metrics.steps) - math.ceil(len(metrics.steps) / 4)
    bars = []
    for part, column in _sort_parts(metrics.get_grouped_columns(key)):
        # NaN means that the step has no value for this part.
        losses = [loss for loss in column[start:] if not math.isnan(loss)]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if losses:
            mean = sum(finite) / len(finite) if finite else math.nan
            count = f"{len(finite):,} step{'' if len(finite) == 1 else 's'}"
            bars.append(Bar(_format_range(part), mean, format_number(mean), count))
    if not bars:
        return None
    return BarChart(title, bars, f"mean loss, steps {metrics.steps[start]:,} to {metrics.steps[-1]:,}")


def build_timestep_chart(metrics: MetricColumns) -> BarChart | None:
    """Bar chart of the fraction of all samples so far with a timestep in each range; None without data."""
    parts = _sort_parts(metrics.get_grouped_columns("drawn_by_timestep"))
    # NaN for steps without a sample in this range.
    counts = {name: int(np.nansum(column)) for name, column in parts}
    total = sum(counts.values())
    if not total:
        return None
    bars = [
        Bar(
            _format_range(name),
            count / total,
            format_percent(count / total),
            f"{count:,} sample{'' if count == 1 else 's'}",
        )
        for name, count in counts.items()
    ]
    return BarChart("Sampled timesteps", bars, f"share of {total:,} samples")


def _sort_parts(parts: Mapping[str, Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    # Shorter names first, so that `0-99` comes before `100-199` and `1000-1099` last.
    return sorted(parts.items(), key=lambda item: (len(item[0]), item[0]))


def _format_range(name: str) -> str:
    """Format a range such as `0-249` with an en dash."""
    return name.replace("-", "\u2013")


def _build_chart(
    title: str, unit: str, curves: Iterable[Curve], *, log: bool | None = None, from_zero: bool = False
) -> LineChart | None:
    """Line chart of the curves that have a finite value; None if there is none."""
    finite_curves = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not finite_curves:
        return None
    if log is None:
        log = should_use_log_scale(np.concatenate([np.asarray(curve.values) for curve in finite_curves]))
    return LineChart(title, unit, finite_curves, log, from_zero)


def compute_waiting_share(metrics: MetricColumns) -> float:
    """Fraction of all steps' time that was spent waiting for data; NaN if no step recorded it."""
    waiting = np.asarray(metrics.get_metric_column("data_seconds"))
    seconds = np.asarray(metrics.get_metric_column("seconds"))
    # Only steps that have both values.
    measured = np.isfinite(waiting + seconds)
    total = seconds[measured].sum()
    return float(waiting[measured].sum() / total) if total else math.nan


def format_percent(share: float) -> str:
    return f"{format_number(100 * share, 2)}%" if math.isfinite(share) else "\u2013"
