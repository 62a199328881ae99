"""Command lines and environments for recipes that run in processes of their own, and ranks forked from a server.

A process that starts from nothing imports torch, Diffusers, Transformers and PEFT for seven seconds. A rank that
`Ranks` starts is forked from a server which has imported them, and differs from one of torchrun's in this alone:
imports happened before, all ranks share one hash seed, and equal runs count their activations once (`quick_runs`).
It has a session, an environment and a stdin of its own.
"""

import atexit
import gc
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "recipes" / "lora.py"
_PRELOADED = [
    "without_collections",
    "pytest",
    "benchmarks.faults.suite",
    "dit_lora.report.run.page",
    "dit_lora.training.tasks.diffusion.task",
    "dit_lora.training.tasks.diffusion.precompute",
    "dit_lora.families.cogvideox.checkpoint",
    "dit_lora.fuse.api",
    "dit_lora.cli.app",
    "dit_lora.commands.audit_recipe",
    "dit_lora.commands.sample",
    "dit_lora.hub.after_training",
    "dit_lora.report.run.background",
    "deepspeed",  # Accelerate imports it where it is installed
    "diffusers.guiders",
    "diffusers.schedulers",
    "quick_runs",
]
_GRACE = 5.0
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


def launch_command(args: list[str], ranks: int = 1) -> list[str]:
    """recipes/lora.py as users start it: by `accelerate launch`, or by torchrun on several ranks."""
    if ranks == 1:
        config = str(ROOT / "accelerate_configs" / "cpu.yaml")
        head = ["accelerate.commands.launch", "--quiet", "--config_file", config]
    else:
        head = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, "-m", *head, str(SCRIPT), *args]


def launch_environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # as users run it
    return {**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Ranks:
    """`body` in as many forked processes, each with torchrun's environment; none of it for one process.

    Use `Script` for a body as users run it, and `on_ranks` for a function.
    """

    def __init__(self, body: Callable[[], None], count: int = 1, env: Mapping[str, str] | None = None) -> None:
        from quick_runs import get_counts_folder  # imports the library, as most tests do sooner or later

        self.body = body
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks_")
        self._folder = Path(self._temporary.name)
        for stream in ("stdout", "stderr"):
            (self._folder / stream).touch()
        self._store, common = _rendezvous(count)
        _ensure_server()
        self.processes: list[BaseProcess] = []
        for rank in range(count):
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            environment = {
                **launch_environment(),
                **(common | rank_variables if common else {}),
                **(env or {}),
            }
            process = multiprocessing.get_context("forkserver").Process(
                target=_rank, args=(body, self._folder, get_counts_folder(), environment)
            )
            process.start()
            self.processes.append(process)

    def poll(self) -> int | None:
        """The code of the first rank that failed; 0 when all ended well; None while they run."""
        codes = [process.exitcode for process in self.processes]
        failed = next((code for code in codes if code), None)
        return failed if failed or None in codes else 0

    def send_signal(self, number: int) -> None:
        """To the ranks, and not to what they started."""
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process.pid or 0, number)

    def kill(self) -> None:
        """kill -9 for the ranks and for all that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()

    def wait(self, timeout: float = 9000) -> subprocess.CompletedProcess[str]:
        """Wait for all of them; when one fails the others are ended, as torchrun does."""
        try:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired(str(self.body), timeout, stderr=self._said("stderr"))
            code = self.poll()  # now: a rank that is ended below did not fail
            if code:
                self.send_signal(signal.SIGTERM)
                self._ended(_GRACE, all_of_them=True)
        finally:
            self.kill()
        return subprocess.CompletedProcess(str(self.body), code or 0, self._said("stdout"), self._said("stderr"))

    def _ended(self, seconds: float, *, all_of_them: bool = False) -> bool:
        """Wait until all ended or one failed."""
        deadline_s = time.monotonic() + seconds
        while running := [p.sentinel for p in self.processes if p.exitcode is None]:
            remaining_s = deadline_s - time.monotonic()
            if self.poll() and not all_of_them:
                return True
            if remaining_s < 0:
                return False
            wait(running, remaining_s)
        return True

    def _said(self, stream: str) -> str:
        return (self._folder / stream).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    """A script, or `-m` and a module, run as `__main__` with its arguments."""

    command: tuple[str, ...]

    def __call__(self) -> None:
        module = self.command[0] == "-m"
        sys.argv = list(self.command[module:])
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


@dataclass(frozen=True)
class Command(Script):
    """Python with arguments in a folder, up to the functions that run at its exit."""

    folder: Path

    def __call__(self) -> None:
        atexit._clear()
        os.chdir(self.folder)
        try:
            super().__call__()
        finally:
            atexit._run_exitfuncs()


def started(
    args: Sequence[object],
    ranks: int = 1,
    *,
    script: Path = SCRIPT,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """recipes/lora.py, or another script, in forked processes: `.wait()`, or `.send_signal()` and `.kill()`."""
    return Ranks(Script((str(script), *map(str, args))), ranks, env)


def run_python(
    folder: Path, *arguments: object, ranks: int = 1, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run Python or torchrun with a script or module in a folder, in forked processes."""
    return Ranks(Command(tuple(map(str, arguments)), folder), ranks).wait(timeout)


