"""Runs in processes forked from this one, which has imported everything that they need."""

import importlib.util
import os
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from accelerate.state import AcceleratorState
from tqdm import tqdm

from dit_lora.errors import report_errors_and_exit

ROOT = Path(__file__).parents[1]
Main = Callable[[list[str]], None]


def forked(main: Main, args: list[str], environment: dict[str, str], log: Path) -> int:
    """The process id of a copy of this process that runs `main(args)` and ends with its exit code."""
    with warnings.catch_warnings():
        # Of threads: there are none here that the copy needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
        os.environ.update(environment)
        # tqdm's own lock is shared by forks, and never let go of by one that is killed with it.
        tqdm.set_lock(threading.RLock())
        AcceleratorState._reset_state(reset_partial_state=True)
        # Builds of PyTorch for CUDA count a fake device as one, and then start no engine in a copy: before it is seen.
        torch.ones((), requires_grad=True).backward()
        with report_errors_and_exit():
            main(args)
        code = 0
    finally:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        elif error is not None:
            traceback.print_exception(error)
        os._exit(code)


def ended(pids: Sequence[int]) -> dict[int, int]:
    """Exit codes of those that have ended since the last look."""
    results = ((pid, *os.waitpid(pid, os.WNOHANG)) for pid in pids)
    return {pid: os.waitstatus_to_exitcode(status) for pid, ended_pid, status in results if ended_pid}


def wait(pids: Sequence[int], known_codes: dict[int, int] | None = None) -> list[int]:
    codes = dict(known_codes or {})
    for pid in pids:
        if pid not in codes:
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return list(codes.values())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lora_recipe", ROOT / "recipes" / "lora.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
