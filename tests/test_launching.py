"""The forked ranks that other tests use are processes as torchrun starts them."""

import json
import os
import signal
import subprocess
import textwrap
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launching import ROOT, launch_environment, on_ranks, run_python, started
from torch import distributed

_OF_ONE_LAUNCH = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
_OF_ITS_AGENT = {
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}


def seen(tensor: torch.Tensor) -> dict[str, Any]:
    """What a rank finds, after an all-reduce of a tensor times its rank."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    reduced = tensor * rank
    distributed.all_reduce(reduced)
    return {
        "rank": rank,
        "reduced": reduced,
        "environment": dict(os.environ),
        "session": os.getsid(0) == os.getpid(),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
    }


def without_a_group(which: int) -> int:
    return which


def torn_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("torn")
    time.sleep(60)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_each_rank_returns_what_it_found_in_a_process_of_its_own() -> None:
    tensor = torch.tensor([1.5, -2.0, 7.25])
    ranks = on_ranks(3, seen, tensor, env={"ASKED": "for"})
    for number, rank in enumerate(ranks):
        assert rank["rank"] == number
        assert torch.equal(rank["reduced"], tensor * 3)
        assert (rank["session"], rank["threads"], rank["folder"]) == (True, 1, str(ROOT))
        assert rank["environment"]["ASKED"] == "for"
        assert "TRITON_INTERPRET" not in rank["environment"]
    assert "ASKED" not in os.environ


def test_the_server_has_one_thread_and_none_of_the_tests_settings() -> None:
    """What has threads or autograd's workers cannot be forked."""
    started(["--help"]).wait()
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    assert server.num_threads() == 1
    assert "TRITON_INTERPRET" not in server.environ()


@pytest.mark.slow
def test_the_environment_is_torchruns(tmp_path: Path) -> None:
    path = script(tmp_path, "import json, os; print(json.dumps(dict(os.environ)))")
    process = run_python(tmp_path, "-m", "torch.distributed.run", "--standalone", path)
    assert process.returncode == 0, process.stderr
    usual = launch_environment().keys() | _OF_ONE_LAUNCH
    real = {k: v for k, v in json.loads(process.stdout).items() if k not in usual}
    forked = on_ranks(2, seen, torch.ones(1))[0]["environment"]
    launch_variables = {k: v for k, v in forked.items() if k not in usual}
    assert launch_variables.keys() == real.keys() - _OF_ITS_AGENT
    for name, value in launch_variables.items():
        assert value == real[name] or name.endswith("WORLD_SIZE"), name  # one process there, two here


def test_a_function_that_makes_no_group_has_not_run_on_ranks() -> None:
    with pytest.raises(AssertionError, match=r"2 ranks were asked for; they saw \[1, 1\]"):
        on_ranks(2, without_a_group, 1)


def test_a_failed_rank_ends_the_others_and_its_traceback_is_shown() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="ValueError: torn"):
        on_ranks(2, torn_on_rank_1)
    assert time.monotonic() - began < 30


def test_ranks_that_hang_are_killed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting", file=sys.stderr)
        time.sleep(600)
        """,
    )
    ranks = started([], 2, script=path)
    with pytest.raises(subprocess.TimeoutExpired) as error:
        ranks.wait(timeout=2)
    assert error.value.stderr == "waiting\nwaiting\n"
    assert [process.exitcode for process in ranks.processes] == [-signal.SIGKILL] * 2


def test_a_script_has_its_arguments_streams_and_exit_code(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import sys
        assert __name__ == "__main__"
        print("out", *sys.argv[1:])
        print("err", file=sys.stderr)
        sys.exit(3)
        """,
    )
    process = started(["a b", 7], script=path).wait()
    assert (process.returncode, process.stdout, process.stderr) == (3, "out a b 7\n", "err\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_those_of_a_new_process(tmp_path: Path, number: int) -> None:
    path = script(
        tmp_path,
        """
        import pathlib, sys, time
        try:
            pathlib.Path(sys.argv[1]).touch()  # within: the signal may come before it returns
            time.sleep(600)
        except KeyboardInterrupt:
            sys.exit(130)
        """,
    )
    ready = tmp_path / "ready"
    ranks = started([ready], script=path)
    while not ready.exists():
        time.sleep(0.01)
    ranks.send_signal(number)
    assert ranks.wait().returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
