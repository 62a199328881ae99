"""What the guard does in a step: with a scaler, a closure, zero gradients, in plain PyTorch."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import on_ranks
from loop_helpers import bad_batch, batch, causes, everything, fresh_accelerator, same
from torch import nn

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.finite_checks import CHECKS
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.finite_gate import NonFiniteError


def test_a_bad_loss_in_fp16_leaves_schedule_and_weights_as_they_were() -> None:
    """Clipping unscales before the loss is judged. The scaler skips the step and halves its scale, as unguarded."""
    accelerator = fresh_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(4, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer, schedule = accelerator.prepare(plain, schedule)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(1, 6):
        before, rate = everything([model], [optimizer]), schedule.get_last_lr()
        accelerator.backward(model((bad_batch if number in (2, 3) else batch)(number)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        is_bad = number in (2, 3)
        assert same(everything([model], [optimizer]), before) is is_bad
        assert (schedule.get_last_lr() == rate) is is_bad
    assert accelerator.scaler.get_scale() == 2.0
    assert causes(guard.events) == [("inputs", "skip")] * 2


def plain_loop(optimizer_of: Callable[..., Any], steps: int, guarded: bool, **how: Any) -> Any:
    """A closure each step, in plain PyTorch; NaN in the steps of `bad`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = optimizer_of(model.parameters())
    guard = Guard.attach(None, model, optimizer) if guarded else None
    states = []
    for number in range(steps):
        x = bad_batch(number) if number in how.get("bad", ()) else batch(number)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        returned = optimizer.step(closure)
        assert torch.is_tensor(returned)
        states.append(everything([model], [optimizer]))
    return states, guard


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_judged_after_it_ran_and_a_healthy_run_is_bit_for_bit_as_without(
    name: str,
) -> None:
    bare, _ = plain_loop(OPTIMIZERS[name], 5, guarded=False)
    guarded, guard = plain_loop(OPTIMIZERS[name], 5, guarded=True)
    assert guard.events == []
    assert all(same(weight, other_weight) for weight, other_weight in zip(bare, guarded, strict=True))
    states, guard = plain_loop(OPTIMIZERS[name], 5, guarded=True, bad=(2,))
    assert causes(guard.events) == [("inputs", "skip")]
    weights = [[t for t in state if t.dtype is torch.float32][:4] for state in states]
    assert same(weights[2], weights[1])
    assert not same(weights[3], weights[2])


