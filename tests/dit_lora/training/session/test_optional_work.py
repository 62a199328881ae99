"""What only looks at a run costs a message and never the run."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.numerics.memory import convert_to_out_of_memory_error, is_out_of_memory
from dit_lora.training.session.optional_work import OptionalWorkRunner, to_dit_lora_error

OF_HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(OF_HOST)]


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def optional(said: list[str]) -> OptionalWorkRunner:
    return OptionalWorkRunner(lambda value: [value], said.append)


def test_what_succeeds_is_given_and_not_told(optional: OptionalWorkRunner, said: list[str]) -> None:
    assert optional.run_optional_work("samples", 2, lambda: 7) == 7
    assert said == optional.format_lines() == []


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_after_out_of_memory_the_part_is_not_tried_again(
    optional: OptionalWorkRunner, said: list[str], error: Exception
) -> None:
    assert optional.run_optional_work("samples", 2, raising(error)) is None
    optional.run_optional_work("samples", 4, lambda: pytest.fail("tried again"))
    assert optional.run_optional_work("eval losses", 4, lambda: 0.5) == 0.5
    assert said == ["warning: step 2: samples are skipped from here on: out of memory; training continues"]
    assert optional.format_lines() == ["skipped: samples of steps 2, 4: out of memory"]


def test_any_other_failure_is_tried_again_at_the_next_step(optional: OptionalWorkRunner, said: list[str]) -> None:
    optional.run_optional_work("samples", 2, raising(OSError(28, "No space left on device")))
    assert optional.run_optional_work("samples", 4, lambda: 1) == 1
    optional.run_optional_work("samples", 6, raising(KeyError("odd")))
    assert said == [
        "warning: step 2: samples are skipped this time: "
        "OSError: [Errno 28] No space left on device; training continues",
        "warning: step 6: samples are skipped this time: KeyError: 'odd'; training continues",
    ]
    (line,) = optional.format_lines()
    assert line.startswith("skipped: samples of steps 2, 6: OSError")


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteError("stop", {}),
        InterruptedRunError("stop", 130),
        torch.AcceleratorError("the device has failed"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_training_passes(optional: OptionalWorkRunner, error: BaseException) -> None:
    with pytest.raises(type(error)):
        optional.run_optional_work("samples", 2, raising(error))


def test_a_failure_of_another_rank_counts_on_this_one(said: list[str]) -> None:
    shared: list[Any] = []

    def share(own: Any) -> list[Any]:
        shared.append(own)
        return [own, ("out of memory", True)]

    optional = OptionalWorkRunner(share, said.append)
    assert optional.run_optional_work("samples", 2, lambda: 7) is None
    optional.run_optional_work("samples", 4, lambda: pytest.fail("tried again"))
    # No rank goes into the second exchange.
    assert shared == [None]
    assert optional.format_lines() == ["skipped: samples of steps 2, 4: out of memory"]


def test_what_others_cannot_be_told_of_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward pass that needs all ranks, they wait where this one has failed."""
    optional = OptionalWorkRunner(lambda value: pytest.fail("the others are elsewhere"), lambda line: None)
    monkeypatch.setattr(OptionalWorkRunner, "_is_distributed", lambda self: True)
    with pytest.raises(MemoryError):
        optional.run_optional_work("samples", 2, raising(MemoryError()), is_collective=True)
    agreed = DitLoraError("all ranks know")
    agreed.collective = True
    single_rank = OptionalWorkRunner(lambda value: [value, value], lambda line: None)
    assert single_rank.run_optional_work("samples", 2, raising(agreed), is_collective=True) is None


def test_what_did_not_fit_is_let_go_before_training_goes_on(optional: OptionalWorkRunner) -> None:
    class Big:
        """Part of a circle, as a pipeline is."""

        def __init__(self) -> None:
            self.own = self

    recorded = []

    def work() -> None:
        big = Big()
        recorded.append(weakref.ref(big))
        raise MemoryError

    optional.run_optional_work("samples", 2, work)
    assert recorded[0]() is None


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_of_the_host_is_told_as_that_of_a_device(error: Exception) -> None:
    assert is_out_of_memory(to_dit_lora_error(error))
    with pytest.raises(torch.OutOfMemoryError), convert_to_out_of_memory_error():
        raise error


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"), convert_to_out_of_memory_error():
        raise RuntimeError("shapes differ")