def forked(command: Sequence[str], **_options: Any) -> subprocess.CompletedProcess[str]:
    """In place of `subprocess.run`, of `python` or torchrun and a module: the same in forked processes."""
    python, *arguments = command
    assert python == sys.executable
    ranks = 1
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        assert arguments[2:4] == ["--standalone", "--nproc_per_node"]
        ranks, arguments = int(arguments[4]), arguments[5:]
    assert arguments[0] == "-m", arguments
    result = Ranks(Script(tuple(arguments)), ranks).wait()
    sys.stderr.write(result.stderr)
    return result


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 900,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What a module's function returns on each of `count` gloo ranks; it has to make the process group.

    Arguments and results are pickled. The ranks are asserted to have been as many.
    """
    with tempfile.TemporaryDirectory(prefix="results_") as folder:
        completed = Ranks(_Call.of(function, args, Path(folder)), count, env).wait(timeout)
        assert completed.returncode == 0, completed.stderr[-3000:]
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]
    processes = [number for number, _ in results]
    assert processes == [count] * count, f"{count} ranks were asked for; they saw {processes}"
    return [result for _, result in results]


@dataclass(frozen=True)
class _Call:
    """A call of a function of a file, which is imported under the name that pytest gave it."""

    module: str
    file: str
    function: str
    args: bytes
    results: Path

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], results: Path) -> Self:
        name, file = function.__module__, function.__code__.co_filename
        return cls(name, file, function.__qualname__, pickle.dumps(args), results)

    def __call__(self) -> None:
        from accelerate import PartialState
        from torch import distributed

        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[self.module])
        result = getattr(sys.modules[self.module], self.function)(*pickle.loads(self.args))
        processes = PartialState._shared_state.get("num_processes", 1)
        if distributed.is_initialized():
            processes = distributed.get_world_size()
        # Written under the rank that the launch gave: a file is missing if two processes had the same.
        (self.results / os.environ.get("RANK", "0")).write_bytes(pickle.dumps((processes, result)))
        if distributed.is_initialized():
            distributed.barrier()
            time.sleep(0.1)  # gloo lets go of its tensors (docs/log.md)
            distributed.destroy_process_group()


def _rank(body: Callable[[], None], folder: Path, counts: Path, environment: dict[str, str]) -> None:
    """Be a process of its own: session, environment, signals, streams; then do what it is for."""
    from quick_runs import share_counts

    share_counts(counts)
    gc.freeze()  # what the server has imported stays
    gc.enable()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with (folder / stream.name.strip("<>")).open("a", encoding="utf-8") as file:
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    body()


def _ensure_server() -> None:
    """Start the fork server, once; its imports go on while nobody waits for them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    original, environment = dict(os.environ), launch_environment()
    os.environ.clear()
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(original)


def _rendezvous(count: int) -> tuple[Any, dict[str, str]]:
    """A store for the ranks, in this process as in torchrun's, and what tells them of it."""
    if count == 1:
        return None, {}
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    number = str(count)
    return store, {
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "ROLE_WORLD_SIZE": number,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
