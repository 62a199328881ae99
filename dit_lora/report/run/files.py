"""Read a run's folder in any state, finished or not, with notes on files that are missing or damaged."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dit_lora.config.yaml_parsing import MAX_YAML_BYTES, parse_yaml
from dit_lora.errors import DitLoraError
from dit_lora.files import read_inside
from dit_lora.parsing import parse_json
from dit_lora.report.run.history import Metrics, Tail, mapping, number_or_nan
from dit_lora.training.session.run_lock import is_live

# Bounded, because a failing run can write events for days.
EVENTS, LEFT_OUT = 1000, 1000
"""Number of the last lines of events.jsonl and quarantine.jsonl that are kept."""
_SILENCE, _STEPS = 180.0, 20
"""Seconds, or the duration of this many steps, without output after which a run counts as no longer running."""
_LINES = ("metrics.jsonl", "held_out.jsonl", "events.jsonl", "quarantine.jsonl")
OBJECTS = (
    "environment",
    "status",
    "data",
    "facts",
    "audit",
    "verification",
    "phases",
)
"""Names of the files that hold one JSON object, which are also fields of `RunFiles`."""

State = Literal["running", "finished", "stopped", "interrupted", "failed", "silent"]


@dataclass(frozen=True)
class RunFiles:
    """The readable content of a run's folder; `notes` describes the rest."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: Metrics
    held_out: dict[int, float]
    events: list[dict[str, Any]]
    event_count: int
    quarantine: list[dict[str, Any]]
    status: dict[str, Any]
    data: dict[str, Any]
    facts: dict[str, Any]
    audit: dict[str, Any]
    verification: dict[str, Any]
    phases: dict[str, Any]
    state: State
    notes: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def done(self) -> int:
        """Number of steps taken."""
        return self.metrics.steps[-1] if self.metrics.steps else 0

    @property
    def asked(self) -> int | None:
        """Number of steps in the recipe; None if it is not given."""
        steps = mapping(self.config.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return max([self.done, *self.held_out])


class RunReader:
    """Reads a run's folder repeatedly; lines are read once and kept as numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._tails = [Tail(self.folder / name) for name in _LINES]
        self._metrics, self._held_out, self._events, self._quarantine = self._tails
        self._columns = Metrics()
        self._by_step: dict[int, float] = {}
        self._in_metrics: dict[int, float] = {}
        self._happened: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._event_count = 0
        self._left_out: deque[dict[str, Any]] = deque(maxlen=LEFT_OUT)

    def fingerprint(self) -> str:
        """A string that changes whenever the content of the page would change."""
        names = (*_LINES, "config.yaml", *(f"{name}.json" for name in OBJECTS))
        # Modification times and sizes are enough: the files are appended to or replaced.
        stats = [_stat(self.folder / name) for name in names]
        samples = sorted((self.folder / "samples").glob("step_*/*"))
        spoke = time.time() - self._last_word() < _SILENCE
        # The newest samples may still be growing.
        newest = [_stat(path) for path in samples[-2:]]
        return f"{stats}{len(samples)}{newest}{spoke}{is_live(self.folder)}"

    def read(self, state: State | None = None) -> RunFiles:
        """Read everything except samples.

        `state` is the run's state if the caller knows it; else it is derived from the folder.

        Raises:
            DitLoraError: If the folder has no readable config.yaml.
        """
        notes: list[str] = []
        # Without a recipe the folder is not a run: this raises.
        config = _config(self.folder)
        self._go_on()
        objects = {name: _json(self.folder / f"{name}.json", notes) for name in OBJECTS}
        state = state or self._state(objects["status"], config)
        # Both files may contain held-out losses; held_out.jsonl takes precedence.
        held_out = {**self._in_metrics, **self._by_step}
        for tail in self._tails:
            notes += tail.notes(going=state == "running")
        metrics = self._columns
        notes += [
            *_not_finite("loss", metrics.steps, metrics.column("loss")),
            *_not_finite("gradient norm", metrics.steps, metrics.column("grad_norm")),
            *_not_finite("held-out loss", list(held_out), list(held_out.values())),
        ]
        return RunFiles(
            folder=self.folder,
            config=config,
            metrics=metrics,
            held_out=dict(sorted(held_out.items())),
            events=list(self._happened),
            event_count=self._event_count,
            quarantine=list(self._left_out),
            state=state,
            notes=notes,
            **objects,
        )

    def _go_on(self) -> None:
        # A replaced file is read from its start, so everything that was read from it before is dropped.
        if self._metrics.is_anew():
            self._columns, self._in_metrics = Metrics(), {}
        for line in self._metrics.lines():
            self._columns.add(line)
            self._in_metrics.update(_held_out(line))
        if self._held_out.is_anew():
            self._by_step = {}
        for line in self._held_out.lines():
            self._by_step.update(_held_out(line))
        if self._events.is_anew():
            self._happened, self._event_count = deque(maxlen=EVENTS), 0
        for line in self._events.lines():
            self._event_count += 1
            self._happened.append(line)
        if self._quarantine.is_anew():
            self._left_out = deque(maxlen=LEFT_OUT)
        self._left_out.extend(self._quarantine.lines())

    def _state(self, status: Mapping[str, Any], config: Mapping[str, Any]) -> State:
        # The run writes its final state when it ends; a killed run cannot.
        recorded = status.get("state")
        if recorded in ("finished", "stopped", "interrupted", "failed"):
            return recorded
        # None without a lock, or if the process behind it cannot be checked.
        lives = is_live(self.folder)
        if lives is not None:
            return "running" if lives else "silent"
        steps = self._columns.steps
        num_steps = mapping(config.get("train")).get("steps")
        if not recorded:  # a run of a version that did not write its state
            if isinstance(num_steps, int) and steps and steps[-1] >= num_steps:
                return "finished"
            if self._happened and self._happened[-1].get("action") == "stop":
                return "stopped"
        # The slowest recent step bounds how long a healthy run can be silent.
        seconds = [s for s in self._columns.column("seconds")[-50:] if math.isfinite(s)]
        # Without information on the process, judge by the time since the last output.
        patience = max(_SILENCE, _STEPS * max(seconds, default=0.0))
        return "running" if time.time() - self._last_word() < patience else "silent"

    def _last_word(self) -> float:
        names = (*_LINES[:3], "status.json", "config.yaml")
        # Anything that a running process touches: logs, samples and checkpoints.
        paths = [self.folder / name for name in names]
        paths += [*(self.folder / "samples").glob("step_*"), self.folder / "checkpoints"]
        return max((stat[0] for path in paths if (stat := _stat(path))), default=0.0)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        # `utf-8-sig` accepts a byte order mark, which some editors write.
        config = parse_yaml(read_inside(folder, path, MAX_YAML_BYTES).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise DitLoraError(
            f"{folder} is not a run: it has no config.yaml; give the folder that run.dir named"
        ) from error
    except (OSError, ValueError) as error:
        raise DitLoraError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise DitLoraError(
            f"{path} is not a recipe: it must hold sections such as model: and data:; got {config!r}"
        )
    return config


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is none."""
    try:
        content = parse_json(read_inside(path.parent, path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        notes.append(f"{path.name} is not read: {error.strerror}.")
        return {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path.name} is not a JSON object and is left out.")
        return {}
    return content


def _stat(path: Path) -> tuple[float, int] | None:
    try:
        # Does not follow links, which could point anywhere.
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime, status.st_size


def _held_out(line: Mapping[str, Any]) -> dict[int, float]:
    step = line.get("step")
    if not isinstance(step, int) or "held_out_loss" not in line:
        return {}
    return {step: number_or_nan(line["held_out_loss"])}


def _not_finite(name: str, steps: Sequence[int], values: Sequence[float]) -> Iterator[str]:
    steps = [steps[int(index)] for index in np.flatnonzero(~np.isfinite(values))]
    if steps:
        listed = ", ".join(str(step) for step in steps[:8])
        more = f" and {len(steps) - 8:,} more" if len(steps) > 8 else ""
        yield f"The {name} is not finite at step{'s' if len(steps) > 1 else ''} {listed}{more}."