@pytest.mark.parametrize("guarded", [False, True])
def test_a_closure_that_goes_bad_after_weights_were_moved_goes_back_to_a_snapshot(
    guarded: bool,
) -> None:
    """The optimizer deals with a bad trial itself, and runs the closure as often as it does without the guard."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    start = everything([model], [])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    guard = Guard.attach(None, model, optimizer) if guarded else None
    evaluations: list[int] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        evaluations.append(1)
        loss = model(bad_batch(0) if len(evaluations) == 3 else batch(0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(evaluations) == 4
    assert same(everything([model], []), start) is guarded
    if guard is not None:
        assert [event["weights_of_step"] for event in guard.events] == [0]


def test_a_plain_loop_is_guarded_without_accelerate(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard.attach(None, model, optimizer, lr_scheduler=schedule)
    for number in range(4):
        before, rate = everything([model], [optimizer]), schedule.get_last_lr()
        loss = model(bad_batch(number) if number == 2 else batch(number)).square().mean()
        optimizer.zero_grad()  # between forward and backward, as many loops have it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        assert same(everything([model], [optimizer]), before) is (number == 2)
        assert (schedule.get_last_lr() == rate) is (number == 2)
    assert causes(guard.events) == [("inputs", "skip")]
    assert guard.events[0]["sample_ids"] == ["row 1 of micro-batch 0"]
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        guard.detach()
    assert "1 of 4 optimizer steps were not taken" in caplog.text


@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_loops_own_scaler_finds_its_scale_unhindered(fused: bool) -> None:
    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38, growth_interval=2)
        guard = Guard.attach(None, model, optimizer) if guarded else None
        for number in range(8):
            scaler.scale(model(batch(number)).square().sum() * 8).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*everything([model], [optimizer]), torch.tensor(scaler.get_scale())])
        # One call is held, until the next begins.
        assert guard is None or (guard.events == [] and len(guard._watched.log.calls) == 1)
    assert results[0][-1] < 1e38
    assert same(*results)


def test_zero_gradients_that_the_loss_asks_for_are_taken_as_without_a_guard() -> None:
    """GRPO with equal rewards: the advantages, and so loss and gradient, are 0; AdamW still moves."""
    results = []
    for guarded in (False, True):
        accelerator, model = fresh_accelerator(), nn.Linear(4, 2, dtype=torch.float32)
        with torch.no_grad():
            model.weight.fill_(0.3)
            model.bias.fill_(0.1)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        guard = Guard.attach(accelerator, model, optimizer) if guarded else None
        for number in range(30):
            advantage = float(number == 0)
            constant = 1.0 if number > 15 else 0.0  # a loss that says nothing and is not 0
            accelerator.backward((model(batch(number)) * advantage).sum() + constant)
            optimizer.step()
            optimizer.zero_grad()
        results.append(everything([model], [optimizer]))
        assert guard is None or guard.events == []
    assert same(*results)


class Cut(nn.Linear):
    """A backward that gives zeros while `is_cut`."""

    is_cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad and self.is_cut:
            y.register_hook(torch.zeros_like)
            return y * 1.0
        return y


def cut_loop(steps: int, is_cut: Callable[[int], bool], **how: Any) -> Guard:
    accelerator, model = fresh_accelerator(), Cut(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    guard = Guard.attach(accelerator, model, optimizer, **how)
    for number in range(steps):
        model.is_cut = is_cut(number)
        accelerator.backward((model(batch(number)) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return guard


def test_gradients_that_are_lost_are_reported_and_end_a_run_only_if_the_ladder_has_a_stop(
    tmp_path: Path,
) -> None:
    guard = cut_loop(60, lambda number: number % 3 == 0)
    assert {event["action"] for event in guard.events} == {"report"}
    assert len(guard.events) == 20
    guard = cut_loop(60, lambda number: number > 5)
    assert [event["step"] for event in guard.events] == [7, 16]  # the first in a row and the tenth
    assert guard._recovery.budget.num_taken == 60
    with pytest.raises(NonFiniteError, match="no gradient reached a trained weight in 11 steps"):
        cut_loop(60, lambda number: number > 5, folder=tmp_path, config=RecoveryConfig())


def test_each_check_can_be_turned_off() -> None:
    checks_without = {name: [check for check in CHECKS if check != name] for name in CHECKS}
    assert cut_loop(20, lambda _: True, checks=checks_without["zero_gradient"]).events == []
    kinds = []
    for checks in (CHECKS, checks_without["loss"], ["zero_gradient", "weights"], []):
        accelerator, model = fresh_accelerator(), nn.Linear(4, 2)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        guard = Guard.attach(accelerator, model, optimizer, checks=checks)
        for number in range(2):
            accelerator.backward(model(bad_batch(0) if not number else batch(0)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        kinds.append([event["kind"] for event in guard.events])
    # The loss is seen in any case; its check is about losses that leave every gradient finite.
    assert kinds == [["non_finite_loss"], ["non_finite_loss"], ["non_finite_weights"], []]
    with pytest.raises(DitLoraError, match="checks must be some of loss, gradient, zero_gradient"):
        Guard.attach(accelerator, model, optimizer, checks=["losses"])


@pytest.mark.parametrize("checks", [CHECKS, [name for name in CHECKS if name != "loss"]])
def test_a_bad_loss_with_finite_gradients_is_reported_unless_its_check_is_left_out(
    checks: list[str],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.watch(model, optimizer, checks=checks)
    before = everything([model], [])
    (model(batch(0)).square().mean() + torch.nan).backward()
    optimizer.step()
    assert not same(everything([model], []), before)
    reported = [(event["kind"], event["action"]) for event in guard.events]
    assert reported == ([("non_finite_loss", "report")] if "loss" in checks else [])
    assert guard.format_summary() is None


def train_with_a_bad_loss_on_rank_1() -> list[dict[str, Any]]:
    accelerator, model = fresh_accelerator(), nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(1, 4):
        loss = model(batch(number)).square().mean()
        is_bad = number == 2 and accelerator.process_index == 1
        accelerator.backward(loss + torch.nan if is_bad else loss)
        optimizer.step()
        optimizer.zero_grad()
    return guard.events


def test_a_bad_loss_of_a_rank_with_finite_gradients_is_reported_on_all() -> None:
    for events in on_ranks(2, train_with_a_bad_loss_on_rank_1):
        (event,) = events
        assert (event["step"], event["kind"], event["action"]) == (2, "non_finite_loss", "report")
        assert event["rank"] == 1


@pytest.mark.parametrize(
    ("optimizer_of", "dtype", "scale", "is_skipped"),
    [
        (torch.optim.AdamW, torch.float32, 1e25, True),
        (torch.optim.AdamW, torch.float64, 1e25, False),
        (torch.optim.SGD, torch.float32, 1e25, False),
        (torch.optim.AdamW, torch.float32, 1e-30, False),
    ],
)
def test_a_gradient_is_bad_if_the_optimizer_squares_it_to_infinity(
    optimizer_of: Callable[..., Any], dtype: torch.dtype, scale: float, is_skipped: bool
) -> None:
    accelerator, model = fresh_accelerator(), nn.Linear(4, 2, dtype=dtype)
    optimizer = accelerator.prepare(optimizer_of(model.parameters(), lr=1e-3))
    guard = Guard.attach(accelerator, model, optimizer)
    before = everything([model], [])
    accelerator.backward(model(batch(0).to(dtype)).mean() * scale)
    optimizer.step()
    assert same(everything([model], []), before) is is_skipped
    assert causes(guard.events) == ([("unknown", "skip")] if is_skipped else [])
    if is_skipped:
        message = guard.events[0]["verdict"]["words"]
        assert message.startswith("the gradient from the loss reaches 1.67e+24, whose")


class Timed(nn.Linear):
    """Fails late in the schedule, whatever the sample is."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.where(timestep > 900, torch.nan, 1.0)[:, None]


