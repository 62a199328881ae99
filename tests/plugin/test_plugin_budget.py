"""What a loop may lose, what is said of it and what is left at a stop; and the names that this goes by."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from loop_helpers import bad_batch, causes
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dit_lora
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.finite_gate import NonFiniteError


class Clips(Dataset[dict[str, torch.Tensor]]):
    """Clips with NaN in some of them."""

    def __init__(self, count: int, bad: tuple[int, ...]) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index in self.bad:
            x[1] = torch.nan
        return {"x": x, "index": torch.tensor(index)}


class Loop:
    """An accelerate loop over a shuffled loader, with noise of its own."""

    def __init__(
        self,
        clips: Clips,
        *,
        batch_size: int = 2,
        workers: int = 0,
        folder: Path | None = None,
        **ladder: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        loader = DataLoader(clips, batch_size=batch_size, shuffle=True, num_workers=workers)
        model = nn.Linear(4, 2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
        )
        self.guard = Guard.attach(
            self.accelerator,
            self.model,
            self.optimizer,
            folder=folder,
            config=dit_lora.RecoveryConfig(**ladder),
        )
        self.indices: list[list[int]] = []

    def train(self, x: torch.Tensor) -> None:
        self.accelerator.backward((self.model(x) - 1).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            for batch in self.loader:
                self.indices.append(batch["index"].tolist())
                self.train(batch["x"] + 0.1 * torch.randn_like(batch["x"]))


def blamed(guard: Guard) -> list[str]:
    return [sample for event in guard.events for sample in event["sample_ids"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_by_its_index_told_once_and_costs_the_budget_once(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = 4 if workers else 30
    loop = Loop(Clips(7, bad=(3,)), workers=workers, max_skips=1)
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        loop.run(epochs)
        loop.accelerator.end_training()
    assert blamed(loop.guard) == ["dataset index 3"] * epochs
    assert [event.get("known", False) for event in loop.guard.events] == [number > 0 for number in range(epochs)]
    named_message, summary = [record.message for record in caplog.records]
    # The loop has added noise: the item is named because it was bad as it was loaded.
    assert named_message.endswith("\n  - dataset index 3: x has 1 NaN among 4 values")
    assert f"{epochs} of {4 * epochs} optimizer steps were not taken" in summary
    assert f"dataset index 3 ({epochs}x)" in summary
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


def test_each_new_bad_sample_costs_the_budget_and_a_stop_leaves_the_good_weights(
    tmp_path: Path,
) -> None:
    loop = Loop(Clips(40, bad=(5, 9, 31)), batch_size=1, folder=tmp_path / "run", max_skips=2)
    with pytest.raises(NonFiniteError, match="max_skips=2 is used up") as error:
        loop.run(2)
    assert set(blamed(loop.guard)) == {"dataset index 5", "dataset index 9", "dataset index 31"}
    (path,) = (tmp_path / "run").glob("last_good_step_*.safetensors")
    assert f"they are in {path}" in str(error.value)
    assert "the weights are those of the step before" in str(error.value)
    saved = load_file(path)
    assert all(torch.equal(saved[n], p) for n, p in loop.model.state_dict().items())
    assert saved["weight"].isfinite().all()


def test_without_a_folder_the_good_weights_are_where_accelerate_says_or_below(
    tmp_path: Path,
) -> None:
    for project in (None, tmp_path / "project"):
        loop = Loop(Clips(2, bad=(0, 1)), max_skips=0)
        if project is not None:
            loop.accelerator.project_configuration.set_directories(str(project))
        with pytest.raises(NonFiniteError):
            loop.run(1)
        folder = project or Path("dit_lora_guard")
        assert (folder / "last_good_step_000000.safetensors").is_file()


def test_a_disk_that_cannot_be_written_does_not_hide_why_it_stopped() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    Guard.attach(None, model, optimizer, config=dit_lora.RecoveryConfig(max_skips=0))
    Path("dit_lora_guard").write_text("in the way")
    model(bad_batch(0)).sum().backward()
    with pytest.raises(NonFiniteError, match=r"could not be written to .*max_skips=0 is used up"):
        optimizer.step()


def test_a_loop_in_which_no_step_is_taken_any_more_stops_though_the_sample_is_known() -> None:
    loop = Loop(Clips(1, bad=(0,)), batch_size=1)
    with pytest.raises(NonFiniteError, match="none of the last 10 steps was taken"):
        loop.run(20)
    assert len(loop.guard.events) == 11


def test_a_rollback_says_how_many_steps_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Clips(8, bad=()), snapshot_every=10)
    loop.run(2)  # 8 steps
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        loop.model.weight.data[0, 0] = torch.nan
        loop.run(1)
    assert "those of step 0, 8 steps are undone; a snapshot is taken every 10 steps" in caplog.text
    loop.run(3)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        loop.optimizer.state[loop.model.bias]["exp_avg_sq"][0] = torch.inf
        loop.run(2)  # no weight shows it; the next snapshot must not take it in
    assert loop.guard.events[-1]["verdict"]["cause"] == "optimizer"
    assert loop.guard.events[-1]["weights_of_step"] == 20
    assert "those of step 20, 10 steps are undone" in caplog.text


def snapshot_bytes(loop: Loop) -> int:
    snapshots = loop.guard._state.snapshots
    return sum(t.nbytes for step in snapshots.steps for t in snapshots.read_snapshot(step).values())


def test_snapshots_are_one_copy_and_can_be_turned_off() -> None:
    loop = Loop(Clips(8, bad=()), snapshot_every=2)
    loop.run(3)
    trained = sum(p.nbytes for p in loop.model.parameters())
    assert snapshot_bytes(loop) <= 3 * trained + 16  # and AdamW's two step counts
    without_snapshots = Loop(Clips(8, bad=()), snapshot_every=0)
    without_snapshots.run(3)
    assert snapshot_bytes(without_snapshots) == 0
    without_snapshots.model.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"do not use the weights; stopped: .*snapshot_every is 0"):
        without_snapshots.run(1)


def test_a_stop_for_bad_weights_puts_the_last_good_ones_back_and_on_the_disk(
    tmp_path: Path,
) -> None:
    loop = Loop(Clips(8, bad=()), snapshot_every=2, max_rollbacks=0, folder=tmp_path)
    loop.run(2)
    loop.model.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"those of step 6, 2 steps are undone.*max_rollbacks"):
        loop.run(1)
    saved = load_file(tmp_path / "last_good_step_000006.safetensors")
    assert torch.equal(saved["weight"], loop.model.weight)
    assert saved["weight"].isfinite().all()


def trained_in_pairs(loop: Loop, batches: Iterator[dict[str, torch.Tensor]], *, alike: bool) -> None:
    """As Transformers' Trainer accumulates: it takes several batches, then runs the first."""
    while pair := list(islice(batches, 2)):
        for batch in pair:
            loop.train(batch["x"] if alike else batch["x"] * 0.5)


