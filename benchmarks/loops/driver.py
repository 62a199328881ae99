"""Run loops without and with the guard, several processes at a time, and check every run."""

import gc
import importlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.loops import guard_command
from benchmarks.loops.checks import Row, check_bare, check_faulty, check_healthy
from benchmarks.loops.loop_file import FAULTS, LoopFile
from benchmarks.loops.processes import Runner, RunProcess, RunResult, RunSpec

# In this order: each imports the ones before it anyway, or does not look at them.
PRELOADS = ("", "compile", "peft", "accelerate", "transformers", "trl", "lightning")
_MODULES = {
    "": ("torch._dynamo", "torch.distributed", "torch.optim.swa_utils", "torch.utils.checkpoint"),
    "compile": ("torch._inductor.compile_fx", "torch._dynamo.testing"),
    "peft": ("peft",),
    # Accelerate itself imports DeepSpeed, where it is installed, and that prints a line when it is imported.
    "accelerate": ("accelerate", "deepspeed"),
    "transformers": ("transformers.trainer", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"),
    "trl": ("trl.trainer.sft_trainer",),
    "lightning": ("lightning",),
}
Session = Generator[RunSpec, RunResult, None]


@dataclass(frozen=True)
class Selection:
    """A loop, and what of it is run."""

    loop: LoopFile
    faults: Sequence[str]
    guards: Sequence[str]

    @property
    def num_runs(self) -> int:
        bare = 1 + len(self.faults)
        return bare * (1 + len(self.guards))


@dataclass
class Driver:
    """Runs selected loops and collects the rows of their checks."""

    num_jobs: int = 2
    run_guarded: Runner = guard_command.run_guarded
    on_run: Callable[[RunSpec, RunResult], None] = lambda spec, result: None
    keep: Path | None = None
    """Folder in which what each run leaves is kept."""
    rows: list[Row] = field(default_factory=list)

    def run(self, selections: Iterable[Selection]) -> list[Row]:
        """Run every selection, grouped by the libraries that they need."""
        selections = list(selections)
        try:
            for preload in PRELOADS:
                group = [item for item in selections if item.loop.preload == preload]
                if group:
                    preload_modules(preload)
                    self._run_sessions([self._session(item) for item in group])
        finally:
            gc.unfreeze()  # else Triton's bindings report leaks when Python ends
        return self.rows

    def _run_sessions(self, sessions: Sequence[Session]) -> None:
        """Keep as many sessions going as there are jobs; each has one run under way."""
        waiting = iter(sessions)
        active: list[tuple[Session, RunProcess]] = []
        try:
            while True:
                while len(active) < self.num_jobs and (session := next(waiting, None)) is not None:
                    active.append((session, self._launch(next(session))))
                if not active:
                    return
                active = list(self._advance(active))
                time.sleep(0.003)
        finally:
            for _, process in active:
                process.discard()

    def _advance(self, active: Sequence[tuple[Session, RunProcess]]) -> Iterator[tuple[Session, RunProcess]]:
        for session, process in active:
            result = process.poll()
            if result is None:
                yield session, process
                continue
            self.on_run(process.spec, result)
            try:
                spec = session.send(result)
            except StopIteration:
                continue
            yield session, self._launch(spec)

    def _launch(self, spec: RunSpec) -> RunProcess:
        return RunProcess(spec, self.run_guarded, self.keep)

    def _session(self, selection: Selection) -> Session:
        """Yield the runs of one loop, in order: what a bare run shows is needed by the ones after it."""
        loop = selection.loop
        spec = RunSpec(loop)
        healthy = yield spec
        self.rows += check_bare(spec, healthy)
        totals = Counter(note["location"] for note in healthy.notes if "location" in note)
        for guard in selection.guards:
            spec = RunSpec(loop, guard=guard)
            self.rows += check_healthy(spec, healthy, (yield spec))
        for fault in selection.faults:
            spec = RunSpec(loop, fault, totals=totals)
            bare = yield spec
            self.rows += check_bare(spec, bare)
            calls = Counter(str(note["call"]) for note in bare.notes if "call" in note)
            limits = calls if fault == "replay_oom" else None
            for guard in selection.guards:
                spec = RunSpec(loop, fault, guard, totals, limits)
                self.rows += check_faulty(spec, bare, (yield spec))


def preload_modules(name: str) -> None:
    """Import here what every forked run would import, and let torch do what it does once, such as late imports.

    No backward: processes that are forked from one in which autograd has run cannot run it.
    """
    torch.set_num_threads(1)
    gc.disable()  # collections take a quarter of the time of imports
    for module in _MODULES[name]:
        importlib.import_module(module)
    guard_command.import_guard()
    if not name:
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.zeros(2)
        for optimizer in (torch.optim.AdamW([weight]), torch.optim.SGD([weight], lr=0.1)):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
            optimizer.step()
            optimizer.zero_grad()
    gc.enable()
    gc.collect()
    gc.freeze()  # collections in forked processes must not touch, and so copy, these pages


def select(loops: Sequence[LoopFile], fault: Callable[[str], bool], guard: Callable[[str], bool]) -> list[Selection]:
    """Of each loop, the faults and the ways of guarding that are wanted."""
    return [
        Selection(
            loop,
            [name for name in loop.faults if fault(name)],
            [name for name in loop.guards if guard(name)],
        )
        for loop in loops
    ]


def select_share(selections: Sequence[Selection], share: int, healthy_share: int = 1) -> list[Selection]:
    """Select a fixed part of the faulty runs, 1 of `share`, and the healthy runs of the same loops.

    A loop without a selected fault is kept, with its healthy runs only, if it is 1 of `healthy_share`. Each fault is
    run in one of `share` loops that declare it, and at least once. The faults start at different loops, so that about
    the same part of each loop's faults is run.
    """
    totals = Counter(fault for selection in selections for fault in selection.faults)
    num_seen: Counter[str] = Counter()
    parts = []
    for selection in selections:
        faults = []
        for fault in selection.faults:
            if (num_seen[fault] + FAULTS.index(fault)) % min(share, totals[fault]) == 0:
                faults.append(fault)
            num_seen[fault] += 1
        parts.append(Selection(selection.loop, faults, selection.guards))
    healthy_parts = [part for part in parts if not part.faults]
    left_out = [part for number, part in enumerate(healthy_parts) if number % healthy_share]
    return [part for part in parts if part not in left_out]