@pytest.mark.parametrize("rows", [1, 3])
def test_what_depends_on_the_timestep_is_not_called_data(rows: int) -> None:
    accelerator, model = fresh_accelerator(), Timed(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(4):
        timesteps = torch.full((rows,), 100)
        timesteps[-1] = 950 if number == 2 else 100
        accelerator.backward(model(batch(number, rows), timestep=timesteps).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    (event,) = guard.events
    assert (event["verdict"]["cause"], event["action"]) == ("inputs", "skip")
    assert event["sample_ids"] == [f"row {rows - 1} of micro-batch 0"]


def test_a_loss_that_the_loop_itself_overflows_is_no_chance_and_no_samples() -> None:
    """Squares beyond fp16 are made after the model: replays of it are healthy, and say nothing."""
    accelerator = fresh_accelerator()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    guard = Guard.attach(accelerator, model, optimizer)
    for number in range(1, 5):
        before = everything([model], [optimizer])
        scale = 1e4 if number == 3 else 1.0
        loss = (model(batch(number)) * scale).half().square().mean()
        assert bool(loss.isfinite()) is (number != 3)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # Gradients are finite, so that the step is taken as without a guard.
        assert not same(everything([model], [optimizer]), before)
        assert guard.format_summary() is None
    (event,) = guard.events
    assert (event["step"], event["kind"], event["action"]) == (3, "non_finite_loss", "report")
    assert event["verdict"]["cause"] == "unknown"
    assert event["sample_ids"] == []
