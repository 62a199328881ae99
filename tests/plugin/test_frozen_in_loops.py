"""Frozen weights and buffers of another loop: a change in memory is damage, and a change by the loop is not."""

from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from loop_helpers import batch, causes, fresh_accelerator, spoil_once
from torch import nn

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.attach.finite_checks import CHECKS
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.finite_gate import NonFiniteError


class Counting(nn.Linear):
    """Counts its calls and rescales in buffers, as quantized layers do; has a frozen weight."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("calls", torch.zeros(3))
        self.kept: torch.Tensor
        self.register_buffer("largest", torch.zeros(3))
        self.register_buffer("kept", torch.ones(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        self.largest = x.detach().abs().amax(1)
        return super().forward(self.frozen(x))


Spoil = Callable[[int, Counting, torch.Tensor], None]


def counting_loop(
    spoil: Spoil,
    checks: Collection[str] = CHECKS,
    seen: Callable[[Guard], None] = lambda guard: None,
    config: RecoveryConfig | None = None,
) -> Guard:
    accelerator, model = fresh_accelerator(), Counting()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = accelerator.prepare(torch.optim.AdamW(trained))
    guard = Guard.attach(accelerator, model, optimizer, checks=checks, config=config)
    seen(guard)
    for number in range(5):
        x = batch(number)
        spoil(number, model, x)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return guard


def test_buffers_that_the_loop_itself_changes_are_not_damage_and_frozen_weights_that_memory_changes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def in_the_data(bad: int, loads: int | None = None) -> Spoil:
        def spoil(number: int, model: Counting, x: torch.Tensor) -> None:
            if number == loads:
                model.load_state_dict(Counting().state_dict())
            if number == bad:
                x[1, 2] = torch.nan

        return spoil

    def in_memory(number: int, model: Counting, x: torch.Tensor) -> None:
        if number == 3:
            model.frozen.weight.data[0, 0] = 3e38

    assert causes(counting_loop(in_the_data(3)).events) == [("inputs", "skip")]
    # Before a healthy step has shown which buffers they are, and after another start of them was loaded.
    assert causes(counting_loop(in_the_data(0)).events) == [("inputs", "skip")]
    assert causes(counting_loop(in_the_data(4, loads=2)).events) == [("inputs", "skip")]
    with pytest.raises(NonFiniteError, match=r"of the step before; they are in .*frozen") as error:
        counting_loop(in_memory, config=RecoveryConfig())
    assert error.value.event["verdict"]["cause"] == "weights"
    assert error.value.event["sample_ids"] == []
    # Without a stop in the ladder every step with the damaged weight is skipped.
    guard = counting_loop(in_memory)
    assert causes(guard.events) == [("weights", "skip")] * 2
    assert [event["sample_ids"] for event in guard.events] == [[], []]


def turned(number: int, model: Counting, x: torch.Tensor) -> None:
    """Turn the sign of a frozen weight as bad memory would: every step survives it."""
    if number == 3:
        model.frozen.weight.data.neg_()


def turned_at_once(number: int, model: Counting, x: torch.Tensor) -> None:
    """Turn the sign before the first step, from which it is not yet known what the loop changes itself."""
    if number == 0:
        model.frozen.weight.data.neg_()


def turned_buffer(number: int, model: Counting, x: torch.Tensor) -> None:
    if number == 3:
        model.kept.data[1] = 5.0


def turned_after_it_moved(number: int, model: Counting, x: torch.Tensor) -> None:
    """Offload and bring back, so that nothing lies where it lay, and then turn a sign."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    turned(number, model, x)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (turned, "frozen weight frozen.weight"),
        (turned_at_once, "frozen weight frozen.weight"),
        (turned_buffer, "buffer kept"),
        (turned_after_it_moved, "frozen weight frozen.weight"),
    ],
)
def test_a_frozen_value_that_memory_changes_stops_the_loop_at_its_next_save(
    damage: Spoil,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    guard = counting_loop(damage)
    assert guard.events == []
    with pytest.raises(NonFiniteError, match="since the last save may have used") as error:
        guard.require_finite()
    (event,) = guard.events
    assert (event["kind"], event["verdict"]["cause"]) == ("altered_frozen", "weights")
    assert (event["action"], event["sample_ids"]) == ("stop", [])
    assert f"the {name} has changed since the start" in str(error.value)
    guard.detach()
    assert not caplog.messages  # which would say that a step was lost
    # What was trained is whole and is not lost.
    assert (tmp_path / "dit_lora_guard" / "last_good_step_000005.safetensors").is_file()


def test_a_frozen_value_that_memory_changes_is_passed_over_where_the_check_is_left_out() -> None:
    guard = counting_loop(turned, [check for check in CHECKS if check != "frozen"])
    guard.require_finite()
    assert guard.events == []


def averaged(number: int, model: Counting, x: torch.Tensor) -> None:
    if number == 3:
        for tensor in (*model.frozen.parameters(), model.kept):
            tensor.data.mul_(0.9)


def averaged_in_each_step(number: int, model: Counting, x: torch.Tensor) -> None:
    model.frozen.weight.data.mul_(0.9)


def written(number: int, model: Counting, x: torch.Tensor) -> None:
    if number == 3:
        with torch.no_grad():
            model.frozen.weight.mul_(0.9)


def replaced(number: int, model: Counting, x: torch.Tensor) -> None:
    if number == 3:
        model.frozen.weight.data = model.frozen.weight.data * 0.9


def loaded(number: int, model: Counting, x: torch.Tensor) -> None:
    if number == 3:
        model.load_state_dict(Counting().state_dict())


def frozen_by_the_loop(number: int, model: Counting, x: torch.Tensor) -> None:
    """Freeze a weight that has been trained."""
    if number == 3:
        model.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [averaged, averaged_in_each_step, written, replaced, loaded, frozen_by_the_loop])
