"""The loop on a model small enough to check by hand."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from launching import on_ranks
from small_loop import (
    FakeRecovery,
    TrippedError,
    batches,
    build,
    equal,
    failing_first,
    losses_of,
    run,
    state_of,
    with_callbacks,
)
from torch import distributed, nn

from dit_lora.data.loading.batch import Batch
from dit_lora.guard.finite_gate import BadStateError
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams, draw_integers
from dit_lora.training.loop import TrainingLoopComponents, train
from dit_lora.training.step import StepResult


def fake(loop: TrainingLoopComponents) -> FakeRecovery:
    assert isinstance(loop.recovery, FakeRecovery)
    return loop.recovery


def spoiled_at(calls: Mapping[int, float], seen: list[int]) -> Callable:
    """Losses; those of some calls, counted from 1, are multiplied by a value."""

    def losses(model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
        seen.append(len(seen) + 1)
        output = losses_of(model, batch, streams)
        return output._replace(losses=output.losses * calls.get(len(seen), 1.0))

    return losses


def test_gradients_reach_the_optimizer_clipped_and_are_reported_unclipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = build(clip=0.01)
    recorded = []
    inner = loop.engine.optimizer.optimizer
    step = inner.step

    def spy(*arguments: Any) -> None:
        grads = [p.grad for group in inner.param_groups for p in group["params"]]
        recorded.append(torch.nn.utils.get_total_norm(grads).item())
        step(*arguments)

    monkeypatch.setattr(inner, "step", spy)
    results = run(loop, 2, batches(2))
    assert recorded == pytest.approx([0.01, 0.01], rel=1e-3)
    assert all(result.grad_norm > 0.05 for result in results)
    assert results[0].grad_norm_groups["adapter"] == pytest.approx(results[0].grad_norm)


def test_every_micro_step_and_rank_seeds_dropout_anew_and_repeats_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(seeds: list[int]) -> Callable:
        def losses(model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
            seeds.append(torch.initial_seed())
            return losses_of(model, batch, streams)

        return losses

    first_run: list[int] = []
    second_run: list[int] = []
    run(build(accumulate=3, losses=record(first_run)), 2, batches(6))
    torch.manual_seed(99)
    run(build(accumulate=3, losses=record(second_run)), 2, batches(6))
    assert len(set(first_run)) == 6
    assert first_run == second_run

    other_rank: list[int] = []
    monkeypatch.setattr(Accelerator, "process_index", 1)
    run(build(accumulate=3, losses=record(other_rank)), 2, batches(6))
    assert not set(first_run) & set(other_rank)


def test_a_result_tells_every_samples_loss_and_timestep() -> None:
    (result,) = run(build(accumulate=2), 1, batches(2))
    expected = draw_integers(0, 1000, RandomStreams(7, range(4))("timestep")).tolist()
    assert result.timesteps == expected
    assert len(result.losses) == 4
    assert result.loss == pytest.approx(sum(result.losses) / 4)
    assert result.lr_groups == {"adapter": 0.1}
    assert result.seconds > result.data_seconds > 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_loss_leaves_weights_and_moments_and_the_step_is_taken_again(value: float) -> None:
    """In the second step's second micro-step; afterwards the run is the one without the fault, bit for bit."""
    recorded: list[int] = []
    loop = build(accumulate=2, losses=spoiled_at({4: value}, recorded), answers=[1])
    states: list[list[torch.Tensor]] = []
    recover = fake(loop).recover

    def spy(*arguments: Any) -> int:
        states.append(state_of(loop))
        assert all(p.grad is None for p in loop.engine.model.parameters())
        return recover(*arguments)

    fake(loop).recover = spy  # type: ignore[method-assign]
    after: dict[int, list[torch.Tensor]] = {}
    results = run(loop, 3, batches(6), on_step=lambda r: after.update({r.step: state_of(loop)}))
    assert equal(states[0], after[1])
    assert [result.step for result in results] == [1, 2, 3]
    assert fake(loop).trips == [(2, "non_finite_loss", ((0, 1),))]
    assert fake(loop).ids == [[("2-0", "2-1"), ("3-0", "3-1")]]
    clean = build(accumulate=2)
    expected = run(clean, 3, batches(6))
    assert equal(state_of(loop), state_of(clean))
    assert [r.losses for r in results] == [r.losses for r in expected]


