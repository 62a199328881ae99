"""Show the time that a run took outside its steps, as bars: before the first step, between steps, after the last."""

import math
from typing import Any

from dit_lora.report.charts.bars import Bar, BarChart
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import mapping, number_or_nan

_TITLES = {
    "before": "Before the first step was taken",
    "training": "Between the first step and the last",
    "after": "After the last step",
}
_LEAST = 0.01
"""Seconds below which a phase is not drawn."""


def phase_charts(run: RunFiles) -> list[BarChart]:
    """Return the stages of phases.json; what a phase is made of follows it. Nothing for a run without the file."""
    listed = run.phases.get("phases")
    phases = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    charts = []
    for stage, title in _TITLES.items():
        total = number_or_nan(mapping(run.phases.get("stages")).get(stage))
        own = sorted((p for p in phases if p.get("stage") == stage), key=_place(phases))
        bars = [_bar(p) for p in own if number_or_nan(p.get("seconds")) >= _LEAST]
        if not math.isfinite(total) or not bars:
            continue
        named = sum(number_or_nan(p.get("seconds")) for p in own if "/" not in str(p.get("name")))
        if stage != "training" and total - named >= _LEAST:
            bars.append(Bar("other", total - named, _seconds(total - named)))
        charts.append(BarChart(f"{title}: {total:,.1f} s", bars, "seconds"))
    return charts


def _place(phases: list[dict[str, Any]]) -> Any:
    """Return a key that puts the parts of a phase, which end before it, after it."""
    names = [str(p.get("name")) for p in phases]

    def key(phase: dict[str, Any]) -> tuple[int, int]:
        name = str(phase.get("name"))
        whole = name.partition("/")[0]
        return (names.index(whole) if whole in names else len(names)), "/" in name

    return key


def _bar(phase: dict[str, Any]) -> Bar:
    name, count = str(phase.get("name")), phase.get("count")
    whole, _, part = name.partition("/")
    seconds = number_or_nan(phase.get("seconds"))
    cpu = number_or_nan(phase.get("cpu_seconds"))
    detail = f"{_seconds(cpu)} of the processor" if math.isfinite(cpu) else ""
    if isinstance(count, int) and count > 1:
        detail += f", {count:,} times"
    return Bar(f"of {whole}: {part}" if part else name, seconds, _seconds(seconds), detail)


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"
