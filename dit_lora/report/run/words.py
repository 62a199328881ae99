"""A run's tables as text: headline figures, guard events, checks of the result, and left-out samples."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dit_lora.errors import format_event_kind
from dit_lora.report.charts.bars import Bar, BarChart, format_number
from dit_lora.report.charts.data import Numbers, Values
from dit_lora.report.run.charts import (
    choose_smoothing_window,
    compute_samples_per_second,
    compute_waiting_share,
    format_percent,
)
from dit_lora.report.run.files import RunFiles, RunState
from dit_lora.report.run.history import ensure_dict, get_diagnosis, to_float_or_nan
from dit_lora.report.run.recipe_diff import format_value

NO_VALUE = "\u2013"
MAX_BARS = 16
"""Maximum number of modules whose update is drawn, the largest first."""
MAX_ROWS = 500
"""Maximum number of rows of one table."""

STATE_TEXTS: dict[RunState, tuple[str, str]] = {
    "running": ("running", "ok"),
    "finished": ("finished", "ok"),
    "stopped": ("stopped by the guard", "reject"),
    "interrupted": ("interrupted", "warn"),
    "failed": ("ended with an error", "reject"),
    "silent": ("not finished, no longer running", "warn"),
}
"""Text and color class of each state."""
_CAUSE_TEXTS = {
    "data": "the data of a sample",
    "labels": "labels without a token to learn",
    "inputs": "the noise, timestep or schedule, not the sample",
    "step": "the position in the run; other samples fail there too, or samples fail only together",
    "rank": "one rank; others compute the same and are healthy",
    "precision": "the precision; the step is finite in fp32",
    "kernel": "a fused kernel; the step is finite without it",
    "attention_backend": "an attention backend; the step is finite without it",
    "weights": "a weight or average that is bad, or a frozen weight that changed",
    "optimizer": "the optimizer\u2019s state",
    "learning_rate": "weights that diverged at this learning rate",
    "transient": "a transient fault; the step is finite when repeated",
    "unknown": "not found",
}
_GRADIENT_CAUSE_TEXTS = {
    "kernel": "a fused kernel; the gradient agrees with the loss without it",
    "attention_backend": "an attention backend; the gradient agrees with the loss without it",
    "compile": "torch.compile; the gradient agrees with the loss in eager mode",
    "recomputation": "gradient checkpointing; the gradient agrees with the loss without it",
    "offload": "offload; the gradient agrees with the loss while the base stays on the device",
    "accumulation": "the weights of the micro-batches in the gradient",
    "stale": "the gradient of the step before was not cleared",
    "ranks": "the gradient is not equal on all ranks, or not the mean over them",
    "detached": "parameters that affect the loss get no gradient",
    "transient": "a transient fault; the gradient agrees with the loss in some replays",
    "unknown": "not found",
}
"""Causes in events of kind `gradient_check`."""
_ACTION_TEXTS = {
    "retry": "repeated the step",
    "skip": "repeated the step without the sample",
    "skip without samples": "left the step out, because no sample is the cause",
    "quarantine": "quarantined the sample and repeated the step without it",
    "fallback": "switched the component off for this run and repeated the step",
    "rollback": "rolled back to an earlier step",
    "stop": "stopped the run",
    "report": "reported it and continued",
}
_DIAGNOSIS_FIELDS = ("module", "op", "direction", "dtype", "timesteps", "switch")


@dataclass(frozen=True)
class HeadlineFigure:
    """One number in the headline row of the report."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class EventRow:
    """One guard event of the report, with the rows of its expandable details."""

    step: str
    kind: str
    action: str
    words: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class VerificationRows:
    passed: bool
    checks: Sequence[tuple[str, bool, str]]
    """Name of each check, whether it passed, and its message."""
    chart: BarChart | None
    modules: Sequence[tuple[str, str, str]]
    hidden: int


