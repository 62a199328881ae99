"""`LightningGuard`, and Lightning's scripts under the guard's command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch_environment

pytest.importorskip("lightning")

SCRIPT = """
import argparse
import glob
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--callback", action="store_true")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index == 5 and args.fault == "data":
            x[1] = float("nan")
        return {"x": x, "y": x[:1]}

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.automatic_optimization = not args.manual
        self.batches = 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {key: value.clone() for key, value in batch.items()}  # as a GPU's are others

    def training_step(self, batch, index):
        self.batches += 1
        if self.batches == 4 and args.fault == "weight":
            self.body[0].weight.data[1, 2] = float("nan")
        if self.batches == 4 and args.fault == "moment":
            self.trainer.optimizers[-1].state[self.head.bias]["exp_avg"][0] = float("nan")
        x = batch["x"].reshape(-1, 4) * 1.0  # not the batch's own tensor
        loss = nn.functional.mse_loss(self.head(self.body(x)), batch["y"])
        if args.manual:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            for schedule in self.lr_schedulers():
                schedule.step()
        return loss

    def on_after_backward(self):
        if self.batches == 4 and args.fault == "gradient":
            self.body[0].weight.grad[0, 0] = float("inf")

    def configure_optimizers(self):
        optimizers = [
            torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.head.parameters(), lr=0.01),
        ]
        if not args.manual:
            optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]

if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    callbacks = [ModelCheckpoint(dirpath="saved", every_n_train_steps=1, save_top_k=-1)]
    if args.callback:
        import dit_lora
        callbacks.append(dit_lora.LightningGuard())
    how = {"precision": args.precision}
    if args.precision == "16-scaled":
        how = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    if not args.manual:
        how |= {"gradient_clip_val": 1.0, "accumulate_grad_batches": args.accumulate}
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy="ddp" if args.devices > 1 else "auto", max_epochs=2,
        default_root_dir="guarded", logger=False, enable_progress_bar=False, callbacks=callbacks, **how,
    )
    model = Model()
    trainer.fit(model, DataLoader(Data(), batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        torch.save([p.detach() for p in model.parameters()], "out.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *options: str, command: bool = False) -> str:
    guard = ("-m", "dit_lora.guard", "--folder", "guarded") if command else ()
    process = subprocess.run(
        [sys.executable, *guard, script.name, *options],
        cwd=script.parent,
        capture_output=True,
        text=True,
        env=launch_environment(),
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


def saved(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "saved").glob("*.ckpt"))
    return [torch.load(path, weights_only=False) for path in paths]


def is_finite(checkpoint: dict[str, Any]) -> bool:
    moments = [
        value
        for optimizer in checkpoint["optimizer_states"]
        for state in optimizer["state"].values()
        for value in state.values()
    ]
    return all(bool(t.isfinite().all()) for t in [*checkpoint["state_dict"].values(), *moments])


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "guarded" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


INDEX = ["dataset index 5"]


@pytest.mark.parametrize(
    ("fault", "options", "cause", "samples"),
    [
        ("data", (), "data", INDEX),
        ("data", ("--manual",), "data", INDEX),
        ("data", ("--accumulate", "2"), "data", INDEX),
        ("data", ("--precision", "bf16-mixed"), "data", INDEX),
        ("data", ("--precision", "16-scaled"), "data", INDEX),
        pytest.param("data", ("--devices", "2"), "data", INDEX, marks=pytest.mark.slow),
        ("weight", (), "weights", []),
        ("weight", ("--precision", "16-scaled"), "weights", []),
        ("moment", (), "optimizer", []),
        ("moment", ("--manual",), "optimizer", []),
        ("gradient", (), "transient", []),
    ],
)
@pytest.mark.parametrize("command", [False, True], ids=["callback", "command"])
@pytest.mark.thorough
def test_no_poisoned_checkpoint_is_saved(
    script: Path,
    fault: str,
    options: tuple[str, ...],
    cause: str,
    samples: list[str],
    command: bool,
) -> None:
    folder = script.parent
    extra = () if command else ("--callback",)
    output = run(script, "--fault", fault, *options, *extra, command=command)
    reported = events(folder)
    assert {event["verdict"]["cause"] for event in reported} == {cause}, output
    assert all(event["sample_ids"] == samples for event in reported)
    if fault == "gradient":
        assert "the gradient of body.0.weight was not finite" in output or command
    checkpoints = saved(folder)
    assert checkpoints
    assert all(map(is_finite, checkpoints))


@pytest.mark.parametrize("fault", ["data", "weight", "moment", "gradient"])
@pytest.mark.thorough
def test_without_the_guard_the_last_checkpoint_is_poisoned(script: Path, fault: str) -> None:
    run(script, "--fault", fault)
    assert not is_finite(saved(script.parent)[-1])


@pytest.mark.parametrize("options", [(), ("--manual",), ("--precision", "16-scaled")])
@pytest.mark.thorough
def test_healthy_training_is_the_same_bit_for_bit(script: Path, options: tuple[str, ...]) -> None:
    results = []
    for extra, command in (((), False), (("--callback",), False), ((), True)):
        run(script, *options, *extra, command=command)
        results.append(torch.load(script.parent / "out.pt", weights_only=True))
    assert not events(script.parent)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.thorough
def test_it_is_a_callback_of_the_package_that_the_script_has_imported() -> None:
    code = "import {0}; from dit_lora import LightningGuard; print(isinstance(LightningGuard(), {0}.Callback))"
    for package in ("lightning.pytorch", "pytorch_lightning"):
        process = subprocess.run(
            [sys.executable, "-c", code.format(package)],
            capture_output=True,
            text=True,
            env=launch_environment(),
            check=True,
        )
        assert process.stdout.strip() == "True"
