"""Loops that other frameworks write: closures that do nothing, optimizers in turns, autocast, scalers, schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora import RecoveryConfig
from dit_lora.guard import Guard, NonFiniteError


def rows(step: int, bad: int | None = None) -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    if step == bad:
        x[2, 1] = torch.nan
    return x


def finite(*modules: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for module in modules for p in module.parameters())


class Pair:
    """Two models in a row with an optimizer and a schedule each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(3, 5), nn.Linear(5, 1)
        self.optimizers = [
            torch.optim.SGD(self.enter.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.leave.parameters(), lr=0.1),
        ]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in self.optimizers]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x).tanh()).square().mean()

    def rates(self) -> list[float]:
        return [schedule.get_last_lr()[0] for schedule in self.schedules]


def test_micro_batches_that_were_accumulated_before_the_closure_are_a_part_of_the_step(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = Guard.watch(model, optimizer, folder=tmp_path)

    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for step in range(3):
        optimizer.zero_grad()
        backward(rows(2 * step, bad=2))
        optimizer.step(lambda step=step: backward(rows(2 * step + 1)))
    (event,) = guard.events
    assert event["sample_ids"] == ["row 2 of micro-batch 0"]
    assert event["verdict"]["cause"] == "inputs"  # no loader has handed it out
    assert finite(model)


def test_optimizers_whose_closures_do_nothing_share_one_step_and_its_schedules(
    tmp_path: Path,
) -> None:
    """Lightning's manual optimization gives every optimizer a closure."""
    pair = Pair()
    guard = Guard.watch(None, pair.optimizers, lr_scheduler=pair.schedules, folder=tmp_path)
    for step in range(1, 5):
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        pair.loss(rows(step, bad=2)).backward()
        before = [p.detach().clone() for p in pair.leave.parameters()]
        for optimizer in pair.optimizers:
            guard.before_clipping()
            optimizer.step(lambda: None)
        is_unchanged = all(map(torch.equal, before, pair.leave.parameters()))
        assert is_unchanged is (step == 2)
        for schedule in pair.schedules:
            schedule.step()
    # Both optimizers leave out the second step of the loop, for one reason.
    skipped = [(event["step"], event["sample_ids"]) for event in guard.events]
    assert skipped == [(2, ["row 2 of micro-batch 0"])]
    assert guard.step == 5
    assert guard.format_summary() == "1 of 4 optimizer steps were not taken"
    assert pair.rates() == pytest.approx([0.1 * 0.5**3] * 2)


@pytest.mark.parametrize("fault", ["sample", "weight"])
def test_weights_that_are_frozen_in_turns_stay_trained(fault: str, tmp_path: Path) -> None:
    """A GAN's optimizers step while the other's weights are frozen."""
    pair = Pair()
    guard = Guard.watch(None, pair.optimizers, lr_scheduler=pair.schedules, folder=tmp_path)
    for step in range(1, 6):
        if fault == "weight" and step == 4:
            pair.enter.weight.data[1, 2] = torch.nan
        for turn, optimizer in enumerate(pair.optimizers):
            pair.enter.requires_grad_(turn == 0)
            pair.leave.requires_grad_(turn == 1)
            optimizer.zero_grad()
            pair.loss(rows(step, bad=4 if fault == "sample" else None)).backward()
            optimizer.step()
            pair.schedules[turn].step()
    causes = [event["verdict"]["cause"] for event in guard.events]
    assert causes == (["inputs"] * 2 if fault == "sample" else ["weights"])
    pair.enter.requires_grad_(True)
    assert finite(pair.enter, pair.leave)
    # The weight was put back before the second turn.
    assert pair.rates() == pytest.approx([0.1 * 0.5**4, 0.1 * 0.5 ** (4 + (fault == "weight"))])
    guard.require_finite()


@pytest.mark.parametrize("scales", [False, True])
def test_a_call_under_autocast_is_replayed_under_it(scales: bool, tmp_path: Path) -> None:
    """Only in fp16 is the product beyond the range: a replay in fp32 would find nothing.

    The step is left out, as a scaler does by itself, and its sample is named.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scales)
    guard = Guard.watch(model, optimizer, scaler=scaler if scales else None, folder=tmp_path)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(rows(1))
    bad = rows(2)
    bad[3] = 6e4
    step(bad)
    step(rows(3))
    assert guard._recovery.budget.num_taken == 2
    (event,) = guard.events
    assert event["sample_ids"] == ["row 3 of micro-batch 0"]
    assert event["verdict"]["cause"] == "precision"
    assert "finite in fp32: the values exceed the range of the dtype" in event["verdict"]["words"]
    assert finite(model)


def test_a_loop_whose_every_sample_is_beyond_fp16_ends_and_blames_none(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    guard = Guard.watch(model, optimizer, folder=tmp_path, config=RecoveryConfig(max_skips=2))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(torch.full((2, 3), 1e5))
        output.float().square().mean().backward()
        optimizer.step()

    step()
    step()
    with pytest.raises(NonFiniteError, match="max_skips=2 is used up"):
        step()
    assert [event["sample_ids"] for event in guard.events] == [[]] * 3
    assert {event["verdict"]["cause"] for event in guard.events} == {"precision"}


def scaled_loop(guard_of: Any, fault: str, steps: int = 40) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    guard_of(model, optimizer, scaler)
    for step in range(1, steps + 1):
        x = rows(step, bad=3 if fault == "sample" else None)
        if fault == "weight" and step == 3:
            model.weight.data[0, 1] = torch.nan
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if fault == "gradient":
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


@pytest.mark.parametrize(("fault", "cause"), [("sample", "inputs"), ("weight", "weights")])
def test_a_step_that_a_scaler_leaves_out_for_a_bad_output_is_diagnosed(fault: str, cause: str, tmp_path: Path) -> None:
    guards: list[Guard] = []

    def watch(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        guards.append(Guard.watch(None, optimizer, scaler=scaler, folder=tmp_path))

    model, _ = scaled_loop(watch, fault)
    (event,) = guards[0].events
    assert (event["step"], event["verdict"]["cause"]) == (3, cause)
    assert finite(model)


def test_a_plain_loops_scaler_that_halves_for_ever_stops_the_loop_if_the_ladder_has_a_stop(
    tmp_path: Path,
) -> None:
    guards: list[Guard] = []

    def watch(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        guards.append(Guard.watch(model, optimizer, folder=tmp_path))

    def watch_to_stop(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        Guard.watch(model, optimizer, folder=tmp_path, config=RecoveryConfig())

    with pytest.raises(NonFiniteError, match="step 12: gradients overflow fp16 at every loss"):
        scaled_loop(watch_to_stop, "gradient")
    _, scale = scaled_loop(watch, "gradient")
    assert scale == 2.0 ** (10 - 40)
    (event,) = guards[0].events  # said once
    assert (event["step"], event["kind"], event["action"]) == (12, "loss_scale", "report")


def test_a_schedule_of_epochs_moves_though_the_last_step_of_one_was_left_out(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard.watch(model, optimizer, lr_scheduler=schedule, folder=tmp_path)
    for epoch in range(2):
        for step in range(1, 4):
            optimizer.zero_grad()
            model(rows(3 * epoch + step, bad=3)).square().mean().backward()
            optimizer.step()
        schedule.step()
    assert [event["step"] for event in guard.events] == [3]
    assert schedule.get_last_lr() == [pytest.approx(0.1 * 0.5**2)]