def build_figures(run: RunFiles) -> list[HeadlineFigure]:
    """The numbers in the headline row of the report."""
    metrics, window, num_steps = run.metrics, choose_smoothing_window(run), run.max_steps
    seconds, peaks = (
        _select_finite(metrics.get_metric_column("seconds")),
        _select_finite(metrics.get_metric_column("peak_gib")),
    )
    rates = _select_finite(compute_samples_per_second(metrics))
    waiting = compute_waiting_share(metrics)
    # Events that are only reported have no action.
    actions = Counter(str(event["action"]) for event in run.events if event.get("action") not in (None, "report"))
    action_counts = [f"{count:,} {name}" for name, count in list(actions.items())[:4]]
    # A run that ended before the recipe's last step.
    short = num_steps is not None and run.num_steps_taken < num_steps and run.state != "running"
    # A finished run that is short has been ended by `train.stop_after`.
    ending = f", {'stopped early' if run.state == 'finished' else 'not finished'}" if short else ""
    step_detail = "" if num_steps is None else f"of {num_steps:,}{ending}"
    details = ["median" if len(seconds) else ""]
    if math.isfinite(waiting):
        details.append(f"{format_percent(waiting)} waiting for data")
    return [
        HeadlineFigure("Steps", f"{run.num_steps_taken:,}", step_detail),
        HeadlineFigure("Training loss", _format_last_loss(run), f"mean of the last {window}" if window > 1 else ""),
        _build_eval_loss_figure("Eval loss", run.eval_losses),
        *([_build_eval_loss_figure("Validation loss", run.validation_losses)] if run.validation_losses else []),
        HeadlineFigure("Seconds per step", _format_median(seconds), ", ".join(filter(None, details))),
        HeadlineFigure("Samples per second", _format_median(rates), "median" if len(rates) else ""),
        HeadlineFigure("Peak memory", f"{format_number(peaks.max(), 3)} GiB" if len(peaks) else NO_VALUE),
        HeadlineFigure("Guard events", f"{run.event_count:,}", ", ".join(action_counts)),
    ]


def _select_finite(values: Numbers) -> Values:
    column = np.asarray(values, dtype=np.float64)
    return column[np.isfinite(column)]


def _format_median(values: Values) -> str:
    return format_number(float(np.median(values)), 3) if len(values) else NO_VALUE


def _format_last_loss(run: RunFiles) -> str:
    """Mean of the finite losses in the window that ends with the last finite loss."""
    losses = np.asarray(run.metrics.get_metric_column("loss"))
    finite = np.flatnonzero(np.isfinite(losses))
    if not finite.size:
        return NO_VALUE
    # The last steps may be NaN: the window ends with the last finite loss.
    window = losses[max(0, finite[-1] + 1 - choose_smoothing_window(run)) : finite[-1] + 1]
    return format_number(float(np.mean(window, where=np.isfinite(window))))


def _build_eval_loss_figure(label: str, eval_losses: Mapping[int, float]) -> HeadlineFigure:
    if not eval_losses:
        return HeadlineFigure(label, NO_VALUE, "not measured")
    # The loss before training is at step 0, if it was measured.
    first_step, last_step = min(eval_losses), max(eval_losses)
    first_loss, last_loss = eval_losses[first_step], eval_losses[last_step]
    if first_step == last_step:
        return HeadlineFigure(label, format_number(first_loss), f"at step {first_step:,} only")
    steps = f"step {first_step:,} to {last_step:,}"
    comparable = math.isfinite(first_loss) and math.isfinite(last_loss) and first_loss != 0
    change = f"{100 * (last_loss / first_loss - 1):+.1f}%, " if comparable else ""
    return HeadlineFigure(label, f"{format_number(first_loss)} \u2192 {format_number(last_loss)}", change + steps)