def test_frozen_values_that_the_loop_itself_changes_are_no_damage_at_a_save(
    change: Spoil,
) -> None:
    guard = counting_loop(change)
    guard.require_finite()
    guard.require_finite()
    assert guard.events == []


def test_what_a_passed_save_found_changed_is_not_damage_when_a_later_step_trips() -> None:
    saves: list[Guard] = []

    def change(number: int, model: Counting, x: torch.Tensor) -> None:
        written(number, model, x)
        if number == 4:
            saves[0].require_finite()
            x[1, 2] = torch.nan

    guard = counting_loop(change, seen=saves.append)
    assert causes(guard.events) == [("inputs", "skip")]


def test_an_average_moved_past_its_version_is_not_damage_when_a_later_step_trips() -> None:
    def change(number: int, model: Counting, x: torch.Tensor) -> None:
        averaged(number, model, x)
        if number == 4:
            x[1, 2] = torch.nan

    assert causes(counting_loop(change).events) == [("inputs", "skip")]


def test_a_buffer_that_the_model_writes_to_is_named_and_put_back_where_no_sample_is_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no damage, since the model writes to it; the samples of that step are healthy."""
    models: list[Counting] = []

    def change(number: int, model: Counting, x: torch.Tensor) -> None:
        models[:] = [model]
        if number == 3:
            model.calls.data.fill_(torch.nan)
            spoil_once(model.weight, torch.nan)

    guard = counting_loop(change)
    assert causes(guard.events) == [("unknown", "skip")]
    (event,) = guard.events
    assert (event["step"], event["sample_ids"]) == (4, [])
    message = event["verdict"]["words"]
    assert message.startswith("the buffer calls has 3 NaN among 3 values; the model itself writes to")
    assert "step 4: non-finite gradient; the step was not taken; restored, because they were not finite: calls" in (
        caplog.text
    )
    # It begins again with the count that the snapshot of the start holds, and step 5 adds one.
    assert models[0].calls.tolist() == [1.0] * 3
