"""What a run refuses before it starts, and how it ends."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType

from dit_lora.errors import DitLoraError
from dit_lora.training import runtime
from dit_lora.training.runtime import agree, stop_signals


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_a_parallel_mode_that_is_not_tested_is_refused(kind: DistributedType) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=kind, num_processes=2)
    with pytest.raises(DitLoraError, match=r"is not supported by this version.*ddp\.yaml"):
        runtime._check_launch(accelerator)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_acts(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_signals() as asked:
        assert asked() == 0
        os.kill(os.getpid(), number)
        assert asked() == code
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_end_of_the_launcher_is_a_request_to_stop() -> None:
    """`accelerate launch` dies of SIGTERM and leaves its script running."""
    with stop_signals(launcher=os.getppid()) as asked:
        assert asked() == 0
    with stop_signals(launcher=1 + os.getppid()) as asked:
        assert asked() == 143
    with stop_signals() as asked:
        assert asked() == 0


def test_ranks_agree_on_an_error_and_on_none() -> None:
    accelerator = Accelerator(cpu=True)
    agree(accelerator, None)
    error = DitLoraError("disk")
    error.exit_code = 7
    with pytest.raises(DitLoraError, match="disk") as raised:
        agree(accelerator, error)
    assert raised.value.exit_code == 7
