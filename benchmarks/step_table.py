"""The results of `benchmarks.step`: as lines of JSON, and as tables that show wins and losses alike."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.kernel_time import KernelTimes
from benchmarks.machine import in_words
from benchmarks.step_models import Model
from benchmarks.step_settings import EXAMPLE, SETTINGS
from dit_lora.training.execution.activations import MAX_MEMORY_SHARE

WARM_UP = 2
_COMPILED = {setting.name for setting in SETTINGS if setting.is_compiled_stock}


@dataclass
class Result:
    """The outcome of one setting of one model."""

    model: str
    setting: str
    seconds: list[float] = field(default_factory=list)
    """Times of each step after the warm-up, until the device had done it."""
    read_late: bool = False
    """True for steps of a run's loop, which reads the result of a step while the next one runs.

    Single times are then shifted between steps, and the table gives their mean."""
    host: list[float] = field(default_factory=list)
    """Seconds until the host had launched each of them; empty where the step itself waits for the device."""
    warm_up: float = 0.0
    losses: list[float] = field(default_factory=list)
    """The losses of all steps, the warm-up's too."""
    peak: int | None = None
    """Bytes of the device at most, after the warm-up."""
    mode: str = ""
    words: str = ""
    ops: str = ""
    kernels: KernelTimes | None = None
    gpu: dict[str, str] = field(default_factory=dict)
    """The GPU's clocks and power right after the steps."""
    failed: str | None = None
    fits: bool = True
    same_as: str | None = None

    def record(self) -> dict[str, Any]:
        """The result as a dictionary, for a line of JSON."""
        return asdict(self)

    @property
    def typical(self) -> float | None:
        """The median of a step's seconds, or their mean."""
        if not self.seconds:
            return None
        return statistics.fmean(self.seconds) if self.read_late else statistics.median(self.seconds)

    def difference(self, example: "Result") -> float | None:
        """Largest relative difference between this result's step losses and the example's."""
        pairs = list(zip(self.losses, example.losses, strict=False))
        return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def markdown(about: Mapping[str, str], results: Sequence[Result], chosen: Mapping[str, Model], steps: int) -> str:
    """Markdown with a table of step times, a table of kernel times, and the settings that were left out."""
    sizes = "; ".join(f"{name} {entry.shape}, rank {entry.rank}" for name, entry in chosen.items())
    lines = [
        f"# LoRA training steps on {about['device']}, {about['date']}", "", in_words(about), "",
        f"Random weights: {sizes}. Median of {steps} steps after {WARM_UP}; the settings are told in "
        "benchmarks/step.py. Host: until the last kernel of a step was launched. Ratios below 1 are losses. The last "
        "column is the largest relative difference of a step's loss from the example's.", "",
        "| model | setting | s a step (lowest to highest) | host, s | example / this | best compiled stock / this "
        "| peak GiB | warm-up, s | checkpointing | kernels | loss, relative difference |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---|---:|",
    ]  # fmt: skip
    by_model = {name: [r for r in results if r.model == name] for name in chosen}
    for model_results in by_model.values():
        lines += [_row(result, model_results, steps) for result in model_results]
    lines += _kernel_table(results)
    lines += [
        "",
        f"Advice counts {MAX_MEMORY_SHARE:.0%} of the free memory as there for activations.",
    ]
    return "\n".join(lines) + "\n"


def _row(result: Result, model_results: Sequence[Result], steps: int) -> str:
    example = next(r for r in model_results if r.setting == EXAMPLE.name)
    compiled = [r for r in model_results if r.setting in _COMPILED and r.seconds]
    best = min(compiled, key=lambda r: r.typical or 0.0, default=None)
    difference = result.difference(example)
    cells = [
        result.model, result.setting, _time_cell(result, steps),
        f"{statistics.median(result.host):.4f}" if result.host else "-",
        _ratio(example, result), _ratio(best, result),
        "-" if result.peak is None else f"{result.peak / 2**30:.1f}",
        f"{result.warm_up:.1f}" if result.losses else "-", result.words or "-", result.ops or "-",
        "-" if difference is None else f"{difference:.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _ratio(baseline: Result | None, result: Result) -> str:
    if baseline is None or baseline is result or not baseline.typical or not result.typical:
        return "-"
    ratio = baseline.typical / result.typical
    return f"{ratio:.3f}" + (" **slower**" if ratio < 1 else "")


def _time_cell(result: Result, steps: int) -> str:
    if result.failed:
        return f"failed: {result.failed.replace('|', '/')}"
    if result.same_as:
        return f"the same as {result.same_as}"
    if not result.fits:
        return "does not fit"
    if not result.seconds:
        return "left out, the time was up"
    low, high = min(result.seconds), max(result.seconds)
    spread_text = "mean" if result.read_late else f"{low:.4f} to {high:.4f}"
    cell = f"{result.typical:.4f} ({spread_text})"
    return cell if len(result.seconds) == steps else f"{cell}, {len(result.seconds)} steps"


def _kernel_table(results: Sequence[Result]) -> list[str]:
    """Markdown table of device milliseconds by kind of kernel; empty if nothing was measured."""
    measured = [(r, r.kernels) for r in results if r.kernels is not None]
    if not measured:
        return []
    kinds = list(dict.fromkeys(kind for _, times in measured for kind in times.by_kind))
    head = ["model", "setting", *kinds, "all", "launches"]
    lines = ["", "Milliseconds of the device in one step, by kind of kernel; "
             "the longest kernels are in the JSON lines.",
             "", f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(kinds) + 2)}"]  # fmt: skip
    for result, times in measured:
        kind_cells = [f"{times.by_kind[kind]:.1f}" if kind in times.by_kind else "-" for kind in kinds]
        total = f"{sum(times.by_kind.values()):.1f}"
        cells = [result.model, result.setting, *kind_cells, total, str(times.launches)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