def test_the_control_is_the_last_micro_batch_of_the_last_healthy_step() -> None:
    """Not one of the step that was under way when the trip was read."""
    faults = {"0-0": torch.nan, "4-0": torch.nan}
    loop = build(accumulate=2, losses=failing_first(faults), answers=[0, 2])
    run(loop, 4, batches(8))
    first_run, second = fake(loop).controls
    assert first_run is None
    assert second is not None
    assert (second.step, second.micro_step, second.ids) == (2, 1, ("3-0", "3-1"))


def test_going_back_several_steps_takes_each_of_them_again() -> None:
    recorded: list[int] = []
    loop = build(losses=spoiled_at({3: torch.nan}, recorded), answers=[0])
    results = run(loop, 4, batches(4))
    assert [result.step for result in results] == [1, 2, 1, 2, 3, 4]
    assert fake(loop).controls[0].step == 2  # type: ignore[union-attr]


def test_data_that_was_read_bad_trips_though_its_loss_is_finite() -> None:
    """A cached embedding of 1e30 that a norm layer scales away must not train."""
    data = batches(2)
    data[1] = replace(data[1], faults={"1-0": "reaches 1e+30"})
    loop = build()
    before: dict[int, list[torch.Tensor]] = {}
    with pytest.raises(TrippedError):
        run(loop, 2, data, on_step=lambda r: before.update({r.step: state_of(loop)}))
    assert fake(loop).trips == [(2, "bad_data", ((0, 0),))]
    assert equal(state_of(loop), before[1])


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


