"""The charts of a run: curves over its steps, which page.js draws, and bars for its end."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dit_lora.report.charts.bars import Bar, BarChart, number, wants_log
from dit_lora.report.charts.data import Numbers, Values, extremes, joined, means, values_per_point
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import Metrics, mapping

_WINDOWS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_PALETTE = 6  # --c0 to --c5 in style.css
_MARKS, _WORDS = 200, 160  # maximum number of marked events, and of characters of each


@dataclass(frozen=True)
class Curve:
    """One line of a chart, with a value for each step of the run."""

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
        """The curve as JSON values for page.js."""
        # If points combine several values, the page draws their range instead of the values.
        thinned = self.faint and values_per_point(len(self.values)) > 1
        return {
            "name": self.name,
            "color": self.color % _PALETTE,
            "y": means(self.values, sparse=self.sparse),
            "range": extremes(self.values) if thinned else None,
            "smooth": self.smooth,
            "faint": self.faint,
            "sparse": self.sparse,
            "steps": list(self.steps) or None,
        }


@dataclass(frozen=True)
class LineChart:
    """Curves over the steps of a run; `unit` is the unit of their values."""

    title: str
    unit: str
    curves: Sequence[Curve]
    log: bool
    from_zero: bool

    def data(self) -> dict[str, object]:
        """The chart as JSON values for page.js."""
        return {
            "log": self.log,
            "fromZero": self.from_zero,
            "curves": [curve.data() for curve in self.curves],
        }


def window_of(run: RunFiles) -> int:
    """Number of steps that a smoothed line averages: a twentieth of the run, at least 5 and at most 100."""
    count = len(run.metrics.steps)
    return max(1, min(count, 100, max(5, count // 20)))


def windows_of(run: RunFiles) -> list[int]:
    """The smoothing windows that the page offers, including `window_of`."""
    count = len(run.metrics.steps)
    return sorted(
        {window_of(run), *(window for window in _WINDOWS if window <= max(1, count // 2))}
    )


def run_charts(run: RunFiles) -> list[LineChart | BarChart]:
    """The page's charts, in order; charts without data are left out."""
    metrics = run.metrics
    seconds, waiting = metrics.column("seconds"), metrics.column("data_seconds")
    with np.errstate(divide="ignore", invalid="ignore"):
        # Steps without a duration give NaN, which the page leaves out.
        share = 100 * (np.asarray(waiting) / np.asarray(seconds))
    rate = Curve("samples per second", samples_a_second(metrics), 2, faint=True)
    whole_step, waiting_part = (
        Curve("whole step", seconds, 0, faint=True),
        Curve("waiting for data", waiting, 1),
    )
    percentage = Curve("waiting for data", share, 1)
    peak = Curve("peak", metrics.column("peak_gib"), 4, smooth=False)
    charts = [
        _loss(run),
        _lines(metrics, "loss_by_timestep", "Loss by timestep, over the run"),
        _bars(metrics, "loss_by_timestep", "Loss by timestep, at the end"),
        _drawn(metrics),
        _lines(metrics, "loss_by_media", "Loss by kind of media, over the run"),
        _bars(metrics, "loss_by_media", "Loss by kind of media, at the end"),
        _gradients(metrics),
        _rates(metrics),
        _chart("Throughput", "samples per second", [rate], from_zero=True),
        _chart("Time per step", "seconds", [whole_step, waiting_part], from_zero=True),
        _chart("Share of the time waiting for data", "percent", [percentage], from_zero=True),
        _chart("Peak memory so far", "GiB", [peak], from_zero=True),
    ]
    return [chart for chart in charts if chart is not None]


def curve_data(run: RunFiles) -> dict[str, object]:
    """Data for page.js that all charts share: steps, and the guard's messages by step."""
    steps = run.metrics.steps
    return {
        # Each point stands at the last of the steps that it combines.
        "steps": joined(steps)[:, -1].astype(int).tolist() if steps else [],
        "end": run.last_step,
        "stepsPerPoint": values_per_point(len(steps)),
        "marks": marks(run)[:_MARKS],
    }


def marks(run: RunFiles) -> list[tuple[int, str]]:
    """Steps and messages of the guard's events."""
    labels = []
    for event in run.events:
        step, verdict = event.get("step"), mapping(event.get("verdict"))
        if isinstance(step, int):
            kind = str(event.get("kind", "event")).replace("_", " ")
            message = f": {verdict['words']}" if verdict.get("words") else ""
            label = f"{kind}, {event.get('action', 'report')}{message}"
            labels.append((step, label[:_WORDS]))
    return labels


