"""The page that compares two to four runs: figures, curves, recipes, and samples at the same prompt and step."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dit_lora.files import can_open_inside
from dit_lora.report.charts.bars import compute_ticks, format_number
from dit_lora.report.run.files import RunFiles, RunReader
from dit_lora.report.run.history import ensure_dict
from dit_lora.report.run.page import get_sample_prompts
from dit_lora.report.run.recipe_diff import flatten_section
from dit_lora.report.run.samples import MAX_SAMPLE_BYTES, MAX_STEPS
from dit_lora.report.run.words import NO_VALUE, STATE_TEXTS, Figure, build_figures
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import studio_page

_MIN_RUNS, _MAX_RUNS = 2, 4
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


class ComparePage:
    """The route of the comparison."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library

    def list_routes(self) -> list[BaseRoute]:
        return [Route("/compare", self.show)]

    def show(self, request: Request) -> Response:
        run_ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not _MIN_RUNS <= len(run_ids) <= _MAX_RUNS:
            message = f"choose {_MIN_RUNS} to {_MAX_RUNS} runs, not {len(run_ids)}; go back to the list of runs"
            raise HTTPException(400, message)
        folders = [self._library.get_folder(run_id) for run_id in run_ids]
        runs = [RunReader(folder).read() for folder in folders]
        step_samples = [_find_step_folders(folder) for folder in folders]
        # Steps that every run has can be compared; without such, those of any run.
        steps = sorted(set.intersection(*map(set, step_samples)) or set().union(*step_samples))
        charts = [_overlay_curves(title, curves) for title, curves in _list_curves(runs)]
        chosen = request.query_params.get("step", "")
        step = next((step for step in steps if str(step) == chosen), steps[-1] if steps else None)
        return studio_page(
            request,
            "studio_compare.html",
            run_ids=run_ids,
            names=[self._library.get_name(folder) for folder in folders],
            states=[STATE_TEXTS[run.state] for run in runs],
            figures=list_figures(runs),
            charts=[chart for chart in charts if any(chart.lines)],
            differences=list_differences(runs),
            steps=steps,
            step=step,
            prompts=[] if step is None else list_prompts(runs, step),
        )


def list_figures(runs: Sequence[RunFiles]) -> list[Row]:
    """The headline figures of the runs' reports, a row for each."""
    by_run = [{figure.label: figure for figure in build_figures(run)} for run in runs]
    # Only some runs have a validation loss.
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    missing = Figure("", NO_VALUE)
    rows = [(label, [figures.get(label, missing) for figures in by_run]) for label in labels]
    return [(label, [f"{figure.value} {figure.detail}".strip() for figure in figures]) for label, figures in rows]


def list_differences(runs: Sequence[RunFiles]) -> list[Row]:
    """The keys of the recipes that have different values, in the order of the recipes."""
    by_run = [dict(flatten_section(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in by_run for key in values)
    rows = [(key, [values.get(key, "not given") for values in by_run]) for key in keys]
    # A missing key and an explicit null are the same.
    return [row for row in rows if len({"null" if value == "not given" else value for value in row[1]}) > 1]


def list_prompts(runs: Sequence[RunFiles], step: int) -> list[Row]:
    """The paths of a step's samples by prompt; recipes may list the same prompts in another order."""
    by_run: list[dict[str, str]] = []
    for run in runs:
        texts = get_sample_prompts(ensure_dict(run.config.get("validation")))
        files = _find_step_folders(run.folder).get(step)
        paths = sorted(files.iterdir()) if files else []
        path_by_prompt: dict[str, str] = {}
        for path in paths:
            match = _SAMPLE_PATTERN.fullmatch(path.name)
            if match and can_open_inside(run.folder, path, MAX_SAMPLE_BYTES):
                index = int(match[1])
                text = texts[index] if index < len(texts) else f"prompt {index}"
                path_by_prompt[text] = path.relative_to(run.folder).as_posix()
        by_run.append(path_by_prompt)
    prompts = dict.fromkeys(prompt for path_by_prompt in by_run for prompt in path_by_prompt)
    return [(prompt, [paths.get(prompt, "") for paths in by_run]) for prompt in prompts]


def _find_step_folders(folder: Path) -> dict[int, Path]:
    """The folders of the last sampled steps."""
    folders = {}
    for path in (folder / "samples").glob("step_*"):
        # At least six digits, as a run writes them. A link could lead to another run.
        match = re.fullmatch(r"step_(\d{6,12})", path.name)
        if match and path.is_dir() and not path.is_symlink():
            folders[int(match[1])] = path
    return {step: folders[step] for step in sorted(folders)[-MAX_STEPS:]}


def _list_curves(runs: Sequence[RunFiles]) -> list[tuple[str, list[list[tuple[int, float]]]]]:
    """For each chart its title, and the curve of each run as (step, value)."""
    return [
        ("Eval loss", [list(run.eval_losses.items()) for run in runs]),
        ("Validation loss", [list(run.validation_losses.items()) for run in runs]),
        ("Training loss", [_average(run.metrics.steps, run.metrics.get_column("loss")) for run in runs]),
        ("Seconds per step", [_average(run.metrics.steps, run.metrics.get_column("seconds")) for run in runs]),
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


def _overlay_curves(title: str, curves: Sequence[Iterable[tuple[int, float]]]) -> OverlaidChart:
    finite_curves = [[(step, value) for step, value in curve if math.isfinite(value)] for curve in curves]
    values = [value for curve in finite_curves for _, value in curve]
    last_step = max((step for curve in finite_curves for step, _ in curve), default=1) or 1
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    # Equal values would leave the chart without a height.
    high = high if high > low else low + (abs(low) or 1.0)

    def get_height(value: float) -> float:
        # SVG's y axis points down.
        return round(_HEIGHT * (1 - (value - low) / (high - low)), 1)

    lines = [
        " ".join(f"{_WIDTH * step / last_step:.1f},{get_height(value)}" for step, value in curve)
        for curve in finite_curves
    ]
    ticks = [(get_height(tick), format_number(tick, 3)) for tick in compute_ticks(low, high)]
    return OverlaidChart(title, lines, ticks, last_step)