@pytest.mark.parametrize(
    ("factor", "kind"),
    [
        (torch.nan, "non_finite_gradient"),
        (torch.inf, "non_finite_gradient"),
        (0.0, "zero_gradient"),
    ],
)
def test_a_bad_gradient_under_a_finite_loss_trips_and_moves_nothing(factor: float, kind: str) -> None:
    """Of zero gradients too: AdamW would still decay moments and weights."""

    def losses(model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
        output = losses_of(model, batch, streams)
        worst = factor if batch.ids[0] == "1-0" else 1.0
        return output._replace(losses=_Backward.apply(output.losses, worst))

    loop = build(losses=losses)
    before: dict[int, list[torch.Tensor]] = {}
    with pytest.raises(TrippedError):
        run(loop, 2, batches(2), on_step=lambda r: before.update({r.step: state_of(loop)}))
    assert fake(loop).trips == [(2, kind, ())]
    assert equal(state_of(loop), before[1])


def test_a_step_in_which_some_groups_have_no_gradient_is_taken() -> None:
    """A vision encoder has none in a step of texts. Only a step without any gradient is refused."""
    loop = build(groups={"adapter": ("weight",), "backbone": ("bias",)})
    model = loop.engine.unwrapped_model
    model.bias.register_hook(torch.zeros_like)
    weight = model.weight.detach().clone()
    (result,) = run(loop, 1, batches(1))
    assert result.grad_norm_groups["adapter"] > 0
    assert result.grad_norm_groups["backbone"] == 0
    assert not torch.equal(model.weight, weight)
    assert fake(loop).trips == []


def test_a_weight_that_goes_bad_in_the_update_trips_in_the_same_step() -> None:
    """A moment went bad in memory: no loss and no gradient shows it."""
    loop = build()
    inner = loop.engine.optimizer.optimizer

    def poison(result: StepResult) -> None:
        inner.state[next(iter(loop.engine.model.parameters()))]["exp_avg"].view(-1)[0] = torch.nan

    recorded: list[int] = []
    with pytest.raises(TrippedError):
        run(loop, 3, batches(3), on_step=lambda r: (recorded.append(r.step), poison(r))[0])
    assert recorded == [1]
    assert fake(loop).trips == [(2, "non_finite_weights", ())]


def test_a_state_that_is_not_worth_keeping_is_a_trip_of_its_step() -> None:
    """The caller found it after a healthy step, where it was about to save."""

    def refuse(result: StepResult) -> None:
        if result.step == 2 and not fake(loop).trips:
            raise BadStateError("lost", "diverged_weights")

    loop = build(accumulate=2, answers=[0])
    results = run(loop, 3, batches(6), on_step=refuse)
    assert fake(loop).trips == [(2, "diverged_weights", ())]
    assert fake(loop).ids == [[("2-0", "2-1"), ("3-0", "3-1")]]
    assert fake(loop).controls[0].step == 1  # type: ignore[union-attr]
    assert [result.step for result in results] == [1, 1, 2, 3]


def test_the_watcher_bounds_a_groups_gradients_before_the_recipes_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = build(clip=None)
    monkeypatch.setattr(loop.watcher, "get_clip_bound", lambda group: {"adapter": 0.25}[group])
    inner = loop.engine.optimizer.optimizer
    step, recorded = inner.step, []

    def spy(*arguments: Any) -> None:
        recorded.append(torch.nn.utils.get_total_norm([p.grad for p in loop.engine.model.parameters()]).item())
        step(*arguments)

    monkeypatch.setattr(inner, "step", spy)
    (result,) = run(loop, 1, batches(1))
    assert recorded == pytest.approx([0.25], rel=1e-3)
    assert result.grad_norm > 0.5


def test_the_watcher_is_called_in_the_order_that_the_loop_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, order = build(accumulate=2), []

    def note(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            order.append(name)
            return inner(*arguments)

        monkeypatch.setattr(owner, name, called)

    for name in (
        "record_forward_outputs", "collect_gradient_statistics", "get_clip_bound", "before_update", "after_update",
    ):  # fmt: skip
        note(loop.watcher, name)
    note(loop.engine.optimizer.optimizer, "step")
    run(loop, 1, batches(2))
    assert order == [
        "record_forward_outputs",
        "collect_gradient_statistics",
        "get_clip_bound",
        "before_update",
        "step",
        "after_update",
    ]


def test_a_stop_code_reaches_the_result() -> None:
    loop, results = build(), []
    asked = with_callbacks(loop, batches=lambda step: batches(1), stop_code=143, on_result=results.append)
    train(asked, start_step=0, steps=1)
    assert results[0].stop_code == 143


def test_batches_are_asked_for_from_where_training_goes_on() -> None:
    requests: list[int] = []
    recorded: list[int] = []
    loop = build(losses=spoiled_at({3: torch.nan}, recorded), answers=[1])
    data = batches(4)

    def given(step: int) -> Iterator[Batch]:
        requests.append(step)
        return iter(data[step:])

    train(with_callbacks(loop, batches=given), start_step=0, steps=4)
    assert requests == [0, 1]


def collectives(steps: int) -> list[list[str]]:
    """What a rank calls in each healthy step of two micro-steps, apart from DDP's own buckets."""
    loop, calls = build(accumulate=2), []
    by_step: list[list[str]] = []

    def noted(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(name)
        return call(*args, **options)

    kinds = ("all_", "broadcast", "reduce", "gather", "barrier", "scatter", "send", "recv")
    with ExitStack() as patches:
        for name, call in [*vars(distributed).items()]:
            if name.startswith(kinds):
                patch = mock.patch.object(distributed, name, partial(noted, name, call))
                patches.enter_context(patch)

        def note(result: StepResult) -> None:
            by_step.append(calls.copy())
            calls.clear()

        run(loop, steps, batches(2 * steps), on_step=note)
    return by_step


def test_a_healthy_step_has_one_all_reduce_of_a_flag_and_one_gather() -> None:
    assert on_ranks(2, collectives, 3) == [[["all_reduce", "all_gather"]] * 3] * 2
