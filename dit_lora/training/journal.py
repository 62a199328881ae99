"""Writes a run's metrics.jsonl, eval_loss.jsonl and events.jsonl while it trains, also to the trackers."""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.validation import LossName
from dit_lora.environment.operating_system import get_peak_memory_bytes
from dit_lora.errors import DitLoraError, make_write_error
from dit_lora.files import append_line, read_json_lines, write_atomically
from dit_lora.guard.diagnosis import Event
from dit_lora.training.check_budget import EvalSize
from dit_lora.training.eval_losses import EVAL_LOSS_FILES, get_eval_losses
from dit_lora.training.step import StepResult
from dit_lora.training.trackers.trackers import Trackers

STARVED, WINDOW = 0.2, 50
"""Share of the time waited for data that triggers a warning, and the number of last steps it is measured over."""
MAX_IDLE_STEPS = 10
"""Consecutive steps without a gradient after which a group is reported. A single step is normal: a LoRA's A has no
gradient in the first step, because B is zero, and a vision encoder has none in a step without media.
"""
LOSS_PART_KEYS = ("loss_by_timestep", "loss_by_media")
"""Optional keys of a line of metrics.jsonl; which are present depends on the kind of model."""


class Journal:
    """Writer of a run's log files: it appends one JSON object per line and forwards it to the trackers.

    Main process only.

    If the disk refuses a line, the error is passed to `on_error`, so that all ranks stop together, and the line is
    retried before the next one. Without `on_error` the error is raised.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        trackers: Trackers | None = None,
        say: Callable[[str], None] = lambda line: None,
        on_error: Callable[[DitLoraError], None] | None = None,
    ) -> None:
        self.dir = run_dir
        self.trackers = trackers
        self._on_error = on_error
        self._unwritten: list[tuple[str, str]] = []
        self._num_samples = 0
        self._eval_losses: dict[int, dict[str, Any]] = {}
        self._recent_waits: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._has_warned = False
        self._num_idle_steps: Counter[str] = Counter()
        if start_step == 0:
            # The file may be another recipe's.
            for name in EVAL_LOSS_FILES:
                (run_dir / name).unlink(missing_ok=True)
        for name in ("metrics.jsonl", *EVAL_LOSS_FILES, "events.jsonl"):
            torn = read_json_lines(run_dir / name).damaged
            if torn:
                say(f"warning: {name}: skipped {len(torn)} incomplete line(s) of a killed process")
        # A killed run may have written steps after its last checkpoint: these are repeated.
        self.remove_lines_after(start_step)

    def remove_lines_after(self, step: int) -> None:
        """Remove the log lines of all steps after `step`, because training returns to that step."""
        # Events stay through a rollback: they explain it.
        self._unwritten = [line for line in self._unwritten if line[0] == "events.jsonl"]
        steps = _truncate_log(self.dir / "metrics.jsonl", step)
        self._num_samples = steps[-1].get("samples", 0) if steps else 0
        files = [_truncate_log(self.dir / name, step, first_step=0) for name in EVAL_LOSS_FILES]
        self._eval_losses = {line["step"]: get_eval_losses(line) for lines in files for line in lines}

    def read_history(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl so far, parsed."""
        return read_json_lines(self.dir / "metrics.jsonl").objects

    def write_step(self, line: dict[str, Any], modules: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Write one step's line to metrics.jsonl.

        `modules` are per-module statistics, or None in steps without them.
        """
        self._num_samples += line["samples"]
        if self.trackers is not None:
            values = {**flatten_for_trackers(line), "samples": self._num_samples}
            self.trackers.log_scalars(values, line["step"])
        line = {**line, "samples": self._num_samples}
        if modules is not None:
            # JSON has no Inf; a module that reached it has its own event.
            line["modules"] = {
                name: {key: v if math.isfinite(v) else None for key, v in values.items()}
                for name, values in modules.items()
            }
        self._append_log_line("metrics.jsonl", line)

    def check_dataloader_bottleneck(self, line: Mapping[str, Any], num_workers: int) -> str | None:
        """A warning, once per run, if the last `WINDOW` steps waited for data for over `STARVED` of their time."""
        self._recent_waits.append((line["data_seconds"], line["seconds"]))
        # Pairs of (waited, spent) of the last steps, summed by column.
        waited, spent = (sum(column) for column in zip(*self._recent_waits, strict=True))
        if self._has_warned or len(self._recent_waits) < WINDOW or waited <= STARVED * spent:
            return None
        self._has_warned = True
        return (
            f"the last {WINDOW} steps waited for data for {waited / spent:.0%} of their time: raise "
            f"data.workers ({num_workers}) or data.prefetch, or put data.cache on a local disk"
        )

    def find_idle_groups(self, line: Mapping[str, Any]) -> list[str]:
        """Names of parameter groups whose gradient was zero in each of the last `MAX_IDLE_STEPS` steps.

        Each is reported once per run.
        """
        for name, norm in line["grad_norm_groups"].items():
            if self._num_idle_steps[name] < MAX_IDLE_STEPS:
                self._num_idle_steps[name] = 0 if norm else self._num_idle_steps[name] + 1
            else:
                # Past the bound once it was reported, so that the line below finds it only once.
                self._num_idle_steps[name] = MAX_IDLE_STEPS + 1
        return [name for name, steps in self._num_idle_steps.items() if steps == MAX_IDLE_STEPS]

    def write_eval_losses(self, step: int, losses: Mapping[str, float], size: EvalSize | None = None) -> None:
        """Write the finite losses at fixed noise of a step to the log, only once per step."""
        if step in self._eval_losses or not losses:
            return
        self._eval_losses[step] = dict(losses)
        reduced_size = {} if size is None else {"clips": size.num_clips, "draws": size.num_draws}
        self._append_log_line(EVAL_LOSS_FILES[-1], {"step": step, **losses, **reduced_size})
        if self.trackers is not None:
            self.trackers.log_scalars(losses, step)

    def get_eval_losses(self, name: LossName) -> dict[int, float]:
        """The finite losses of this name at fixed noise, by step. Reads no file, which somebody may have changed."""
        losses = {step: values.get(name) for step, values in self._eval_losses.items()}
        return {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}

    def get_base_loss(self, name: str) -> float | None:
        """A loss at fixed noise of the untrained base, at step 0; None if it has not been taken."""
        loss = self._eval_losses.get(0, {}).get(name)
        return loss if isinstance(loss, float) else None

    def write_event(self, event: Event) -> None:
        line = event.to_record()
        self._append_log_line("events.jsonl", line)
        if self.trackers is not None:
            self.trackers.log_event(line)

    def write_rejected(self, samples: Mapping[str, str], step: int) -> None:
        """Write an event that lists the samples `data.rejects: skip` leaves out, and why, if the list has changed."""
        if not samples:
            return
        diagnosis = {"cause": "data", "words": "; ".join(samples.values())}
        event = Event(step, "data_rejected", diagnosis, "skip", sample_ids=tuple(samples))
        # A resumed run finds the same samples again: only a changed list is a new event.
        events = read_json_lines(self.dir / "events.jsonl").objects
        earlier = [line for line in events if line["kind"] == event.kind]
        if not earlier or earlier[-1]["sample_ids"] != list(samples):
            self.write_event(event)

    def _append_log_line(self, name: str, line: Mapping[str, Any]) -> None:
        self._unwritten.append((name, json.dumps(line)))
        self.flush_unwritten_lines()

    def flush_unwritten_lines(self) -> None:
        """Write the log lines that could not be written while the disk was full."""
        # In order: a line that waits for the disk also holds back the later ones.
        while self._unwritten:
            name, text = self._unwritten[0]
            try:
                append_line(self.dir / name, text)
            except OSError as error:
                if self._on_error is None:
                    raise
                self._on_error(make_write_error(error))
                return
            self._unwritten.pop(0)


def build_metrics_line(result: StepResult, parts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """One line of metrics.jsonl. Equal on all ranks except for its timings.

    `samples` counts this step's samples. `parts` are mean losses from the task, such as `loss_by_timestep`.
    """
    return {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": next(iter(result.lr_groups.values())),
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "peak_gib": measure_peak_gib(),
        "samples": len(result.losses),
        "lr_groups": result.lr_groups,
        "grad_norm_groups": result.grad_norm_groups,
        **parts,
    }


def read_reduced_eval_size(run_dir: Path) -> tuple[bool, EvalSize | None]:
    """Whether the run has eval losses, and their size if it was reduced: a resumed run continues with that size."""
    all_lines = (line for name in EVAL_LOSS_FILES for line in read_json_lines(run_dir / name).objects)
    lines = [line for line in all_lines if "eval_loss" in get_eval_losses(line)]
    clips, draws = (lines[-1].get(name) if lines else None for name in ("clips", "draws"))
    return bool(lines), EvalSize(clips, draws) if isinstance(clips, int) and isinstance(draws, int) else None


def flatten_for_trackers(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl flattened for trackers, with keys such as `lr/adapter` and `grad_norm/adapter`."""
    # All plain numbers; `lr` is left out, because it repeats the first entry of `lr_groups`.
    flat = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k not in ("step", "lr")}
    # Derived here; metrics.jsonl does not contain it.
    flat["samples_per_second"] = line["samples"] / line["seconds"]
    for name in ("lr_groups", "grad_norm_groups", *LOSS_PART_KEYS):
        # Names become `lr/adapter`, `grad_norm/adapter` or `loss_by_timestep/0-249`.
        prefix = name.removesuffix("_groups")
        flat |= {f"{prefix}/{key}": value for key, value in line.get(name, {}).items()}
    return flat


def measure_peak_gib() -> float:
    """Peak memory so far in GiB: allocated GPU memory, or the process's resident memory without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return get_peak_memory_bytes() / 2**30


def _truncate_log(path: Path, last_step: int, first_step: int = 1) -> list[dict[str, Any]]:
    """Keep only the lines of steps `first_step` to `last_step`, and return them: later steps will be repeated.

    A line without a step, which is not the run's own, stays in the file and is not returned.
    """
    step_lines, all_lines = [], []
    for line in read_json_lines(path).objects:
        step = line.get("step")
        if not isinstance(step, int):
            all_lines.append(line)
        elif first_step <= step <= last_step:
            step_lines.append(line)
            all_lines.append(line)
    if path.exists():
        # Replaced as a whole: a kill in between leaves the old lines or the new ones.
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in all_lines))
    return step_lines
