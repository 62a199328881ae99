"""Read a run's folder in any state, finished or not, with notes on files that are missing or damaged."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dit_lora.config.validation import LossName
from dit_lora.config.yaml_parsing import MAX_YAML_BYTES, parse_yaml
from dit_lora.errors import DitLoraError, join_first_items
from dit_lora.files import read_file_inside_folder
from dit_lora.parsing import parse_json
from dit_lora.report.run.history import JsonLinesReader, MetricColumns, ensure_dict, to_float_or_nan
from dit_lora.training.eval_losses import EVAL_LOSS_FILES, get_eval_losses
from dit_lora.training.session.run_lock import is_run_active

# Bounded, because a failing run can write events for days.
EVENTS, LEFT_OUT = 1000, 1000
"""Number of the last lines of events.jsonl and quarantine.jsonl that are kept."""
_SILENCE, _STEPS = 180.0, 20
"""Seconds, or the duration of this many steps, without output after which a run counts as no longer running."""
_LINE_FILES = ("metrics.jsonl", *EVAL_LOSS_FILES, "events.jsonl", "quarantine.jsonl")
OBJECT_FILES = ("environment", "status", "data", "facts", "audit", "verification", "phases")
"""Names of the files that hold one JSON object, which are also fields of `RunFiles`."""

RunState = Literal["running", "finished", "stopped", "interrupted", "failed", "silent"]


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder as far as it can be read; `describe_problems` describes the rest."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: MetricColumns
    eval_losses: dict[int, float]
    """Losses at fixed noise by step: of training samples, or of a chat model's held-out conversations."""
    validation_losses: dict[int, float]
    """The same of `validation.data`, which is not trained on; empty without it."""
    events: list[dict[str, Any]]
    event_count: int
    quarantine: list[dict[str, Any]]
    status: dict[str, Any]
    data: dict[str, Any]
    facts: dict[str, Any]
    audit: dict[str, Any]
    verification: dict[str, Any]
    phases: dict[str, Any]
    state: RunState
    notes: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_steps_taken(self) -> int:
        return self.metrics.steps[-1] if self.metrics.steps else 0

    @property
    def max_steps(self) -> int | None:
        """Number of training steps in the run's recipe; None if it is not given."""
        steps = ensure_dict(self.config.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return max([self.num_steps_taken, *self.eval_losses, *self.validation_losses])


class RunReader:
    """Reads a run's folder repeatedly; lines are read once and kept as numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._tails = [JsonLinesReader(self.folder / name) for name in _LINE_FILES]
        self._metrics_tail, *self._eval_loss_tails, self._events_tail, self._quarantine_tail = self._tails
        self._metric_columns = MetricColumns()
        self._eval_losses: list[dict[int, dict[str, float]]] = [{} for _ in EVAL_LOSS_FILES]
        self._losses_in_metrics: dict[int, dict[str, float]] = {}
        self._recent_events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._event_count = 0
        self._recent_quarantine: deque[dict[str, Any]] = deque(maxlen=LEFT_OUT)

    def compute_fingerprint(self) -> str:
        """Fingerprint of a run's folder: a string that changes whenever the content of the page would change."""
        names = (*_LINE_FILES, "config.yaml", *(f"{name}.json" for name in OBJECT_FILES))
        # Modification times and sizes are enough: the files are appended to or replaced.
        stats = [_get_stat(self.folder / name) for name in names]
        samples = sorted((self.folder / "samples").glob("step_*/*"))
        spoke = time.time() - self._find_last_write_time() < _SILENCE
        # The newest samples may still be growing.
        newest = [_get_stat(path) for path in samples[-2:]]
        return f"{stats}{len(samples)}{newest}{spoke}{is_run_active(self.folder)}"

    def read(self, state: RunState | None = None) -> RunFiles:
        """Read everything in a run's folder except samples.

        `state` is the run's state if the caller knows it; else it is derived from the folder.

        Raises:
            DitLoraError: If the folder has no readable config.yaml.
        """
        notes: list[str] = []
        # Without a recipe the folder is not a run: this raises.
        config = _read_config(self.folder)
        self._read_new_lines()
        objects = {name: _read_json_object(self.folder / f"{name}.json", notes) for name in OBJECT_FILES}
        state = state or self._determine_state(objects["status"], config)
        # All of these files may contain eval losses; eval_loss.jsonl takes precedence.
        by_step = dict(self._losses_in_metrics)
        for losses in self._eval_losses:
            by_step |= losses
        eval_losses, validation_losses = (
            {step: by_step[step][name] for step in sorted(by_step) if name in by_step[step]}
            for name in get_args(LossName)
        )
        for tail in self._tails:
            notes += tail.describe_problems(is_running=state == "running")
        metrics = self._metric_columns
        notes += [
            *_describe_nonfinite("loss", metrics.steps, metrics.get_metric_column("loss")),
            *_describe_nonfinite("gradient norm", metrics.steps, metrics.get_metric_column("grad_norm")),
            *_describe_nonfinite("eval loss", list(eval_losses), list(eval_losses.values())),
            *_describe_nonfinite("validation loss", list(validation_losses), list(validation_losses.values())),
        ]
        return RunFiles(
            folder=self.folder,
            config=config,
            metrics=metrics,
            eval_losses=eval_losses,
            validation_losses=validation_losses,
            events=list(self._recent_events),
            event_count=self._event_count,
            quarantine=list(self._recent_quarantine),
            state=state,
            notes=notes,
            **objects,
        )

    def _read_new_lines(self) -> None:
        # A replaced file is read from its start, so everything that was read from it before is dropped.
        if self._metrics_tail.reset_if_replaced():
            self._metric_columns, self._losses_in_metrics = MetricColumns(), {}
        for line in self._metrics_tail.read_new_lines():
            self._metric_columns.add_line(line)
            self._losses_in_metrics.update(_parse_eval_losses(line))
        for tail, losses in zip(self._eval_loss_tails, self._eval_losses, strict=True):
            if tail.reset_if_replaced():
                losses.clear()
            for line in tail.read_new_lines():
                losses.update(_parse_eval_losses(line))
        if self._events_tail.reset_if_replaced():
            self._recent_events, self._event_count = deque(maxlen=EVENTS), 0
        for line in self._events_tail.read_new_lines():
            self._event_count += 1
            self._recent_events.append(line)
        if self._quarantine_tail.reset_if_replaced():
            self._recent_quarantine = deque(maxlen=LEFT_OUT)
        self._recent_quarantine.extend(self._quarantine_tail.read_new_lines())

    def _determine_state(self, status: Mapping[str, Any], config: Mapping[str, Any]) -> RunState:
        proven_state = find_known_run_state(self.folder, status)
        if proven_state is not None:
            return proven_state
        steps = self._metric_columns.steps
        num_steps = ensure_dict(config.get("train")).get("steps")
        if not status.get("state"):  # a run of a version that did not write its state
            if isinstance(num_steps, int) and steps and steps[-1] >= num_steps:
                return "finished"
            if self._recent_events and self._recent_events[-1].get("action") == "stop":
                return "stopped"
        # The slowest recent step bounds how long a healthy run can be silent.
        seconds = [s for s in self._metric_columns.get_metric_column("seconds")[-50:] if math.isfinite(s)]
        # Without information on the process, judge by the time since the last output.
        patience = max(_SILENCE, _STEPS * max(seconds, default=0.0))
        return "running" if time.time() - self._find_last_write_time() < patience else "silent"

    def _find_last_write_time(self) -> float:
        names = (*_LINE_FILES[:3], "status.json", "config.yaml")
        # Anything that a running process touches: logs, samples and checkpoints.
        paths = [self.folder / name for name in names]
        paths += [*(self.folder / "samples").glob("step_*"), self.folder / "checkpoints"]
        return max((stat[0] for path in paths if (stat := _get_stat(path))), default=0.0)


def find_known_run_state(folder: Path, status: Mapping[str, Any]) -> RunState | None:
    """The state of a run that its status.json or its lock proves; None if only the time of its output can tell."""
    # The run writes its final state when it ends; a killed run cannot.
    recorded = status.get("state")
    if recorded in ("finished", "stopped", "interrupted", "failed"):
        return recorded  # type: ignore[no-any-return]
    # None without a lock, or if the process behind it cannot be checked.
    lives = is_run_active(folder)
    return None if lives is None else "running" if lives else "silent"


def read_recipe_text(folder: Path) -> str:
    """The text of a run's config.yaml. Raises `DitLoraError` if it is missing, not UTF-8, a link, or no file."""
    path = folder / "config.yaml"
    try:
        # `utf-8-sig` accepts a byte order mark, which some editors write.
        return read_file_inside_folder(folder, path, MAX_YAML_BYTES).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DitLoraError(f"{folder} is not a run: it has no config.yaml; give the folder in run.dir") from error
    except OSError as error:
        raise DitLoraError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DitLoraError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    text = read_recipe_text(folder)
    try:
        config = parse_yaml(text)
    except ValueError as error:
        raise DitLoraError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise DitLoraError(
            f"{path} is not a recipe: it must contain sections such as model: and data:; got {config!r}"
        )
    return config


def _read_json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read a JSON object from a file of the run; empty if there is none."""
    try:
        content = parse_json(read_file_inside_folder(path.parent, path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        notes.append(f"Cannot read {path.name}: {error.strerror}.")
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path.name} is not a JSON object and is ignored.")
        return {}
    return content


def _get_stat(path: Path) -> tuple[float, int] | None:
    try:
        # Does not follow links, which could point anywhere.
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime, status.st_size


def _parse_eval_losses(line: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    step, losses = line.get("step"), get_eval_losses(line)
    # Most lines are of metrics.jsonl, and have none.
    if not losses or not isinstance(step, int):
        return {}
    return {step: {name: to_float_or_nan(loss) for name, loss in losses.items()}}


def _describe_nonfinite(name: str, steps: Sequence[int], values: Sequence[float]) -> Iterator[str]:
    steps = [steps[int(index)] for index in np.flatnonzero(~np.isfinite(values))]
    if steps:
        yield f"The {name} is not finite at step{'s' if len(steps) > 1 else ''} {join_first_items(steps, 8)}."
