"""The plugin's own promises in a small accelerate loop; whole scripts are in test_stock_loop.py."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from launching import launch_environment
from torch import nn

import dit_lora
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.finite_gate import NonFiniteError


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
        config = dit_lora.RecoveryConfig(**ladder)
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
    assert [record.message for record in caplog.records if "2 ids for 3 rows" in record.message] == [
        "guard.microbatch: 2 ids for 3 rows; rows are numbered"
    ]


def test_detaching_gives_the_loop_its_own_methods_back() -> None:
    loop = Loop()
    loop.guard.detach()
    loop.step(bad())
    assert not torch.isfinite(loop.state()[0]).all()
    assert loop.guard.events == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_warned_of(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        Guard.attach(accelerator, model, optimizer)
    (message,) = caplog.messages
    if dtype is torch.float16:
        assert "parameters are fp16, where AdamW turns a gradient of 0 into NaN" in message
    else:
        assert "parameters are bf16: small updates round to nothing" in message


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
        assert [event["verdict"]["cause"] for event in guard.events] == ["inputs"]
        assert len(guard._watched.log.calls) == 1  # nothing piles up
        guard.detach()


@pytest.mark.parametrize("save_strategy", ["steps", "epoch"])
def test_a_trainer_with_the_callback_saves_its_checkpoints_and_trains_alike(
    tmp_path: Path, save_strategy: str
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, num_key_value_heads=2, **sizes)
    rows = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))
    weights = []
    for guarded in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(guarded)),
            per_device_train_batch_size=2,
            max_steps=6,
            use_cpu=True,
            report_to=[],
            save_strategy=save_strategy,
            save_steps=2,
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row.clone()} for row in rows]
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        if guarded:
            trainer.add_callback(dit_lora.GuardCallback(trainer))
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        assert len(list((tmp_path / str(guarded)).glob("checkpoint-*/scheduler.pt"))) >= 2
    assert all(torch.equal(weight, other_weight) for weight, other_weight in zip(*weights, strict=True))


def test_a_schedules_state_can_be_saved_while_it_is_gated_and_after(tmp_path: Path) -> None:
    loop = Loop()
    loop.step(good())
    torch.save(loop.schedule.state_dict(), tmp_path / "schedule.pt")
    loop.guard.detach()
    assert type(loop.schedule) is torch.optim.lr_scheduler.ExponentialLR
    assert "step" not in vars(loop.schedule)


def test_a_bad_weight_never_reaches_an_average_that_was_given() -> None:
    from diffusers.training_utils import EMAModel

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), nn.Linear(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    ema = EMAModel(model.parameters())
    guard = Guard.attach(accelerator, model, optimizer, ema=ema)
    for number in range(4):
        accelerator.backward(model(good()).square().mean())
        if number == 2:
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.nan
        optimizer.step()
        ema.step(model.parameters())
        optimizer.zero_grad()
    assert [event["verdict"]["cause"] for event in guard.events] == ["optimizer"]
    assert [event["action"] for event in guard.events] == ["rollback"]
    assert all(torch.isfinite(tensor).all() for tensor in [*ema.shadow_params, *model.parameters()])
    assert ema.optimization_step == 1  # back to the start, then one step more


def test_a_model_that_returns_an_object_is_recorded_and_one_that_returns_no_tensor_is_not() -> None:
    class Output:
        def __init__(self, sample: torch.Tensor) -> None:
            self.sample = sample

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
            return Output(super().forward(x))

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), Model(4, 2)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    guard = Guard.attach(accelerator, model, optimizer)
    accelerator.backward(model(bad()).sample.square().mean())
    optimizer.step()
    assert [event["verdict"]["cause"] for event in guard.events] == ["inputs"]


def test_the_public_names_are_there() -> None:
    assert dit_lora.Guard is Guard
    for name in dit_lora.__all__:
        assert getattr(dit_lora, name) is not None
    # Its name in the first versions.
    assert dit_lora.LadderConfig is dit_lora.guard.LadderConfig is dit_lora.RecoveryConfig
    with pytest.raises(AttributeError, match="no attribute 'Gard'"):
        dit_lora.Gard  # noqa: B018


def test_a_callback_of_lightning_without_it_is_one_clear_line() -> None:
    code = (
        "import sys\nsys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "from dit_lora.errors import DitLoraError\n"
        "try:\n    from dit_lora import LightningGuard\nexcept DitLoraError as error:\n    print(error)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=launch_environment(),
        check=False,
    )
    assert not process.stderr
    assert process.stdout.strip() == ("LightningGuard needs lightning or pytorch_lightning; pip install lightning")
