"""Times the phases of a run, from the start of its process to its end, in wall time and CPU time."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dit_lora.environment.operating_system import get_process_age_s
from dit_lora.files import write_atomically

PHASES_FILE = "phases.json"
FIRST_STEP = "first step"
_NUM_SHOWN = 3
"""Number of phases in the line of the first step; phases.json and the report have all of them."""
_MAX_COLUMNS = 80
"""Maximum length of the closing line."""
_GROUPS = {
    "base fingerprint": "checks",
    "preflight": "checks",
    "model parity": "checks",
    "kernel parity": "checks",
    "gradient check": "checks",
    "state check": "checks",
    "output fingerprint": "checks",
    "verification": "checks",
    "eval loss": "eval loss",
    "samples": "samples",
    "saving": "saving",
    "snapshot": "saving",
    "report": "report",
}
"""What the closing line calls each phase. All other time before the first step is `start`."""
_SLOW_START_S = 60.0
"""A start that takes longer (seconds) is explained in the log; the report explains every start."""

Stage = Literal["before", "training", "after"]


@dataclass
class TimedPhase:
    """One phase of a process, such as loading the model: its total time, and how often it ran."""

    name: str
    """Nested phases are written `preflight/kernels`."""
    stage: Stage
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    count: int = 0


@dataclass
class PhaseTimer:
    """The phases that a process has been through, in order.

    `synchronize` ends each phase before the first step, to count GPU time in it. During training nothing waits.
    """

    synchronize: Callable[[], object] = lambda: None
    entries: list[TimedPhase] = field(default_factory=list)
    stage: Stage = "before"
    seconds: dict[Stage, float] = field(default_factory=dict)
    """Wall time of the stages that have ended, including time in no named phase."""
    reductions: dict[str, str] = field(default_factory=dict)
    """Checks that were not made in full, because the run is short or an earlier run made them: what was done, and the
    option that makes them in full."""
    step_seconds: float = 0.0
    """Wall time of the steps that were taken, without the phases inside of them."""
    first_step_seconds: float = 0.0
    """Part of `step_seconds` before the end of the first step."""
    _open_names: list[str] = field(default_factory=list)
    _stage_start: float = field(default_factory=time.perf_counter)
    _first_step_start: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def from_process(cls, launcher: int | None = None) -> "PhaseTimer":
        """Phases that begin with the process or its launcher. The time until now is counted as imports."""
        age, cpu = get_process_age_s(os.getpid()), time.process_time()
        phases = cls(_stage_start=time.perf_counter() - age)
        if launcher is not None:
            # The clocks may disagree by a moment: a launcher is never younger than its process.
            before = max(0.0, get_process_age_s(launcher) - age)
            phases._stage_start -= before
            phases.add_time("launcher", before, 0.0)
        phases.add_time("imports", age, cpu)
        return phases

    def add_time(self, name: str, seconds: float, cpu_seconds: float) -> None:
        """Add a time measurement to a phase of this name, in seconds."""
        path = "/".join([*self._open_names, name])
        phase = next((p for p in self.entries if (p.name, p.stage) == (path, self.stage)), None)
        if phase is None:
            phase = TimedPhase(path, self.stage)
            # In the order in which they first began.
            self.entries.append(phase)
        phase.seconds += seconds
        phase.cpu_seconds += cpu_seconds
        phase.count += 1

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """Time the body of the context as a phase, even if it ends with an error."""
        began, stage = (time.perf_counter(), time.process_time()), self.stage
        self._open_names.append(name)
        try:
            yield
        finally:
            if self.stage == "before":
                self.synchronize()
            self._open_names.pop()
            # A phase that was open while the stage changed belongs to neither stage.
            if stage == self.stage:
                self.add_time(name, time.perf_counter() - began[0], time.process_time() - began[1])

    def add_step_time(self, seconds: float) -> None:
        """Add the wall time of a step that was taken, without the phases inside of it."""
        self.step_seconds += seconds
        # The first step ends the stage `before`, and is a part of it.
        if self.stage == "before":
            self.first_step_seconds += seconds

    def begin_first_step(self) -> None:
        """Start timing the first training step."""
        self._first_step_start = time.perf_counter(), time.process_time()

    def end_first_step(self) -> bool:
        """End the timing of the first training step. Returns True at the first call, False at later ones."""
        if self.stage != "before":
            return False
        clock, cpu = self._first_step_start
        self.add_time(FIRST_STEP, time.perf_counter() - clock, time.process_time() - cpu)
        self._enter_next_stage("training")
        return True

    def end_training_stage(self) -> None:
        """End the training stage of the time measurements, unless it has ended."""
        if self.stage != "after":
            self._enter_next_stage("after")

    def resume_training_stage(self) -> None:
        """Continue the training stage if a check after the last step rolled the run back."""
        if self.stage == "after":
            self._enter_next_stage("training")

    def _enter_next_stage(self, next_stage: Stage) -> None:
        now = time.perf_counter()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._stage_start
        self.stage, self._stage_start = next_stage, now

    def describe_slow_start(self) -> str | None:
        """The time until the first step and the phases that took most of it; None if it took less than a minute."""
        start_s = self._measure_stage_s("before")
        if start_s < _SLOW_START_S:
            return None
        # Phases that are not nested in others.
        phases = [phase for phase in self.entries if phase.stage == "before" and "/" not in phase.name]
        phases.sort(key=lambda phase: phase.seconds, reverse=True)
        return f"{start_s:.0f} s: {', '.join(f'{phase.name} {phase.seconds:.0f}' for phase in phases[:_NUM_SHOWN])}"

    def summarize_time(self) -> dict[str, float]:
        """Seconds of the process until now: `steps`, then the work outside of them by kind, the longest first.

        The values add up to the whole. Steps that failed and were repeated count as `other`.
        """
        total = sum(self._measure_stage_s(stage) for stage in {*self.seconds, self.stage})
        outside = dict.fromkeys(["start", *_GROUPS.values()], 0.0)
        # Below, what has a name of its own is taken off.
        outside["start"] = self._measure_stage_s("before") - self.first_step_seconds
        for phase in self.entries:
            # Parts of a phase have names with a slash, and are included in its time.
            group = _GROUPS.get(phase.name)
            if group is not None:
                outside[group] += phase.seconds
                outside["start"] -= phase.seconds if phase.stage == "before" else 0.0
        longest_first = dict(sorted(outside.items(), key=lambda item: item[1], reverse=True))
        # What is in no phase, such as the gaps between them.
        other = total - self.step_seconds - sum(outside.values())
        return {"steps": self.step_seconds, **longest_first, "other": other}

    def describe_time(self) -> str:
        """The line of `summarize_time` in whole seconds; below ten seconds in tenths."""
        parts = self.summarize_time()
        remaining = sum(parts.values())
        digits = 1 if remaining < 10 else 0
        text = f"time: {remaining:.{digits}f} s:"
        # Parts that round to zero, or do not fit the line, are in its `other`.
        for name, seconds in parts.items():
            part = f" {name} {seconds:.{digits}f},"
            num_columns = len(f"{text}{part} other {remaining - seconds:.{digits}f}")
            if name != "other" and round(seconds, digits) > 0 and num_columns <= _MAX_COLUMNS:
                text += part
                remaining -= seconds
        return f"{text} other {max(0.0, remaining):.{digits}f}"

    def _measure_stage_s(self, stage: Stage) -> float:
        # The current stage has no recorded end yet.
        running = time.perf_counter() - self._stage_start if stage == self.stage else 0.0
        return self.seconds.get(stage, 0.0) + running

    def write_phase_times(self, folder: Path) -> None:
        """Write phases.json with this process's phases."""
        stages = {name: self._measure_stage_s(name) for name in (*self.seconds, self.stage)}
        record = {
            "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
            "reductions": self.reductions,
            "time": {name: round(seconds, 3) for name, seconds in self.summarize_time().items()},
            "phases": [
                {**asdict(phase), "seconds": round(phase.seconds, 3), "cpu_seconds": round(phase.cpu_seconds, 3)}
                for phase in self.entries
            ],
        }
        write_atomically(folder / PHASES_FILE, json.dumps(record, indent=1) + "\n")