def test_batches_that_are_taken_ahead_are_named_by_what_they_are_or_not_at_all() -> None:
    for is_unchanged, names in ((True, ["dataset index 3"] * 3), (False, [])):
        loop = Loop(Clips(6, bad=(3,)), batch_size=1)
        for _ in range(3):
            trained_in_pairs(loop, iter(loop.loader), alike=is_unchanged)
        assert blamed(loop.guard) == names
        assert causes(loop.guard.events) == [("data" if is_unchanged else "inputs", "skip")] * 3


def test_batches_that_are_taken_ahead_and_changed_are_not_named_by_their_order() -> None:
    ladder = dit_lora.LoopConfig().on_nonfinite  # without a stop
    loop = Loop(Clips(12, bad=(3,)), batch_size=2, on_nonfinite=ladder)
    for _ in range(3):
        trained_in_pairs(loop, iter(loop.loader), alike=False)
    assert causes(loop.guard.events) == [("inputs", "skip")] * 3
    rows = {f"row {row} of micro-batch 0" for row in (0, 1)}
    assert len(blamed(loop.guard)) == 3
    assert set(blamed(loop.guard)) <= rows


def test_skipped_batches_and_a_loader_of_plain_pytorch_are_named_too() -> None:
    loop = Loop(Clips(6, bad=(3,)), batch_size=1)
    loop.guard.detach()
    loop.guard = Guard.attach(loop.accelerator, loop.model, loop.optimizer)
    loop.loader = loop.accelerator.skip_first_batches(loop.loader, 0)
    loop.run(1)
    assert blamed(loop.guard) == ["dataset index 3"]

    loader = DataLoader(Clips(6, bad=(4,)), batch_size=3, shuffle=True)
    original_types = type(loader.batch_sampler), type(loader)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard.attach(None, model, optimizer, loader=loader)
    for batch in loader:
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        optimizer.step()
    assert blamed(guard) == ["dataset index 4"]
    guard.detach()
    assert (type(loader.batch_sampler), type(loader)) == original_types


def test_a_trainer_says_at_its_end_how_many_steps_were_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, num_key_value_heads=2, **sizes)
    rows = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))
    data = [{"inputs_embeds": torch.randn(8, 16), "labels": row} for row in rows]
    data[2]["labels"] = torch.full((8,), -100)
    data[4]["inputs_embeds"][3, 5] = torch.nan
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=1, max_steps=12,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=data,
        data_collator=default_data_collator,
    )
    trainer.add_callback(dit_lora.GuardCallback(trainer))
    with caplog.at_level(logging.WARNING, logger="dit_lora"):
        trainer.train()
    messages = [record.message for record in caplog.records if record.message.startswith("guard:")]
    without_labels = "dataset index 2: all of its 8 labels are -100, which the loss ignores"
    for message in (messages[0], messages[2]):
        head, sample = message.split("\n  - ")
        assert head.endswith("the loss is not finite, but every gradient is; the step was taken")
        assert sample == without_labels
    assert messages[1].endswith("\n  - dataset index 4: inputs_embeds has 1 NaN among 128 values")
    assert messages[3].startswith("guard: 2 of 12 optimizer steps were not taken")
    assert messages[3].endswith(": dataset index 4 (2x)")
    assert len(messages) == 4


def test_the_guard_is_imported_without_diffusers() -> None:
    code = "import sys; from dit_lora import Guard; print('diffusers' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
