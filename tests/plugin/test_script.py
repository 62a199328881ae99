"""`dit-lora guard SCRIPT`: scripts that know nothing of it, run as their authors run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import launch_environment, run_python
from safetensors.torch import load_file

PLAIN = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from beside import width

parser = argparse.ArgumentParser()
parser.add_argument("--nan", type=int, default=-1)
parser.add_argument("--fault", default="")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--clip", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)

class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index == args.nan:
            x[1] = float("nan")
        return {"x": x, "y": x.sum()[None]}

body = nn.Sequential(nn.Linear(4, width), nn.Tanh())
head = nn.Linear(width, 1)
optimizers = [torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(head.parameters(), lr=0.1)]
schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
step = 0
for epoch in range(args.epochs):
    for batch in DataLoader(Data(), batch_size=4, shuffle=True):
        step += 1
        if args.fault == "weight" and step == 3:
            body[0].weight.data[1, 2] = float("nan")
        if args.fault == "moment" and step == 3:
            optimizers[1].state[head.bias]["exp_avg"][0] = float("inf")
        loss = nn.functional.mse_loss(head(body(batch["x"])), batch["y"])
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        if args.fault == "gradient" and step == 3:
            body[0].weight.grad[0, 0] = float("nan")
        if args.clip:
            nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
        for one, schedule in zip(optimizers, schedules):
            one.step()
            schedule.step()
torch.save({"body": body.state_dict(), "head": head.state_dict()}, "out.pt")
print("steps", step, "rate", schedules[0].get_last_lr()[0], __name__)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PLAIN)
    (tmp_path / "beside.py").write_text("width = 8\n")
    return path


def python(folder: Path, *arguments: object, ranks: int = 1, code: int = 0) -> subprocess.CompletedProcess[str]:
    process = run_python(folder, *arguments, ranks=ranks)
    assert process.returncode == code, process.stderr
    return process


def run_real_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as users start it, in a new process."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=launch_environment(),
        check=True,
    )


def weights(folder: Path) -> list[torch.Tensor]:
    saved = torch.load(folder / "out.pt", weights_only=True)
    return [tensor for part in saved.values() for tensor in part.values()]


def events(folder: Path) -> list[dict[str, object]]:
    path = folder / "guarded" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


GUARD = ("-m", "dit_lora.guard", "--folder", "guarded")


@pytest.mark.parametrize(
    ("options", "cause", "named"),
    [
        (("--nan", "5"), "data", "dataset index 5"),
        pytest.param(("--fault", "weight"), "weights", "Sequential.0.weight", marks=pytest.mark.thorough),
        pytest.param(
            ("--fault", "moment"),
            "optimizer",
            "Linear.bias/exp_avg",
            marks=pytest.mark.thorough,
        ),
        (("--fault", "gradient", "--clip"), "transient", "the gradient of Sequential.0.weight was"),
    ],
)
def test_a_plain_loop_of_two_optimizers_survives_without_a_line(
    script: Path, options: tuple[str, ...], cause: str, named: str
) -> None:
    folder = script.parent
    python(folder, script.name, *options)
    assert not all(bool(weight.isfinite().all()) for weight in weights(folder))
    process = python(folder, *GUARD, script.name, *options)
    assert all(bool(weight.isfinite().all()) for weight in weights(folder))
    assert {event["verdict"]["cause"] for event in events(folder)} == {cause}  # type: ignore[index]
    assert named in process.stderr
    assert "watching SGD, AdamW with 49 trained numbers in a plain PyTorch loop" in process.stderr
    assert "__main__" in process.stdout


def test_a_skipped_step_moves_no_schedule(script: Path) -> None:
    process = python(script.parent, *GUARD, script.name, "--nan", "5")
    rate = float(process.stdout.split()[3])
    assert rate == pytest.approx(0.1 * 0.9**6)  # 8 steps, 2 of them skipped


def test_healthy_training_is_the_same_bit_for_bit(script: Path) -> None:
    folder = script.parent
    bare = python(folder, script.name)
    unguarded_weights = weights(folder)
    guarded = run_real_python(folder, *GUARD, script.name)
    assert guarded.stdout == bare.stdout
    assert all(torch.equal(a, b) for a, b in zip(unguarded_weights, weights(folder), strict=True))
    assert not events(folder)


def test_the_command_ends_with_what_the_guard_stops_it_with(script: Path) -> None:
    folder = script.parent
    options = ["--max-skips", "0", "--folder", "guarded", script.name, "--nan", "5"]
    process = python(folder, "-m", "dit_lora", "guard", *options, code=3)
    assert "error: guard: step" in process.stderr
    assert "Traceback" not in process.stderr
    assert list((folder / "guarded").glob("last_good_step_*.safetensors"))
    assert not (folder / "out.pt").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('nothing to train')", "nothing was guarded: the script created no torch.optim"),
        (
            "import torch\nheld = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)",
            "not guarded: SGD, because no model that it trains was called",
        ),
    ],
)
def test_what_is_not_guarded_is_said(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "other.py").write_text(code)
    lines = run_real_python(tmp_path, *GUARD, "other.py").stderr.splitlines()  # what it holds lives to its end
    (reason,) = [line for line in lines if "guarded" in line]  # one reason, and no other
    assert said in reason


def test_a_script_that_trains_in_fp16_is_guarded_and_warned(tmp_path: Path) -> None:
    code = "import torch\nm = torch.nn.Linear(2, 2).half()\nheld = torch.optim.SGD(m.parameters(), lr=1)\n"
    (tmp_path / "half.py").write_text(code + "m(torch.ones(1, 2).half())")
    warning, watching = python(tmp_path, *GUARD, "half.py").stderr.splitlines()
    assert warning.startswith("guard: trained parameters are fp16, where AdamW turns a gradient of")
    assert watching.startswith("guard: watching SGD with 6 trained numbers in a plain PyTorch loop")


@pytest.mark.thorough
def test_a_module_runs_by_its_name_and_errors_are_the_scripts_own(script: Path) -> None:
    folder = script.parent
    process = python(folder, *GUARD, "-m", "train", "--epochs", "1")
    assert "steps 4" in process.stdout
    process = python(folder, *GUARD, script.name, "--epochs", "x", code=2)
    assert "train.py: error: argument --epochs" in process.stderr
    process = python(folder, *GUARD, "nowhere.py", code=2)
    assert process.stderr == "error: the script nowhere.py does not exist\n"


RANKS = """
import time
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)

