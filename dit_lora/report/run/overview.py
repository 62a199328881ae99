"""What a run is doing, from the ends of its files: a list of 200 runs reads no file completely."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from dit_lora.files import can_open_inside_folder, open_file_inside_folder, parse_json_object
from dit_lora.report.charts.bars import format_number
from dit_lora.report.run.files import find_known_run_state
from dit_lora.report.run.history import to_float_or_nan
from dit_lora.report.run.summary import describe_failed_steps
from dit_lora.report.run.words import STATE_TEXTS
from dit_lora.training.eval_losses import EVAL_LOSS_FILES, get_eval_losses

_TAIL_BYTES = 2**16  # bytes at the end of each file that are read
_NUM_STEPS = 50  # number of last steps whose time and memory count
_SILENCE_SECONDS = 180.0
_WIDTH, _HEIGHT = 120, 32  # of a sparkline, in pixels
# PyYAML takes 30 ms for a recipe, and a run's config.yaml is written with this layout.
_STEPS_PATTERN = re.compile(r"^train:[^\n]*\n(?:[ #][^\n]*\n)*?  steps: (\d{1,9})$", re.MULTILINE)
_SAMPLE_PATTERN = re.compile(r"prompt_\d{1,6}\.(mp4|png)")


@dataclass(frozen=True)
class RunOverview:
    """One run in the list."""

    run_id: str
    name: str
    """Its path below the folder that was named."""
    state: str
    state_color: str
    step: int
    max_steps: int | None
    """None if the recipe does not say it."""
    time_left: str
    """Empty if the run has ended, or has no step yet."""
    eval_losses: Sequence[float]
    memory: str
    """Peak of the last steps; empty if it was not recorded."""
    guard: str
    guard_color: str
    sample: str
    """Path of the newest sample below the run's folder; empty without one."""
    notes: Sequence[str] = field(default_factory=list)
    """One sentence for each file that is missing or damaged."""

    @property
    def sparkline_points(self) -> str:
        """Points of an SVG line through the finite eval losses; empty for fewer than two."""
        losses = [loss for loss in self.eval_losses if math.isfinite(loss)]
        if len(losses) < 2:
            return ""
        low, span = min(losses), max(losses) - min(losses) or 1.0
        # SVG's y axis points down; two pixels are left for the line's width.
        dx = _WIDTH / (len(losses) - 1)
        return " ".join(
            f"{index * dx:.1f},{2 + (_HEIGHT - 4) * (1 - (loss - low) / span):.1f}"
            for index, loss in enumerate(losses)
        )

    @property
    def last_loss(self) -> str:
        return format_number(self.eval_losses[-1]) if self.eval_losses else ""


def read_overview(run_id: str, folder: Path, name: str) -> RunOverview:
    """Read a run for a list. Files that are missing, torn, or not regular cost only their part."""
    notes: list[str] = []
    status_data = _read_tail(folder, "status.json", notes)
    # A run of an earlier version has no status.
    status = parse_json_object(status_data) if status_data else {}
    if status is None:
        notes.append("status.json is not a JSON object and is ignored.")
    metrics = _read_last_lines(folder, "metrics.jsonl", notes)
    # The time of the last output decides where nothing else can tell.
    is_silent = time.time() - get_last_write_time(folder) > _SILENCE_SECONDS
    state = find_known_run_state(folder, status or {}) or ("silent" if is_silent else "running")
    if not metrics and state != "running":
        notes.append("It has no step: it was stopped before the first, or metrics.jsonl is missing.")
    # The recipe is read for its number of steps only.
    match = _STEPS_PATTERN.search(_read_tail(folder, "config.yaml", notes).decode(errors="replace"))
    max_steps = int(match[1]) if match else None
    step = max([0, *[line["step"] for line in metrics if isinstance(line.get("step"), int)][-1:]])
    seconds = [s for line in metrics if math.isfinite(s := to_float_or_nan(line.get("seconds")))]
    # A run that has ended has no time left.
    remaining = (max_steps or 0) - step if state == "running" and seconds else 0
    peaks = [p for line in metrics if math.isfinite(p := to_float_or_nan(line.get("peak_gib")))]
    # Events that are only reported cost no step.
    failed_steps = describe_failed_steps(_read_last_lines(folder, "events.jsonl", notes)).texts
    guard, guard_color = ("; ".join(failed_steps), "warn") if failed_steps else ("no step lost", "ok")
    if state == "stopped":
        guard, guard_color = "stopped it", "reject"
    return RunOverview(
        run_id=run_id,
        name=name,
        state=STATE_TEXTS[state][0],
        state_color=STATE_TEXTS[state][1],
        step=step,
        max_steps=max_steps,
        time_left=format_time_left(remaining * median(seconds)) if remaining > 0 else "",
        eval_losses=_read_eval_losses(folder, metrics, notes),
        memory=f"{format_number(max(peaks), 3)} GiB" if peaks else "",
        guard=guard,
        guard_color=guard_color,
        sample=_find_last_sample(folder),
        notes=notes,
    )


def format_time_left(seconds: float) -> str:
    """A duration in its two largest units, such as `2 h 5 min`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def get_last_write_time(folder: Path) -> float:
    """When a run wrote its steps or its state last; 0 for a folder without these files."""
    times = [0.0]
    for name in ("metrics.jsonl", "status.json", "config.yaml"):
        try:
            times.append((folder / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def _read_eval_losses(folder: Path, metrics: Sequence[dict[str, Any]], notes: list[str]) -> list[float]:
    # Earlier versions wrote the losses into metrics.jsonl.
    lines = chain(metrics, *(_read_last_lines(folder, name, notes) for name in EVAL_LOSS_FILES))
    # Of a step that a resumed run repeated, the later line counts.
    by_step = {
        line["step"]: to_float_or_nan(losses["eval_loss"])
        for line in lines
        if isinstance(line.get("step"), int) and "eval_loss" in (losses := get_eval_losses(line))
    }
    return [by_step[step] for step in sorted(by_step)]


def _find_last_sample(folder: Path) -> str:
    try:
        steps = sorted(
            (path for path in (folder / "samples").glob("step_*") if path.name[5:].isdecimal()), reverse=True
        )
        # The newest folder may be empty: its samples are still being made.
        for step in steps[:2]:
            for path in sorted(step.iterdir()):
                if _SAMPLE_PATTERN.fullmatch(path.name) and can_open_inside_folder(folder, path):
                    return path.relative_to(folder).as_posix()
    except OSError:
        return ""
    return ""


def _read_last_lines(folder: Path, name: str, notes: list[str]) -> list[dict[str, Any]]:
    """The last `_NUM_STEPS` objects of a JSON-lines file; lines that are torn or damaged are left out."""
    lines = _read_tail(folder, name, notes).splitlines()[-_NUM_STEPS:]
    return [value for line in lines if (value := parse_json_object(line)) is not None]


def _read_tail(folder: Path, name: str, notes: list[str]) -> bytes:
    """The last bytes of a file of the run; empty if it does not exist."""
    try:
        with open_file_inside_folder(folder, folder / name) as file:
            # A file that grows meanwhile has a few more lines.
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        # A run writes some files only when it needs them.
        return b""
    except OSError as error:
        notes.append(f"Cannot read {name}: {error.strerror}.")
        return b""
