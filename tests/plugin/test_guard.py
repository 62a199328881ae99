"""The plugin's own promises in a small accelerate loop; whole scripts are in test_stock_loop.py."""

import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

import dit_lora
from dit_lora.errors import DitLoraError
from dit_lora.numerics.gate import NonFiniteError
from dit_lora.numerics.guard import Guard


class Loop:
    """Three samples a step through a dropout and a linear layer."""

    def __init__(self, folder: Path | None = None, **ladder: object) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.plain = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.plain, 0.5)
        self.optimizer = self.accelerator.prepare(self.plain)
        config = dit_lora.LadderConfig(**ladder)
        self.guard = Guard.attach(
            self.accelerator,
            self.model,
            self.optimizer,
            lr_scheduler=self.schedule,
            config=config,
            folder=folder,
        )

    def step(self, x: torch.Tensor, ids: list[str] | None = None) -> None:
        with self.guard.microbatch(ids or []):
            loss = self.model(x).square().mean()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        moments = [t for state in self.plain.state.values() for t in state.values()]
        return [t.clone() for t in [*self.model.parameters(), *moments]]


def good() -> torch.Tensor:
    return torch.randn(3, 4)


def bad(row: int = 1) -> torch.Tensor:
    x = good()
    x[row, 2] = torch.nan
    return x


def test_a_bad_step_moves_neither_weights_nor_moments_nor_a_schedule_of_the_loops_own(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    loop.step(good())
    before, rate = loop.state(), loop.schedule.get_last_lr()
    loop.step(bad(), ["a", "b", "c"])
    assert all(torch.equal(old, new) for old, new in zip(before, loop.state(), strict=True))
    assert loop.schedule.get_last_lr() == rate
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["sample_ids"] == ["b"]
    assert event["step"] == 2
    assert event["action"] == "skip"
    loop.step(good())
    assert loop.schedule.get_last_lr() == [rate[0] / 2]
    assert not torch.equal(before[0], loop.state()[0])


def test_the_budget_ends_the_loop_with_exit_code_3_and_good_weights() -> None:
    loop = Loop(max_skips=1)
    loop.step(bad())
    with pytest.raises(NonFiniteError, match="max_skips=1 is used up") as error:
        loop.step(bad())
    assert error.value.exit_code == 3
    assert all(torch.isfinite(tensor).all() for tensor in loop.state())


def test_ids_that_do_not_fit_the_rows_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        loop.step(good(), ["a", "b"])
        loop.step(good(), ["a", "b"])
    assert [
        record.message for record in caplog.records if "2 ids for 3 rows" in record.message
    ] == ["guard.microbatch: 2 ids for 3 rows; rows are numbered"]


def test_detaching_gives_the_loop_its_own_methods_back() -> None:
    loop = Loop()
    loop.guard.detach()
    loop.step(bad())
    assert not torch.isfinite(loop.state()[0]).all()
    assert loop.guard.events == []


def test_a_replay_puts_the_loops_own_generator_back() -> None:
    loop = Loop()
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    expected = generator.get_state()
    with loop.guard.microbatch(["a", "b", "c"], generator):
        loop.model(good())
    torch.rand(7, generator=generator)
    loop.guard._recorder.calls[0].run(loop.model)
    assert torch.equal(generator.get_state(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_refused_in_fp16_and_warned_of_in_bf16(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    if dtype is torch.float16:
        with pytest.raises(DitLoraError, match="2 trained parameters are fp16"):
            Guard.attach(accelerator, model, optimizer)
    else:
        with caplog.at_level(logging.WARNING, logger="dit_lora"):
            Guard.attach(accelerator, model, optimizer)
        assert "bf16" in caplog.text


def test_under_deepspeed_a_bad_loss_never_reaches_backward_and_gradients_are_not_judged() -> None:
    """Its backward also steps; its engine keeps the gradients, so there are none to look at."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    stepped: list[float] = []
    model = nn.Linear(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with (
        mock.patch.object(Accelerator, "distributed_type", DistributedType.DEEPSPEED),
        mock.patch.object(accelerator, "backward", lambda loss, **_: stepped.append(loss.item())),
        mock.patch.object(optimizer, "step", return_value=None),
    ):
        guard = Guard.attach(accelerator, model, optimizer)
        for x in (good(), bad(), good()):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
        assert len(stepped) == 2
        assert all(value == value for value in stepped)
        assert [event["verdict"]["cause"] for event in guard.events] == ["data"]
        assert guard._recorder.calls == []  # nothing piles up
        guard.detach()


def test_the_public_names_are_there() -> None:
    assert dit_lora.Guard is Guard
    for name in dit_lora.__all__:
        assert getattr(dit_lora, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Gard'"):
        dit_lora.Gard  # noqa: B018
