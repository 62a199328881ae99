"""Compares runs: figures, curves, recipes, and samples at the same prompt and step."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dit_lora.files import can_open_inside_folder
from dit_lora.report.charts.bars import compute_ticks, format_number
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import ensure_dict
from dit_lora.report.run.page import get_sample_prompts
from dit_lora.report.run.recipe_diff import flatten_section
from dit_lora.report.run.samples import MAX_SAMPLE_BYTES, MAX_STEPS
from dit_lora.report.run.saves import list_step_folders
from dit_lora.report.run.words import NO_VALUE, HeadlineFigure, build_figures

_WIDTH, _HEIGHT = 640, 240  # of a chart, in units of its view box
_MAX_POINTS = 320  # points of a curve; more steps are averaged
_SAMPLE_PATTERN = re.compile(r"prompt_(\d{1,6})\.(mp4|png)")

Row = tuple[str, Sequence[str]]
"""A label, and a text for each run."""


@dataclass(frozen=True)
class OverlaidChart:
    """Curves of several runs on the same axes, as points of SVG lines."""

    title: str
    lines: Sequence[str]
    """One for each run; empty for a run without values."""
    ticks: Sequence[tuple[float, str]]
    """Heights of horizontal lines, with their labels."""
    last_step: int


def list_headline_figures(runs: Sequence[RunFiles]) -> list[Row]:
    """The headline figures of the runs' reports, a row for each."""
    by_run = [{figure.label: figure for figure in build_figures(run)} for run in runs]
    # Only some runs have a validation loss.
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    missing = HeadlineFigure("", NO_VALUE)
    rows = [(label, [figures.get(label, missing) for figures in by_run]) for label in labels]
    return [(label, [f"{figure.value} {figure.detail}".strip() for figure in figures]) for label, figures in rows]


def list_differences(runs: Sequence[RunFiles]) -> list[Row]:
    """The keys of the recipes that have different values, in the order of the recipes."""
    by_run = [dict(flatten_section(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in by_run for key in values)
    rows = [(key, [values.get(key, "not given") for values in by_run]) for key in keys]
    # A missing key and an explicit null are the same.
    return [row for row in rows if len({"null" if value == "not given" else value for value in row[1]}) > 1]


def choose_step(step_samples: Sequence[Mapping[int, Path]]) -> int | None:
    """The step at which to compare samples: the last that all runs have, or the last of any; None without samples."""
    common_steps = set.intersection(*map(set, step_samples))
    # Step 0 is before the training, where all runs are the same model.
    return max(common_steps - {0}, default=max(set().union(*step_samples), default=None))


def find_nearest_steps(step_samples: Sequence[Mapping[int, Path]], step: int) -> list[int | None]:
    """For each run the sampled step that is nearest to `step`; None for a run without samples."""
    return [min(steps, key=lambda sampled: abs(sampled - step), default=None) for steps in step_samples]


def list_prompts(runs: Sequence[RunFiles], steps: Sequence[int | None]) -> list[Row]:
    """The paths of the samples at a step of each run, by prompt; recipes may list the prompts in another order."""
    by_run: list[dict[str, str]] = []
    for run, step in zip(runs, steps, strict=True):
        texts = get_sample_prompts(ensure_dict(run.config.get("validation")))
        files = None if step is None else find_step_folders(run.folder).get(step)
        paths = sorted(files.iterdir()) if files else []
        path_by_prompt: dict[str, str] = {}
        for path in paths:
            match = _SAMPLE_PATTERN.fullmatch(path.name)
            if match and can_open_inside_folder(run.folder, path, MAX_SAMPLE_BYTES):
                index = int(match[1])
                text = texts[index] if index < len(texts) else f"prompt {index}"
                path_by_prompt[text] = path.relative_to(run.folder).as_posix()
        by_run.append(path_by_prompt)
    prompts = dict.fromkeys(prompt for path_by_prompt in by_run for prompt in path_by_prompt)
    return [(prompt, [paths.get(prompt, "") for paths in by_run]) for prompt in prompts]


def find_step_folders(folder: Path) -> dict[int, Path]:
    """The folders of the last sampled steps."""
    return dict(list(list_step_folders(folder / "samples").items())[-MAX_STEPS:])


def list_curves(runs: Sequence[RunFiles]) -> list[tuple[str, list[list[tuple[int, float]]]]]:
    """For each chart its title, and the curve of each run as (step, value)."""
    return [
        ("Eval loss", [list(run.eval_losses.items()) for run in runs]),
        ("Validation loss", [list(run.validation_losses.items()) for run in runs]),
        ("Training loss", [_average(run.metrics.steps, run.metrics.get_metric_column("loss")) for run in runs]),
        ("Seconds per step", [_average(run.metrics.steps, run.metrics.get_metric_column("seconds")) for run in runs]),
    ]


def _average(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    """A curve of at most `_MAX_POINTS` means; values that are not finite are left out."""
    # Steps for each point.
    width = max(1, math.ceil(len(steps) / _MAX_POINTS))
    points = []
    for start in range(0, len(steps), width):
        finite = [value for value in values[start : start + width] if math.isfinite(value)]
        if finite:
            points.append((steps[min(start + width, len(steps)) - 1], sum(finite) / len(finite)))
    return points


def overlay_curves(title: str, curves: Sequence[Iterable[tuple[int, float]]]) -> OverlaidChart:
    finite_curves = [[(step, value) for step, value in curve if math.isfinite(value)] for curve in curves]
    values = [value for curve in finite_curves for _, value in curve]
    last_step = max((step for curve in finite_curves for step, _ in curve), default=1) or 1
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    # Equal values would leave the chart without a height.
    high = high if high > low else low + (abs(low) or 1.0)

    def get_curve_y(value: float) -> float:
        # SVG's y axis points down.
        return round(_HEIGHT * (1 - (value - low) / (high - low)), 1)

    lines = [
        " ".join(f"{_WIDTH * step / last_step:.1f},{get_curve_y(value)}" for step, value in curve)
        for curve in finite_curves
    ]
    ticks = [(get_curve_y(tick), format_number(tick, 3)) for tick in compute_ticks(low, high)]
    return OverlaidChart(title, lines, ticks, last_step)
