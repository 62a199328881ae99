"""A step's metrics are read one step late: work in flight, which rank finds a fault, and handling of errors."""

import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from launching import on_ranks
from small_loop import TrippedError, batches, build, equal, failing_first, run, state_of, with_callbacks
from torch import distributed

from dit_lora.data.loading.batch import Batch
from dit_lora.training.loop import TrainingLoopComponents, max_resident_micro_batches, train
from dit_lora.training.step import StepResult
from dit_lora.training.step_metrics import PendingMetrics

_KEPT: list[TrainingLoopComponents] = []


def in_flight(loop: TrainingLoopComponents, patch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a step in order; for a row that is read, also whether gradients of the next step exist."""
    order: list[str] = []
    forward, read, number = loop.watcher.record_forward_outputs, PendingMetrics.read_gathered_metrics, [0]

    def launched(step: int) -> Any:
        number[0] = step
        order.append(f"launch {step}")
        return forward(step)

    def noted(rows: PendingMetrics) -> Any:
        queued = all(p.grad is not None for p in loop.engine.model.parameters())
        order.append(f"read before update {number[0]}" if queued else f"read {number[0]}")
        return read(rows)

    inner = loop.engine.optimizer.optimizer
    step = inner.step

    def updated(*arguments: Any) -> None:
        order.append(f"update {number[0]}")
        step(*arguments)

    patch.setattr(loop.watcher, "record_forward_outputs", launched)
    patch.setattr(PendingMetrics, "read_gathered_metrics", noted)
    patch.setattr(inner, "step", updated)
    return order


def test_a_step_is_read_once_the_next_ones_gradients_are_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps are in flight, unless a step is one to be read at once; the last one is."""
    loop = with_callbacks(build(accumulate=2), sync_after=lambda step: step == 3)
    order = in_flight(loop, monkeypatch)
    results = run(loop, 5, batches(10))
    assert order == [
        *("launch 1", "update 1"),
        *("launch 2", "read before update 2", "update 2"),
        *("launch 3", "read before update 3", "update 3", "read 3"),
        *("launch 4", "update 4"),
        *("launch 5", "read before update 5", "update 5", "read 5"),
    ]
    assert [result.step for result in results] == [1, 2, 3, 4, 5]


def test_whoever_follows_a_run_finds_the_state_that_its_step_left() -> None:
    """Read late or at once, on_step sees the same weights and moments, and the run is the same bits."""
    captured: list[list[list[torch.Tensor]]] = []
    for late in (False, True):
        loop = with_callbacks(build(accumulate=2), sync_after=lambda step, late=late: not late)
        states: list[list[torch.Tensor]] = []
        run(loop, 4, batches(8), on_step=lambda r, s=states, loop=loop: s.append(state_of(loop)))
        captured.append(states)
    assert len(captured[0]) == 4
    assert all(map(equal, *captured))
    assert not equal(captured[0][0], captured[0][1])


def test_an_error_in_the_next_step_comes_after_the_step_that_was_taken() -> None:
    """Whoever follows the run learns of the step first, as if it had been read at once."""
    recorded: list[int] = []
    loop = build(accumulate=2, losses=failing_first({"5-0": RuntimeError("no memory")}))
    with pytest.raises(RuntimeError, match="no memory"):
        run(loop, 4, batches(8), on_step=lambda result: recorded.append(result.step))
    assert recorded == [1, 2]


def failing_on(rank: int, faults: dict[str, Any]) -> tuple[str, list[int], list[int]]:
    """The end of a run of four steps, and which steps were followed or only recorded; faults are on one rank."""
    is_failing_rank = int(os.environ["RANK"]) == rank
    noted: list[int] = []
    followed: list[int] = []
    loop = build(accumulate=2, losses=failing_first(faults if is_failing_rank else {}))
    loop = with_callbacks(loop, log=lambda result: noted.append(result.step))
    try:
        run(loop, 4, batches(8), on_step=lambda result: followed.append(result.step))
    except (RuntimeError, TrippedError) as error:
        # As a process that ends: the other rank's collectives fail, and no barrier waits for both. The model is kept
        # until then: DDP's reducer frees the group with the GIL held, which a gloo thread may be waiting for.
        _KEPT.append(loop)
        distributed.destroy_process_group()
        return str(error), followed, noted
    return "none", followed, noted


def test_an_error_of_one_of_several_ranks_comes_after_the_step_that_was_taken_is_noted() -> None:
    """The other rank waits for it in this step's collectives, and hears only that it has ended."""
    for rank in (0, 1):
        results = on_ranks(2, failing_on, rank, {"5-0": RuntimeError("no memory")})
        assert results[rank] == ("no memory", [1], [2])
        other_result = results[1 - rank]
        assert other_result[0] not in ("none", "no memory")
        assert other_result[1:] == ([1], [2])


def test_a_tripped_step_is_not_noted_where_several_ranks_end() -> None:
    error, followed, noted = on_ranks(2, failing_on, 0, {"2-0": torch.nan, "5-0": RuntimeError("no memory")})[0]
    assert (error, followed, noted) == ("no memory", [1], [])


def test_a_row_that_never_arrives_is_waited_for_so_long_and_no_longer() -> None:
    class Event:
        def __init__(self, after: int) -> None:
            self.left = after

        def query(self) -> bool:
            self.left -= 1
            return self.left < 0

    def sent(after: int) -> PendingMetrics:
        return PendingMetrics(torch.zeros(1, 1), (1,), Event(after))  # type: ignore[arg-type]

    assert sent(3).wait_until_arrived(5.0)
    began = time.monotonic()
    assert not sent(10**6).wait_until_arrived(0.1)
    assert time.monotonic() - began >= 0.1
    assert PendingMetrics(torch.zeros(1, 1), (1,)).wait_until_arrived(0.0)


@pytest.mark.parametrize("where", ["4-0", "5-0"])
def test_an_error_in_a_step_that_followed_a_trip_is_not_raised(where: str) -> None:
    """That step was never to be: it is taken again after the recovery, from its first micro-step on."""
    faults = {"2-0": torch.nan, where: RuntimeError("of weights that went bad")}
    loop = build(accumulate=2, losses=failing_first(faults), answers=[1])
    results = run(loop, 4, batches(8))
    assert [result.step for result in results] == [1, 2, 3, 4]
    clean = build(accumulate=2)
    run(clean, 4, batches(8))
    assert equal(state_of(loop), state_of(clean))


def test_seconds_tile_the_run_and_a_wait_for_data_counts_with_its_step() -> None:
    def slow(step: int) -> Iterator[Batch]:
        for number, batch in enumerate(batches(8)[2 * step :], start=2 * step):
            if number == 5:  # of step 3, read while step 2 is not settled
                time.sleep(0.2)
            yield batch

    run(build(accumulate=2), 1, batches(2))  # what the first step of a process pays
    loop, results = build(accumulate=2), list[StepResult]()
    began = time.perf_counter()
    train(with_callbacks(loop, batches=slow, on_result=results.append), start_step=0, steps=4)
    elapsed_s = time.perf_counter() - began
    assert all(result.seconds > result.data_seconds > 0 for result in results)
    assert results[2].data_seconds > 0.2
    assert sum(result.seconds for result in results[:2]) < 0.2
    assert 0.2 < sum(result.seconds for result in results) <= elapsed_s


@pytest.mark.parametrize("accumulate", [1, 3])
def test_micro_batches_that_are_held_at_once_are_as_many_as_a_plan_counts(accumulate: int) -> None:
    loop, alive, max_alive = (
        build(accumulate=accumulate),
        weakref.WeakSet[torch.Tensor](),
        list[int](),
    )

    def fresh(_step: int) -> Iterator[Batch]:
        for batch in batches(5 * accumulate):
            tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
            alive.update(tensors.values())
            yield replace(batch, tensors=tensors)

    def counting(*args: Any) -> Any:
        max_alive.append(len(alive))
        return loop.loss_function(*args)

    counted = replace(with_callbacks(loop, batches=fresh), loss_function=counting)
    train(counted, start_step=0, steps=5)
    assert max_alive[0] == 1
    assert max(max_alive) == max_resident_micro_batches(accumulate)


def test_a_step_that_is_read_at_once_has_the_seconds_of_its_own_launch() -> None:
    """The one before it is read after that launch, which is not its own."""
    loop = build(accumulate=1)

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return loop.loss_function(*args)

    slowed = replace(with_callbacks(loop, sync_after=lambda step: step == 3), loss_function=slow)
    results = run(slowed, 5, batches(8))
    assert all(result.seconds > 0.05 for result in results)
