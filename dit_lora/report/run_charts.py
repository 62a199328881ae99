"""The curves of a run, all over the same steps, with what the guard did marked on each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dit_lora.report.chart_data import Numbers, Values, extremes
from dit_lora.report.charts import Bar, Mark, Series, bar_chart, line_chart, number, wants_log
from dit_lora.report.history import Metrics, mapping
from dit_lora.report.run_files import RunFiles

_WINDOWS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_PALETTE = 6


def window_of(run: RunFiles) -> int:
    """Steps that a smoothed line averages: a twentieth of the run, at least 5 and at most 100."""
    count = len(run.metrics.steps)
    return max(1, min(count, 100, max(5, count // 20)))


def windows_of(run: RunFiles) -> list[int]:
    """Those to choose from, with the one that is shown first."""
    count = len(run.metrics.steps)
    return sorted({window_of(run), *(one for one in _WINDOWS if one <= max(1, count // 2))})


def run_charts(run: RunFiles) -> dict[str, str]:
    """The page's charts by name; those without data are absent."""
    metrics = run.metrics
    if not metrics.steps and not run.held_out:
        return {}
    charts = {
        "loss": _loss(run),
        "over_timesteps": _lines(run, "loss_by_timestep", "Loss by timestep, over the run", "loss"),
        "by_timestep": _bars(metrics, "loss_by_timestep", "Loss by timestep, at the end"),
        "over_media": _lines(run, "loss_by_media", "Loss by kind of media, over the run", "loss"),
        "by_media": _bars(metrics, "loss_by_media", "Loss by kind of media, at the end"),
        "grad_norm": _gradients(run),
        "lr": _rates(run),
        "throughput": _throughput(run),
        "seconds": _chart(
            run,
            "Time per step",
            "seconds",
            [
                _series(run, "whole step", metrics.column("seconds"), 0, faint=True),
                _series(run, "waiting for data", metrics.column("data_seconds"), 1),
            ],
            from_zero=True,
        ),
        "waiting": _chart(
            run,
            "Share of the time waiting for data",
            "percent",
            [_series(run, "waiting for data", _waiting(metrics), 1)],
            from_zero=True,
        ),
        "memory": _chart(
            run,
            "Peak memory so far",
            "GiB",
            [Series("peak", metrics.steps, metrics.column("peak_gib"), 4)],
            from_zero=True,
        ),
    }
    return {name: chart for name, chart in charts.items() if chart}


def marks(run: RunFiles) -> list[Mark]:
    """What the guard said, by step."""
    found = []
    for event in run.events:
        step, verdict = event.get("step"), mapping(event.get("verdict"))
        if isinstance(step, int):
            kind = str(event.get("kind", "event")).replace("_", " ")
            words = f": {verdict['words']}" if verdict.get("words") else ""
            found.append(Mark(step, f"{kind}, {event.get('action', 'report')}{words}"))
    return found


