"""Writes a run's metrics.jsonl, held_out.jsonl and events.jsonl as it goes, and tells the trackers."""

import json
import math
import resource
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dit_lora.errors import DitLoraError, unwritable
from dit_lora.files import append_line, read_lines, write_whole
from dit_lora.guard.event import Event
from dit_lora.training.step import StepResult
from dit_lora.training.trackers.trackers import Trackers

STARVED, WINDOW = 0.2, 50
"""The share of the last steps' time that is too much to wait for data; `WINDOW` is how many steps they are."""
IDLE = 10
"""Steps in a row without a gradient after which a group is told of. One is nothing: a LoRA's A has none in the first,
as B is zero, and a vision encoder none in a step of texts."""
LOSS_PARTS = ("loss_by_timestep", "loss_by_media")
"""Optional keys of a line of metrics.jsonl, which depend on the kind of model."""


class Journal:
    """Appends one JSON object a line, and tells the trackers; only the main process writes.

    A line that the disk does not take is told to `fail`, for all ranks to stop together, and written with the
    next one if that can be; without `fail` it is raised.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        start_step: int,
        trackers: "Trackers | None" = None,
        say: Callable[[str], None] = lambda line: None,
        fail: Callable[[DitLoraError], None] | None = None,
    ) -> None:
        self.dir = run_dir
        self.trackers = trackers
        self._fail = fail
        self._unwritten: list[tuple[str, str]] = []
        self._samples = 0
        self._held_out_steps: set[int] = set()
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._told = False
        self._idle: Counter[str] = Counter()
        if start_step == 0:
            (run_dir / "held_out.jsonl").unlink(missing_ok=True)  # maybe another recipe's
        for name in ("metrics.jsonl", "held_out.jsonl", "events.jsonl"):
            torn = read_lines(run_dir / name)[1]
            if torn:
                say(
                    f"warning: {name}: passed over {torn} torn line(s), of a process that was killed"
                )
        # A killed run may have written steps after its last checkpoint: they come again.
        self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Drop the lines after a step that training goes back to."""
        # Events stay through a rollback: they tell why it came.
        self._unwritten = [one for one in self._unwritten if one[0] == "events.jsonl"]
        steps = _truncate(self.dir / "metrics.jsonl", step)
        self._samples = steps[-1].get("samples", 0) if steps else 0
        lines = _truncate(self.dir / "held_out.jsonl", step, first=0)
        self._held_out_steps = {line["step"] for line in lines}

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far."""
        return _lines(self.dir / "metrics.jsonl")

    def step(
        self, line: dict[str, Any], modules: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Write a `metrics_line`; `modules` in the steps that have statistics."""
        self._samples += line["samples"]
        if self.trackers is not None:
            values = {**tracker_values(line), "samples": self._samples}
            self.trackers.scalars(values, line["step"])
        line = {**line, "samples": self._samples}
        if modules is not None:
            # JSON has no Inf; a module that reached it has an event of its own.
            line["modules"] = {
                name: {key: v if math.isfinite(v) else None for key, v in values.items()}
                for name, values in modules.items()
            }
        self._append("metrics.jsonl", line)

    def starving(self, line: Mapping[str, Any], workers: int) -> str | None:
        """Say, once a run, that its last `WINDOW` steps waited for data for more than `STARVED` of their time."""
        self._recent.append((line["data_seconds"], line["seconds"]))
        waited, spent = (sum(column) for column in zip(*self._recent, strict=True))
        if self._told or len(self._recent) < WINDOW or waited <= STARVED * spent:
            return None
        self._told = True
        return (
            f"the last {WINDOW} steps waited for data for {waited / spent:.0%} of their time: raise "
            f"data.workers ({workers}) or data.prefetch, or put data.cache on a local disk"
        )

    def idle_groups(self, line: Mapping[str, Any]) -> list[str]:
        """Return, once a run each, the groups whose gradient was zero in each of the last `IDLE` steps."""
        for name, norm in line["grad_norm_groups"].items():
            if self._idle[name] < IDLE:
                self._idle[name] = 0 if norm else self._idle[name] + 1
            else:
                self._idle[name] = IDLE + 1  # told
        return [name for name, steps in self._idle.items() if steps == IDLE]

    def held_out(self, step: int, loss: float) -> None:
        """Write a held-out loss, once for each step: a finished run that is resumed computes the same again."""
        if step in self._held_out_steps:
            return
        self._held_out_steps.add(step)
        self._append("held_out.jsonl", {"step": step, "held_out_loss": loss})
        if self.trackers is not None:
            self.trackers.scalars({"held_out_loss": loss}, step)

    def event(self, event: Event) -> None:
        line = event.record()
        self._append("events.jsonl", line)
        if self.trackers is not None:
            self.trackers.event(line)

    def rejected(self, samples: Mapping[str, str], step: int) -> None:
        """Write which samples `data.rejects: skip` leaves out, and why; once a run for equal lists."""
        if not samples:
            return
        verdict = {"cause": "data", "words": "; ".join(samples.values())}
        event = Event(step, "data_rejected", verdict, "skip", sample_ids=tuple(samples))
        earlier = [one for one in _lines(self.dir / "events.jsonl") if one["kind"] == event.kind]
        if not earlier or earlier[-1]["sample_ids"] != list(samples):
            self.event(event)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        self._unwritten.append((name, json.dumps(line)))
        self.flush()

    def flush(self) -> None:
        """Write the lines that a full disk did not take before."""
        # In order: a line that waits for the disk holds back the later ones.
        while self._unwritten:
            name, text = self._unwritten[0]
            try:
                append_line(self.dir / name, text)
            except OSError as error:
                if self._fail is None:
                    raise
                self._fail(unwritable(error))
                return
            self._unwritten.pop(0)


def metrics_line(result: StepResult, parts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return one line of metrics.jsonl, equal on all ranks but for its seconds; `samples` are this step's.

    `parts` are the task's means, such as `loss_by_timestep`.
    """
    return {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": next(iter(result.lr_groups.values())),
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "peak_gib": peak_gib(),
        "samples": len(result.losses),
        "lr_groups": result.lr_groups,
        "grad_norm_groups": result.grad_norm_groups,
        **parts,
    }


def held_out_losses(run_dir: Path) -> dict[int, float]:
    """Return a run's held-out losses so far, by step."""
    return {line["step"]: line["held_out_loss"] for line in _lines(run_dir / "held_out.jsonl")}


def tracker_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a `metrics_line` flattened for trackers, with `lr/adapter`, `grad_norm/adapter` and the like."""
    flat = {
        k: v for k, v in line.items() if isinstance(v, (int, float)) and k not in ("step", "lr")
    }
    flat["samples_per_second"] = line["samples"] / line["seconds"]
    for name in ("lr_groups", "grad_norm_groups", *LOSS_PARTS):
        prefix = name.removesuffix("_groups")
        flat |= {f"{prefix}/{key}": value for key, value in line.get(name, {}).items()}
    return flat


def peak_gib() -> float:
    """Return the peak so far in GiB: allocated GPU memory, or this process' resident memory without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux gives KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _truncate(path: Path, last_step: int, first: int = 1) -> list[dict[str, Any]]:
    """Keep the lines of steps from `first` to `last_step`, so that what comes is written once."""
    lines = [line for line in _lines(path) if first <= line["step"] <= last_step]
    if path.exists():
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return lines


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path)[0]