def build_event_row(event: Mapping[str, Any], actions: Mapping[str, str] = _ACTION_TEXTS) -> EventRow:
    """The table row of one guard event; `actions` describes each recovery action by its name."""
    diagnosis = get_diagnosis(event)
    cause, action = str(diagnosis.get("cause", "")), str(event.get("action", ""))
    action_text = actions.get(action if event.get("sample_ids") else f"{action} without samples", actions.get(action))
    cause_texts = _GRADIENT_CAUSE_TEXTS if event.get("kind") == "gradient_check" else _CAUSE_TEXTS
    micro_step, seconds = event.get("micro_step"), to_float_or_nan(event.get("seconds"))
    rows = [
        ("Cause", f"{cause}: {cause_texts[cause]}" if cause in cause_texts else cause),
        ("Action", f"{action}: {action_text}" if action_text else action),
        ("Samples", format_value(event.get("sample_ids"))),
        ("Micro-step, rank", f"{micro_step}, {event.get('rank')}" if micro_step is not None else ""),
        *((name.capitalize(), format_value(diagnosis.get(name))) for name in _DIAGNOSIS_FIELDS),
        ("Evidence", format_value(diagnosis.get("evidence"))),
        ("Bundle", format_value(event.get("bundle"))),
        ("Seconds", format_number(seconds, 3) if math.isfinite(seconds) and seconds > 0 else ""),
    ]
    # Keys that have a row of their own; the rest is listed under "Other facts".
    known_keys = {"cause", "words", "evidence", "step", "rank", "micro_step", "sample_ids", *_DIAGNOSIS_FIELDS}
    more = {key: value for key, value in diagnosis.items() if key not in known_keys}
    rows.append(("Other facts", format_value(more)))
    message = format_value(diagnosis.get("words"))
    kind = format_event_kind(format_value(event.get("kind")))
    step = event.get("step")
    step_text = f"{step:,}" if isinstance(step, int) else format_value(step) or NO_VALUE
    return EventRow(step_text, kind, action, message, [(name, text) for name, text in rows if text])


def build_verification_rows(record: Mapping[str, Any]) -> VerificationRows | None:
    """The checks in a run's verification.json, for the report; None if there are none."""
    if not record:
        return None
    checks = [
        (name, entry.get("passed") is True, format_value(entry.get("words")))
        for name, entry in ensure_dict(record.get("checks")).items()
        if isinstance(entry, dict)
    ]
    listed = record.get("modules")
    modules = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    # The largest relative update first.
    modules.sort(key=_get_sort_size, reverse=True)
    # Show norms relative to the weights if any is known, else absolute norms.
    relative = any(math.isfinite(to_float_or_nan(entry.get("relative"))) for entry in modules)
    key = "relative" if relative else "norm"
    bars = []
    for entry in modules[:MAX_BARS]:
        value = to_float_or_nan(entry.get(key))
        # The end of the name, from the first block number on: `12.attn.to_q` of `transformer_blocks.12.attn.to_q`.
        parts = str(entry.get("name", "")).split(".")
        start = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
        bars.append(Bar(".".join(parts[start:]), value, format_number(value)))
    rows = [
        (str(entry.get("name", "")), _format_or_dash(entry.get("norm")), _format_or_dash(entry.get("relative")))
        for entry in modules[:MAX_ROWS]
    ]
    title = "Largest updates" if len(modules) > MAX_BARS else "Updates by module"
    label = "norm of the update" + (" / norm of the weight" if relative else "")
    chart = BarChart(title, bars, label) if bars else None
    return VerificationRows(record.get("passed") is True, checks, chart, rows, max(0, len(modules) - MAX_ROWS))


def _get_sort_size(module: Mapping[str, Any]) -> float:
    for key in ("relative", "norm"):
        value = to_float_or_nan(module.get(key))
        if not math.isnan(value):
            return value
    return -math.inf


def _format_or_dash(value: Any) -> str:
    parsed = to_float_or_nan(value)
    return NO_VALUE if math.isnan(parsed) else format_number(parsed)


def build_quarantine_rows(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """Rows of the report's quarantine table: sample, epochs without it, cause and reason."""
    rows = []
    for entry in run.quarantine:
        first_epoch, last_epoch = entry.get("from_epoch"), entry.get("to_epoch")
        epochs = f"epoch {first_epoch}" if last_epoch == first_epoch else f"epochs {first_epoch} to {last_epoch}"
        # Left out from this epoch to the end of training.
        if last_epoch is None:
            epochs = f"from epoch {first_epoch} on"
        cause, reason = format_value(entry.get("cause")), format_value(entry.get("reason"))
        rows.append((format_value(entry.get("sample_id")), epochs, cause, reason))
    return rows
