"""Checkpoints are written in the background, from a copy of their step, and their errors are not lost."""

import threading
import time
from pathlib import Path

import pytest
import torch

from dit_lora.errors import DitLoraError
from dit_lora.training.checkpoints.files import SavedState, load_checkpoint, save_checkpoint
from dit_lora.training.checkpoints.writer import CheckpointWriter


def state(value: float) -> SavedState:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 7, generator=generator).t()  # not contiguous
    moments = {"adapter/w/step": torch.tensor(value), "adapter/w/codes": torch.arange(3).byte()}
    return SavedState({"w": weight + value}, moments, {"ema/w": weight - value})


class Gate:
    """A write that waits to be let through, and notes what it was given."""

    def __init__(self) -> None:
        self.open, self.began = threading.Event(), threading.Event()
        self.written: list[SavedState] = []

    def __call__(self, copy: SavedState) -> None:
        self.began.set()
        assert self.open.wait(100)
        self.written.append(SavedState(*({n: t.clone() for n, t in part.items()} for part in parts(copy))))


def parts(one: SavedState) -> tuple:
    return one.weights, one.optimizer, one.averages


def same(one: SavedState, other: SavedState) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
        for mine, theirs in zip(parts(one), parts(other), strict=True)
    )


def test_the_loop_goes_on_and_what_is_written_is_the_state_of_the_save() -> None:
    saver, gate, live = CheckpointWriter(), Gate(), state(1.0)
    saver.save_async(1, live, gate)
    assert gate.began.wait(100)
    assert saver.poll_exit_code() == 0
    for part in parts(live):  # training goes on while the write waits
        for tensor in part.values():
            tensor.add_(1)
    gate.open.set()
    assert saver.wait() is None
    assert same(gate.written[0], state(1.0))


def test_a_second_save_waits_for_the_first_whose_copy_it_overwrites() -> None:
    saver, first_gate, second = CheckpointWriter(), Gate(), Gate()
    saver.save_async(1, state(1.0), first_gate)
    waiting = threading.Thread(target=saver.save_async, args=(2, state(2.0), second))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert not second.began.is_set()
    first_gate.open.set()
    second.open.set()
    waiting.join(10)
    assert saver.wait() is None
    assert same(first_gate.written[0], state(1.0))
    assert same(second.written[0], state(2.0))


def test_an_error_is_known_without_waiting_and_no_save_follows_it() -> None:
    saver, failed = CheckpointWriter(), threading.Event()

    def fail(_copy: SavedState) -> None:
        failed.set()
        error = DitLoraError("no space")
        error.exit_code = 3
        raise error

    saver.save_async(1, state(1.0), fail)
    failed.wait(100)
    deadline = time.monotonic() + 100
    while saver.poll_exit_code() == 0 and time.monotonic() < deadline:  # the result is set just after
        time.sleep(0.001)
    assert saver.poll_exit_code() == 3
    gate = Gate()
    saver.save_async(2, state(2.0), gate)
    error = saver.wait()
    assert str(error) == "no space"
    assert not gate.began.is_set()
    assert saver.wait() is error  # it stays


def test_jobs_run_in_their_order() -> None:
    saver, gate, order = CheckpointWriter(), Gate(), []
    saver.save_async(1, state(1.0), gate)
    saver.submit(lambda: order.append(len(gate.written)))
    gate.open.set()
    assert saver.wait() is None
    assert order == [1]


def test_a_defect_in_the_thread_ends_in_words_too_and_a_forgotten_error_lets_the_next_save_be_tried() -> None:
    """The run still has its state: it is saved at the next step, and a traceback would have lost it."""
    saver = CheckpointWriter()
    saver.submit(lambda: 1 / 0)
    error = saver.wait()
    assert isinstance(error, DitLoraError)
    assert str(error) == "cannot save a checkpoint: ZeroDivisionError: division by zero"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert saver.poll_exit_code() == 2
    saver.clear_error()
    assert saver.poll_exit_code() == 0
    with saver.record_os_errors():
        raise OSError(28, "No space left on device", "quarantine.jsonl")
    message = saver.wait()
    assert str(message) == "cannot write quarantine.jsonl: No space left on device"


def test_a_copy_is_written_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    saver = CheckpointWriter()
    saver.save_async(7, state(4.0), lambda copy: save_checkpoint(tmp_path, 7, copy, {}, keep=1))
    assert saver.wait() is None
    loaded = load_checkpoint(tmp_path / "checkpoints" / "step_000007", {})
    assert same(loaded.state, state(4.0))
    assert loaded.state.optimizer["adapter/w/codes"].dtype is torch.uint8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_of_a_gpu_is_that_of_the_step_while_the_next_one_runs() -> None:
    saver, gate = CheckpointWriter(), Gate()
    live = SavedState({"w": torch.randn(4096, 4096, device="cuda")}, {})
    before = live.weights["w"].cpu()
    saver.save_async(1, live, gate)
    for _ in range(20):
        live.weights["w"].mul_(1.01)
    gate.open.set()
    assert saver.wait() is None
    assert torch.equal(gate.written[0].weights["w"], before)