class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index == int(sys.argv[1]):
            x[1] = float("nan")
        return x

model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
data = Data()
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(others, weights)
if dist.get_rank() == 0:
    print("finite", bool(weights.isfinite().all()), "equal", torch.equal(*others))
time.sleep(0.1)  # gloo lets go of its last tensors (docs/log.md)
dist.destroy_process_group()
"""


SHARDED = """
import time
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
fault = sys.argv[1]

class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x * 1e12 if fault == "overflow" and index == 5 else x

class FourthPower(torch.nn.Module):
    def forward(self, x):
        return x.square().square()

model = torch.nn.Sequential(torch.nn.Linear(4, 8), FourthPower(), torch.nn.Linear(8, 1))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data, step = Data(), 0
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, batch_size=4, sampler=sampler):
        step += 1
        if fault == "weight" and step == 3 and dist.get_rank() == 1:
            model[0].weight.data._local_tensor[0, 0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
finite = all(bool(p.full_tensor().isfinite().all()) for p in model.parameters())
if dist.get_rank() == 0:
    print("finite", finite)
time.sleep(0.1)  # gloo lets go of its last tensors (docs/log.md)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("overflow", ("dataset index 5 (rank 1): it fails whichever", "first inf in the forward")),
        pytest.param(
            "weight",
            ("rank 1: the trained weight 0.weight has 1 NaN among 32 values",),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ranks_that_share_weights_diagnose_together(tmp_path: Path, fault: str, told: tuple[str, ...]) -> None:
    """A rank alone cannot run a model of `fully_shard`: all run the micro-batch of the one that failed."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    process = python(tmp_path, *GUARD, "sharded.py", fault, ranks=2)
    assert "finite True" in process.stdout
    assert all(message in process.stderr for message in told), process.stderr
    if fault != "overflow":
        return  # there is no call to run again
    # All ranks write one bundle, whose weights are whole; a single process replays it.
    bundles = [tmp_path / "guarded" / str(event["bundle"]) for event in events(tmp_path)]
    bundle = bundles[0]
    assert sorted(bundle.parent.iterdir()) == sorted(bundles)
    assert load_file(bundle / "trained.safetensors")["0.weight"].shape == (8, 4)
    replay = ("-m", "dit_lora", "replay", bundle, "--script", "sharded.py", "--", "none")
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "1")
    process = python(tmp_path, *torchrun, *replay, code=1)
    assert "replayed: inputs: it fails whichever" in process.stdout, process.stdout


@pytest.mark.thorough
def test_two_ranks_of_ddp_agree(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(RANKS)
    process = python(tmp_path, *GUARD, "ddp.py", "5", ranks=2)
    assert "finite True equal True" in process.stdout
    (first_event, second) = events(tmp_path)
    for event in (first_event, second):
        assert event["sample_ids"] == ["dataset index 5"]
    assert "bundle" not in second, "a sample that is known needs no second one"
    bundle = tmp_path / "guarded" / str(first_event["bundle"])
    assert json.loads((bundle / "bundle.json").read_text())["replay"]["rank"] == first_event["rank"]
    assert process.stderr.count("2 of 4 optimizer steps were not taken") == 1
