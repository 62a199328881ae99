"""What a run refuses before it starts, and how it ends."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from launching import ROOT, on_ranks, run_python

from dit_lora.errors import DitLoraError
from dit_lora.training.session import session
from dit_lora.training.session.launch import find_accelerate_launcher_pid, is_single_process_launch
from dit_lora.training.session.session import (
    handle_stop_signals,
    make_interrupt_handler,
    raise_on_all_ranks,
    wait_for_all_ranks,
)


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_a_parallel_mode_that_is_not_tested_is_refused(kind: DistributedType) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=kind, num_processes=2)
    with pytest.raises(DitLoraError, match=r"is not supported by this version.*ddp\.yaml"):
        session._check_launch(accelerator, None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_acts(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    expected_error = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with handle_stop_signals() as is_requested:
        assert is_requested() == 0
        os.kill(os.getpid(), number)
        assert is_requested() == code
        os.kill(os.getpid(), number)  # torchrun passes on what the ranks were sent too
        assert is_requested() == code
        monkeypatch.setattr(session, "_FORWARDED_SIGNAL_S", 0.0)
        with pytest.raises(expected_error) as raised:
            os.kill(os.getpid(), number)
        assert getattr(raised.value, "code", 130) == code
    assert signal.getsignal(number) is before


def test_a_signal_that_a_launcher_sends_again_interrupts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = make_interrupt_handler()
    with pytest.raises(KeyboardInterrupt):
        handle(signal.SIGINT, None)
    handle(signal.SIGINT, None)
    monkeypatch.setattr(session, "_FORWARDED_SIGNAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        handle(signal.SIGINT, None)


def test_the_end_of_the_launcher_is_a_request_to_stop() -> None:
    """`accelerate launch` dies of SIGTERM and leaves its script running."""
    with handle_stop_signals(launcher=os.getppid()) as is_requested:
        assert is_requested() == 0
    with handle_stop_signals(launcher=1 + os.getppid()) as is_requested:
        assert is_requested() == 143
    with handle_stop_signals() as is_requested:
        assert is_requested() == 0


def launched(*options: str) -> list[str]:
    """The address, the number of processes and the parent that a script sees below `accelerate launch`."""
    script = """import os, sys
sys.path.insert(0, sys.argv[1])
from dit_lora.training.session.launch import is_single_process_launch, find_accelerate_launcher_pid
several_gpus = [is_single_process_launch(os.environ, gpus) for gpus in (0, 1, 8)]
print(*several_gpus, find_accelerate_launcher_pid(os.environ) == os.getppid())
"""
    command = ("-m", "accelerate.commands.launch", *options, "--no_python", sys.executable, "-c", script, ROOT)
    result = run_python(ROOT, *command)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_launch_that_starts_one_of_several_processes_is_seen_in_the_environment(
    tmp_path: Path,
) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one; on several GPUs it may not have been asked to."""
    assert launched("--cpu", "--num_processes", "2") == ["True", "True", "False", "True"]
    assert launched("--num_processes", "2") == ["True", "True", "True", "True"]
    assert launched("--num_processes", "1") == ["False", "False", "False", "True"]
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    by_file = launched("--config_file", str(tmp_path / "two.yaml"))
    assert by_file == ["True", "True", "True", "True"]


def test_what_accelerate_did_not_start_has_no_launcher_and_lacks_nothing() -> None:
    """A batch script exports an address too, and torchrun says how many meet there."""
    assert not is_single_process_launch({"MASTER_ADDR": "127.0.0.1"}, 0)
    assert find_accelerate_launcher_pid({"MASTER_ADDR": "127.0.0.1"}) is None
    by_accelerate = {"ACCELERATE_DYNAMO_MODE": "default"}
    assert not is_single_process_launch({**by_accelerate, "MASTER_ADDR": "node7"}, 0)
    ranks = {**by_accelerate, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}
    assert not is_single_process_launch(ranks, 0)


def test_ranks_agree_on_an_error_and_on_none() -> None:
    accelerator = Accelerator(cpu=True)
    raise_on_all_ranks(accelerator, None)
    error = DitLoraError("disk")
    error.exit_code = 7
    with pytest.raises(DitLoraError, match="disk") as raised:
        raise_on_all_ranks(accelerator, error)
    assert raised.value.exit_code == 7


def alone_for_a_while(how: str) -> float:
    """Rank 0 works for longer than a collective of training may take; the other waits."""
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=1))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    assert accelerator.num_processes == 2
    wait_for_all_ranks(accelerator)  # the room is there before anybody is late
    if accelerator.is_main_process:
        time.sleep(2)
    {
        "meet": wait_for_all_ranks,
        "agree": lambda accelerator: raise_on_all_ranks(accelerator, None),
    }[how](accelerator)
    return float(accelerator.gather(torch.ones(1)).sum())


@pytest.mark.parametrize("how", ["meet", "agree"])
def test_work_of_one_rank_may_take_longer_than_a_collective_of_training(how: str) -> None:
    assert on_ranks(2, alone_for_a_while, how) == [2.0, 2.0]