def samples_a_second(metrics: Metrics) -> Values:
    """Of each step; lines count samples from the beginning of the run."""
    counts, seconds = np.asarray(metrics.column("samples")), np.asarray(metrics.column("seconds"))
    new = np.diff(counts, prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((new > 0) & (seconds > 0), new / seconds, np.nan)


def _loss(run: RunFiles) -> str:
    lines = [_series(run, "training", run.metrics.column("loss"), 0, faint=True)]
    if run.held_out:
        steps, losses = list(run.held_out), list(run.held_out.values())
        lines.append(Series("held-out", steps, losses, 1, "dots"))
    return _chart(run, "Loss", "loss", lines)


def _lines(run: RunFiles, key: str, title: str, y_label: str) -> str:
    parts = run.metrics.groups(key)
    lines = [
        Series(name.replace("-", "\u2013"), *_known(run, values), color % _PALETTE, "line", window)
        for color, (name, values) in enumerate(_in_order(parts))
        for window in [max(1, window_of(run) // 2)]
    ]
    return _chart(run, title, y_label, lines)


def _known(run: RunFiles, values: Sequence[float]) -> tuple[Any, Any]:
    """The steps that have a value, for what not every step has, and the values."""
    steps, given = np.asarray(run.metrics.steps), np.asarray(values)
    known = ~np.isnan(given)
    return steps[known], given[known]


def _bars(metrics: Metrics, key: str, title: str) -> str:
    """Late in the run only: the early steps would blur where the adapter ended up."""
    first = len(metrics.steps) - math.ceil(len(metrics.steps) / 4)
    bars = []
    for part, column in _in_order(metrics.groups(key)):
        seen = [loss for loss in column[first:] if not math.isnan(loss)]
        finite = [loss for loss in seen if math.isfinite(loss)]
        if seen:
            mean = sum(finite) / len(finite) if finite else math.nan
            count = f"{len(finite):,} step{'' if len(finite) == 1 else 's'}"
            bars.append(Bar(part.replace("-", "\u2013"), mean, count))
    if not bars:
        return ""
    span = f"mean loss, steps {metrics.steps[first]:,} to {metrics.steps[-1]:,}"
    return bar_chart(title, bars, label=span)


def _in_order(parts: Mapping[str, Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    return sorted(parts.items(), key=lambda item: (len(item[0]), item[0]))


def _gradients(run: RunFiles) -> str:
    norms = run.metrics.groups("grad_norm_groups")
    name = "all groups" if len(norms) > 1 else "gradient norm"
    lines = [_series(run, name, run.metrics.column("grad_norm"), 0, faint=True)]
    if len(norms) > 1:
        lines += [
            _series(run, name, values, color)
            for color, (name, values) in enumerate(norms.items(), start=1)
        ]
    return _chart(run, "Gradient norm", "norm before clipping", lines)


def _rates(run: RunFiles) -> str:
    rates = run.metrics.groups("lr_groups")
    peaks = [
        float(np.max(values, where=np.isfinite(values), initial=0.0)) for values in rates.values()
    ]
    lines = [
        Series(name, run.metrics.steps, y, color) for color, (name, y) in enumerate(rates.items())
    ]
    # By the peaks: a warm-up or decay to zero alone reads well on a linear axis.
    log_y = wants_log(peaks)
    return _chart(run, "Learning rate", "learning rate", lines, log_y=log_y, from_zero=True)


def _throughput(run: RunFiles) -> str:
    line = _series(run, "samples per second", samples_a_second(run.metrics), 2, faint=True)
    return _chart(run, "Throughput", "samples per second", [line], from_zero=True)


def _series(
    run: RunFiles, name: str, values: Numbers, color: int, *, faint: bool = False
) -> Series:
    window = window_of(run)
    return Series(name, run.metrics.steps, values, color % _PALETTE, "line", window, faint)


def _chart(
    run: RunFiles,
    title: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_y: bool | None = None,
    from_zero: bool = False,
) -> str:
    """A chart over the whole run, all with the same steps below; "" without any finite value."""
    series = [one for one in series if np.isfinite(one.y).any()]
    if not series:
        return ""
    if log_y is None:
        log_y = wants_log([float(one.y[i]) for one in series for i in extremes(one.y)])
    return line_chart(
        title,
        series,
        x_label="step",
        y_label=y_label,
        x_range=(0, run.last_step),
        log_y=log_y,
        from_zero=from_zero,
        marks=marks(run),
    )


def _waiting(metrics: Metrics) -> Values:
    """Percent of each step's time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.asarray(metrics.column("data_seconds")) / np.asarray(metrics.column("seconds"))
    return 100 * np.where(np.isfinite(share), share, np.nan)


def share_waiting(metrics: Metrics) -> float:
    """Of the time of all steps, what passed waiting for data; NaN where no step says."""
    waited, spent = (
        np.asarray(metrics.column("data_seconds")),
        np.asarray(metrics.column("seconds")),
    )
    known = np.isfinite(waited + spent)
    total = spent[known].sum()
    return float(waited[known].sum() / total) if total else math.nan


def percent(share: float) -> str:
    return f"{number(100 * share, 2)}%" if math.isfinite(share) else "\u2013"
