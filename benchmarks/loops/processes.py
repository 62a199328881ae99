"""Run a loop in a process forked from this one, which has imported torch."""

import atexit
import contextlib
import functools
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops import guard_command, plant
from benchmarks.loops.loop_file import LoopFile
from benchmarks.loops.saved_files import SavedFile, find_saved_files

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
Runner = Callable[[str, Sequence[str]], None]
"""Runs a script with its arguments, with the guard around it."""


@dataclass(frozen=True)
class RunSpec:
    """One run of a loop."""

    loop: LoopFile
    fault: str = ""
    """Empty for a healthy run."""
    guard: str = ""
    """How it is guarded: `command`, or the API that the loop uses itself; empty for a run without the guard."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """How often a healthy run passes each place where a fault can be planted."""
    calls: Mapping[str, int] | None = None
    """How often the loop calls its model between two of these places, where that is limited."""

    @property
    def arguments(self) -> list[str]:
        return [f"--guard={self.guard}"] if self.guard not in ("", "command") else []


@dataclass(frozen=True)
class RunResult:
    """What one run left behind."""

    exit_code: int
    """-1 after a timeout, minus the signal's number after a signal."""
    stdout: str
    stderr: str
    files: Mapping[str, SavedFile]
    notes: Sequence[Mapping[str, Any]]
    """Lines of the file of notes of `plant`."""
    events: Sequence[Mapping[str, Any]]
    """Lines of the guard's events.jsonl."""
    seconds: float
    has_timed_out: bool = False

    @property
    def planted(self) -> list[Mapping[str, Any]]:
        return [note for note in self.notes if "planted" in note]

    @property
    def bad_rows(self) -> set[int]:
        """Rows of the models' inputs that were not finite, as far as they are known."""
        return {note["bad_row"] for note in self.notes if "bad_row" in note}


class RunProcess:
    """One run under way, in a temporary folder; as many processes as the loop has ranks."""

    def __init__(self, spec: RunSpec, run_guarded: Runner, keep: Path | None = None) -> None:
        self.spec = spec
        self._keep = keep
        self._folder = Path(tempfile.mkdtemp(prefix="loop_"))
        (self._folder / "work").mkdir()
        (self._folder / "temporary").mkdir()
        self._started = time.monotonic()
        self._timed_out = False
        self._fork(run_guarded)

    def _environment(self) -> dict[str, str]:
        fault: dict[str, Any] = {"fault": self.spec.fault, "notes": str(self._folder / "notes")}
        fault["totals"] = dict(self.spec.totals)
        if self.spec.calls is not None:
            fault["calls"] = dict(self.spec.calls)
        return {
            **os.environ,
            plant.VARIABLE: json.dumps(fault),
            # Killed workers leave folders behind; here they are deleted with the run.
            "TMPDIR": str(self._folder / "temporary"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "LOOP_MODELS": build_tiny_model(self.spec.loop.model) if self.spec.loop.model else "",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def _fork(self, run_guarded: Runner) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        context = multiprocessing.get_context("fork")
        ranks = self.spec.loop.ranks
        common = _rendezvous(ranks)
        self._processes: list[Any] = []
        for rank in range(ranks):
            environment = self._environment() | {
                key: str(rank) if value is None else value for key, value in common.items()
            }
            process = context.Process(target=_run_child, args=(self.spec, self._folder, environment, run_guarded))
            process.start()
            self._processes.append(process)

    def poll(self) -> RunResult | None:
        """The result once every process has ended; None while they run. Kills them after the timeout."""
        codes = [process.exitcode for process in self._processes]
        if time.monotonic() - self._started > TIMEOUT_S and None in codes:
            self._timed_out = True
            self.kill()
            codes = [-1]
        elif None in codes:
            return None
        # The other ranks wait for one that has failed, or end with an error of their own.
        return self._collect(next((code for code in codes if code), 0) or 0)

    def kill(self) -> None:
        """End the processes and everything that they started."""
        for process in self._processes:
            # Not of one that has ended: its number may belong to somebody else by now.
            if process.exitcode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:  # it has no session of its own yet
                    process.kill()
                process.join()

    def discard(self) -> None:
        """Kill the processes and delete the folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, code: int) -> RunResult:
        seconds = time.monotonic() - self._started
        work = self._folder / "work"
        result = RunResult(
            exit_code=code,
            stdout=_read_text(self._folder / "stdout"),
            stderr=_read_text(self._folder / "stderr"),
            files=find_saved_files(work, guard_command.is_guards_file),
            notes=_read_lines(self._folder / "notes"),
            events=[event for path in sorted(work.rglob("events.jsonl")) for event in _read_lines(path)],
            seconds=seconds,
            has_timed_out=self._timed_out,
        )
        if self._keep is not None:
            parts = (self.spec.loop.name.replace("/", "-"), self.spec.fault, self.spec.guard)
            target = self._keep / "_".join(part or "none" for part in parts)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(self._folder, target)
        shutil.rmtree(self._folder, ignore_errors=True)
        return result


@functools.cache
def build_tiny_model(variant: str) -> str:
    """Build a tiny checkpoint with `dit-lora tiny`, once, and return the folder that it is in."""
    folder = tempfile.mkdtemp(prefix="loop_models_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def build() -> None:
        sys.argv = ["dit-lora", "tiny", variant, f"{folder}/{variant}"]
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module("dit_lora", run_name="__main__")

    # Forked, so that it need not import again what this process has imported.
    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"dit-lora tiny {variant} ended with exit code {process.exitcode}")
    return folder


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one JSON object per line; a line that is cut off is kept as text."""
    records = []
    for line in _read_text(path).splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            records.append({"broken_line": line})
    return records


def _rendezvous(ranks: int) -> dict[str, str | None]:
    """torchrun's environment; None stands for the process' own rank."""
    if ranks == 1:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**common, "WORLD_SIZE": str(ranks), "RANK": None, "LOCAL_RANK": None}


def _run_child(spec: RunSpec, folder: Path, environment: Mapping[str, str], run_guarded: Runner) -> None:
    """Become a process as if started from a shell, run the script, and end as Python ends."""
    os.setsid()
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read TMPDIR again
    os.chdir(folder / "work")
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    script = str(spec.loop.path)
    sys.path.insert(0, str(spec.loop.path.parent))
    # Not where torch.compile would have to trace the hooks.
    if spec.fault == "nan_sample" and not spec.guard and spec.loop.preload != "compile":
        plant.record_bad_rows()
    try:
        if spec.guard == "command":
            run_guarded(script, spec.arguments)
        else:
            run_bare(script, spec.arguments)
    finally:
        # multiprocessing would leave these two out, or do them after what it closes.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()


def run_bare(script: str, arguments: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does: as the module `__main__`, which stays until the process ends."""
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)
