"""Show the time that a run spent outside its steps, as bars: before the first step, between steps, after the last."""

import math
from typing import Any

from dit_lora.report.charts.bars import Bar, BarChart
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import ensure_dict, to_float_or_nan

_STAGE_TITLES = {
    "before": "Before the first step",
    "training": "Between the first and the last step",
    "after": "After the last step",
}
_MIN_SECONDS = 0.01
"""Minimum seconds of a phase that is drawn."""


def build_phase_charts(run: RunFiles) -> list[BarChart]:
    """Charts of how long the run's phases took, one per stage of phases.json.

    Parts are listed after their phase; empty without the file.
    """
    listed = run.phases.get("phases")
    # phases.json may be missing or damaged.
    phases = [phase for phase in listed if isinstance(phase, dict)] if isinstance(listed, list) else []
    names = [str(phase.get("name")) for phase in phases]

    def get_position(phase: dict[str, Any]) -> tuple[int, int]:
        # Parts of a phase end before it; False sorts first, so that they follow their phase.
        name = str(phase.get("name"))
        parent = name.partition("/")[0]
        return (names.index(parent) if parent in names else len(names)), "/" in name

    charts = []
    for stage, title in _STAGE_TITLES.items():
        # Seconds of the whole stage.
        total = to_float_or_nan(ensure_dict(run.phases.get("stages")).get(stage))
        stage_phases = sorted((p for p in phases if p.get("stage") == stage), key=get_position)
        bars = [_build_bar(p) for p in stage_phases if to_float_or_nan(p.get("seconds")) >= _MIN_SECONDS]
        if not math.isfinite(total) or not bars:
            continue
        # Parts have names such as `phase/part` and are included in their phase's time.
        named = sum(to_float_or_nan(p.get("seconds")) for p in stage_phases if "/" not in str(p.get("name")))
        # The time of a stage that no phase accounts for.
        if stage != "training" and total - named >= _MIN_SECONDS:
            bars.append(Bar("other", total - named, _format_seconds(total - named)))
        charts.append(BarChart(f"{title}: {total:,.1f} s", bars, "seconds"))
    return charts


def list_reduced_checks(run: RunFiles) -> dict[str, str]:
    """The checks that the run did not make in full, each with what it did, from phases.json."""
    return {str(name): str(text) for name, text in ensure_dict(run.phases.get("reductions")).items()}


def _build_bar(phase: dict[str, Any]) -> Bar:
    name, count = str(phase.get("name")), phase.get("count")
    parent, _, part = name.partition("/")
    seconds = to_float_or_nan(phase.get("seconds"))
    cpu = to_float_or_nan(phase.get("cpu_seconds"))
    # A phase that waits for disk or network uses little processor time.
    detail = f"CPU {_format_seconds(cpu)}" if math.isfinite(cpu) else ""
    if isinstance(count, int) and count > 1:
        detail += f", {count:,} times"
    return Bar(f"{parent}: {part}" if part else name, seconds, _format_seconds(seconds), detail)


def _format_seconds(value: float) -> str:
    return f"{value:,.2f} s"