def samples_a_second(metrics: Metrics) -> Values:
    """Samples per second of each step; metrics.jsonl counts samples from the beginning of the run."""
    counts, seconds = np.asarray(metrics.column("samples")), np.asarray(metrics.column("seconds"))
    # Steps without new samples or without a duration have no rate.
    new = np.diff(counts, prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((new > 0) & (seconds > 0), new / seconds, np.nan)


def _loss(run: RunFiles) -> LineChart | None:
    curves = [Curve("training", run.metrics.column("loss"), 0, faint=True)]
    if run.held_out:
        losses = list(run.held_out.values())
        curves.append(Curve("held-out", losses, 1, smooth=False, steps=list(run.held_out)))
    return _chart("Loss", "loss", curves)


def _lines(metrics: Metrics, key: str, title: str) -> LineChart | None:
    """A chart of losses by part of the batch, such as a range of timesteps."""
    parts = _in_order(metrics.groups(key))
    curves = [
        Curve(_range_name(name), values, color, sparse=True)
        for color, (name, values) in enumerate(parts)
    ]
    return _chart(title, "loss", curves)


def _bars(metrics: Metrics, key: str, title: str) -> BarChart | None:
    """Mean losses over the last quarter of the run: early steps would hide the final level."""
    # At least one step, also in a run of one to four steps.
    start = len(metrics.steps) - math.ceil(len(metrics.steps) / 4)
    bars = []
    for part, column in _in_order(metrics.groups(key)):
        # NaN means that the step has no value for this part.
        losses = [loss for loss in column[start:] if not math.isnan(loss)]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if losses:
            mean = sum(finite) / len(finite) if finite else math.nan
            count = f"{len(finite):,} step{'' if len(finite) == 1 else 's'}"
            bars.append(Bar(_range_name(part), mean, number(mean), count))
    if not bars:
        return None
    return BarChart(
        title, bars, f"mean loss, steps {metrics.steps[start]:,} to {metrics.steps[-1]:,}"
    )


def _drawn(metrics: Metrics) -> BarChart | None:
    """The fraction of all samples so far with a timestep in each range."""
    counts = {
        # NaN for steps without a sample in this range.
        name: int(np.nansum(column))
        for name, column in _in_order(metrics.groups("drawn_by_timestep"))
    }
    total = sum(counts.values())
    bars = [
        Bar(_range_name(name), count / total, percent(count / total), f"{count:,} drawn")
        for name, count in counts.items()
        if total
    ]
    return BarChart("Timesteps drawn", bars, f"share of {total:,} samples") if bars else None


def _in_order(parts: Mapping[str, Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    # Shorter names first, so that `0-99` comes before `100-199` and `1000-1099` last.
    return sorted(parts.items(), key=lambda item: (len(item[0]), item[0]))


def _range_name(name: str) -> str:
    """`0-249` with an en dash."""
    return name.replace("-", "\u2013")


def _gradients(metrics: Metrics) -> LineChart | None:
    norms = metrics.groups("grad_norm_groups")
    # With one parameter group, its norm is the total norm.
    name = "all groups" if len(norms) > 1 else "gradient norm"
    curves = [Curve(name, metrics.column("grad_norm"), 0, faint=True)]
    if len(norms) > 1:
        curves += [Curve(*item, color) for color, item in enumerate(norms.items(), start=1)]
    return _chart("Gradient norm", "norm before clipping", curves)


def _rates(metrics: Metrics) -> LineChart | None:
    rates = metrics.groups("lr_groups")
    curves = [Curve(*item, color, smooth=False) for color, item in enumerate(rates.items())]
    peaks = [np.max(values, where=np.isfinite(values), initial=0.0) for values in rates.values()]
    # Compare the peaks: a warm-up or a decay to zero is readable on a linear axis.
    log = wants_log(peaks)
    return _chart("Learning rate", "learning rate", curves, log=log, from_zero=True)


def _chart(
    title: str,
    unit: str,
    curves: Iterable[Curve],
    *,
    log: bool | None = None,
    from_zero: bool = False,
) -> LineChart | None:
    """A chart of the curves that have a finite value; None if there is none."""
    finite_curves = [curve for curve in curves if np.isfinite(curve.values).any()]
    if not finite_curves:
        return None
    if log is None:
        log = wants_log(np.concatenate([np.asarray(curve.values) for curve in finite_curves]))
    return LineChart(title, unit, finite_curves, log, from_zero)


def share_waiting(metrics: Metrics) -> float:
    """Fraction of all steps' time that was spent waiting for data; NaN if no step recorded it."""
    waiting = np.asarray(metrics.column("data_seconds"))
    seconds = np.asarray(metrics.column("seconds"))
    # Only steps that have both values.
    measured = np.isfinite(waiting + seconds)
    total = seconds[measured].sum()
    return float(waiting[measured].sum() / total) if total else math.nan


def percent(share: float) -> str:
    return f"{number(100 * share, 2)}%" if math.isfinite(share) else "\u2013"
