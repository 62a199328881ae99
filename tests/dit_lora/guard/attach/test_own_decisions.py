"""Loops that decide about a step themselves: own checks, own errors, optimizers inside the backward."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_helpers import bad_batch, batch, causes, everything, fresh_accelerator, same, spoil_once
from torch import nn
from torch.utils.data import DataLoader

from dit_lora.guard.attach.guard import Guard


class Loop:
    """A loop that leaves out a step whose norm is too large, by a comparison that NaN passes."""

    def __init__(self, *, accelerated: bool, guarded: bool = True, sets_to_none: bool = True) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.model: Any = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.accelerator = fresh_accelerator() if accelerated else None
        self.guard: Guard | None = None
        if self.accelerator is not None:
            prepared = self.accelerator.prepare(self.model, self.optimizer)
            self.model, self.optimizer = prepared
        if guarded:
            self.guard = Guard.create(self.accelerator, [model], [self.optimizer])
        self.parameters = list(model.parameters())
        self.sets_to_none = sets_to_none
        self.moved: list[bool] = []
        """For each step that the loop asked for, whether it moved a weight."""

    def backward(self, loss: torch.Tensor) -> None:
        if self.accelerator is not None:
            self.accelerator.backward(loss)
        else:
            loss.backward()

    def clip(self) -> torch.Tensor:
        if self.accelerator is not None:
            return self.accelerator.clip_grad_norm_(self.parameters, 1.0)
        return nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def drop_gradients(self) -> None:
        if self.sets_to_none:
            self.optimizer.zero_grad()
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def step(self, x: torch.Tensor, target: float = 0.0, *, is_left_out: bool = False) -> None:
        self.backward((self.model(x) - target).square().mean())
        norm = self.clip()
        if is_left_out:
            assert not norm <= 1000
            self.drop_gradients()
            return
        before = everything([self.model], [])
        self.optimizer.step()
        self.drop_gradients()
        self.moved.append(not same(everything([self.model], []), before))

    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.parameters)


BOTH = pytest.mark.parametrize("accelerated", [False, True], ids=["plain", "accelerate"])
DROPS = pytest.mark.parametrize("sets_to_none", [True, False], ids=["None", "zeros"])


@BOTH
@DROPS
def test_a_bad_step_that_the_loop_leaves_out_says_nothing_about_the_next(
    accelerated: bool, sets_to_none: bool
) -> None:
    loops = []
    for guarded in (False, True):
        loop = Loop(accelerated=accelerated, guarded=guarded, sets_to_none=sets_to_none)
        loops.append(loop)
        loop.step(batch(1))
        loop.step(bad_batch(2), is_left_out=True)
        loop.step(batch(3))
        loop.step(bad_batch(4), is_left_out=True)
        loop.step(batch(5))
        assert loop.moved == [True] * 3
    unguarded, watched = loops
    assert same(everything([unguarded.model], []), everything([watched.model], []))
    assert watched.guard is not None
    assert watched.guard.events == []
    assert watched.guard.format_summary() is None


@BOTH
@DROPS
def test_a_large_norm_that_the_loop_leaves_out_does_not_hide_a_bad_gradient_after_it(
    accelerated: bool, sets_to_none: bool
) -> None:
    loop = Loop(accelerated=accelerated, sets_to_none=sets_to_none)
    loop.step(batch(1))
    loop.step(batch(2), target=1e4, is_left_out=True)
    spoil_once(loop.parameters[0], torch.nan)
    loop.step(batch(3))
    loop.step(batch(4))
    assert loop.moved == [True, False, True]
    assert loop.is_finite()
    assert loop.guard is not None
    (event,) = loop.guard.events
    assert (event["verdict"]["cause"], event["action"]) == ("transient", "skip")
    assert "the gradient of 0.weight was not finite" in event["verdict"]["words"]


@BOTH
def test_a_bad_micro_batch_is_seen_though_each_of_them_is_clipped(accelerated: bool) -> None:
    loop = Loop(accelerated=accelerated)
    for number, spoiled in enumerate([None, 0, 1, None]):
        for micro_batch in range(2):
            x = (bad_batch if micro_batch == spoiled else batch)(10 * number + micro_batch)
            loop.backward(loop.model(x).square().mean())
            loop.clip()
        before = everything([loop.model], [])
        loop.optimizer.step()
        loop.drop_gradients()
        assert same(everything([loop.model], []), before) is (spoiled is not None)
    assert loop.guard is not None
    actual = [(event["verdict"]["cause"], event["sample_ids"]) for event in loop.guard.events]
    assert actual == [("inputs", [f"row 1 of micro-batch {number}"]) for number in (0, 1)]


@BOTH
def test_gradients_of_a_skipped_step_are_left_as_they_are(accelerated: bool) -> None:
    loop = Loop(accelerated=accelerated)
    loop.backward(loop.model(bad_batch(1)).square().mean())
    loop.optimizer.step()
    assert all(p.grad is not None and bool(p.grad.isnan().any()) for p in loop.parameters)


def test_zeros_that_clipping_makes_of_an_infinite_norm_are_no_lost_gradient() -> None:
    """They belong to another optimizer: its step is taken, and only the bad gradient is reported."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(3, 1)]
    model = nn.Sequential(*layers)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    guard = Guard.watch(model, optimizers)
    spoil_once(layers[0].weight, torch.inf)
    model(batch(0)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    (event,) = guard.events
    assert (event["kind"], event["action"]) == ("non_finite_gradient", "skip")
    assert "the gradient of 0.weight was not finite" in event["verdict"]["words"]


def test_a_step_without_a_backward_of_its_own_lacks_no_gradient() -> None:
    """As at the end of an epoch, for what gradient accumulation may have left over."""
    loop = Loop(accelerated=False)
    assert loop.guard is not None
    loop.step(batch(0))
    loop.optimizer.step()
    loop.step(batch(1))
    assert loop.guard.events == []


def test_the_loss_of_a_model_that_is_not_watched_is_not_the_loops() -> None:
    """For example a probe that trains in the same process as the model."""
    torch.manual_seed(0)
    model, probe = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard.watch(model, optimizer)
    for number in range(3):
        probe(bad_batch(number)).square().mean().backward()
        probe.zero_grad()
        before = everything([model], [])
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
        assert not same(everything([model], []), before)
    assert guard.events == []


def bad_items() -> DataLoader[torch.Tensor]:
    items = [batch(number, 1)[0] for number in range(8)]
    items[5][1] = torch.nan
    return DataLoader(items, batch_size=2)  # type: ignore[arg-type]


def raises_by_itself(loss: torch.Tensor, model: nn.Module) -> None:
    """As `error_if_nonfinite` does, which finds NaN before the optimizer's step."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("anomaly", [False, True], ids=["error_if_nonfinite", "anomaly mode"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_the_sample_is_named_before_torch_raises(anomaly: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard.watch(model, optimizer)
    num_steps = 0

    def run() -> None:
        nonlocal num_steps
        for x in bad_items():
            optimizer.zero_grad()
            raises_by_itself(model(x).square().mean(), model)
            optimizer.step()
            num_steps += 1

    message = "returned nan values" if anomaly else "for gradients .* is non-finite"
    with (
        caplog.at_level(logging.WARNING, logger="dit_lora"),
        torch.autograd.set_detect_anomaly(anomaly, check_nan=True),
        pytest.raises(RuntimeError, match=message) as error,
    ):
        run()
    assert type(error.value) is RuntimeError
    assert num_steps == 2
    (event,) = guard.events
    assert (event["step"], event["verdict"]["cause"]) == (3, "data")
    assert event["sample_ids"] == ["dataset index 5"]
    head, sample = caplog.messages[-1].split("\n  - ")
    assert head.endswith("torch raises an error for this step")
    assert sample.startswith("dataset index 5: argument 0 has 1 NaN")


def test_a_loop_that_catches_torchs_error_goes_on_as_without_a_guard() -> None:
    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = Guard.watch(model, optimizer) if guarded else None
        for _ in range(2):
            for x in bad_items():
                optimizer.zero_grad()
                try:
                    raises_by_itself(model(x).square().mean(), model)
                except RuntimeError:
                    continue
                optimizer.step()
        results.append(everything([model], [optimizer]))
        if guard is not None:
            assert [event["sample_ids"] for event in guard.events] == [["dataset index 5"]] * 2
    assert same(*results)


@pytest.mark.parametrize("named", [False, True])
def test_an_index_out_of_range_keeps_its_type_and_message(named: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 1))
    with pytest.raises(IndexError) as unguarded_error:
        model(torch.tensor([3, 9]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard.watch(model, optimizer)

    def run() -> None:
        if not named:
            model(torch.tensor([3, 9]))
        with guard.microbatch(["a.txt", "b.txt"]):
            model(torch.tensor([3, 9]))

    with (
        caplog.at_level(logging.WARNING, logger="dit_lora"),
        pytest.raises(IndexError) as guarded_error,
    ):
        run()
    assert type(guarded_error.value) is type(unguarded_error.value)
    assert str(guarded_error.value) == str(unguarded_error.value)
    messages = ["guard: no table of the model has these indices\n  - b.txt: argument 0 has 9, 0 has 0..6"]
    assert caplog.messages == (messages if named else [])


class OptimizersInTheBackward:
    """An optimizer for each weight, which steps and drops the gradient as soon as it is there."""

    def __init__(self, optimizer_of: Callable[..., Any], *, guarded: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizers = {p: optimizer_of([p], lr=0.05) for p in self.model.parameters()}
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self.step_of)
        optimizers = list(self.optimizers.values())
        self.guard = Guard.watch(self.model, optimizers) if guarded else None

    def step_of(self, parameter: nn.Parameter) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def train(self, x: torch.Tensor) -> list[bool]:
        """Whether each weight moved."""
        before = everything([self.model], [])
        self.model(x).square().mean().backward()
        return [not torch.equal(*pair) for pair in zip(before, self.model.parameters(), strict=True)]


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_inside_the_backward_is_judged_by_its_own_gradient(
    optimizer_of: Callable[..., Any],
) -> None:
    unguarded = OptimizersInTheBackward(optimizer_of, guarded=False)
    loop = OptimizersInTheBackward(optimizer_of, guarded=True)
    assert loop.guard is not None
    for number in range(3):
        assert loop.train(batch(number)) == unguarded.train(batch(number)) == [True] * 4
    assert same(everything([loop.model], []), everything([unguarded.model], []))
    assert loop.guard.events == []
    # Backward comes to the first layer last, when the others have stepped.
    spoil_once(next(loop.model.parameters()), torch.nan)
    assert loop.train(batch(3)) == [False, True, True, True]
    assert causes(loop.guard.events) == [("transient", "skip")]
    assert loop.train(bad_batch(4)) == [False] * 4
    assert loop.train(batch(5)) == [True] * 4
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    # A step that some of the optimizers have taken is counted once.
    assert loop.guard.format_summary() == "2 of 6 optimizer steps were not taken"
