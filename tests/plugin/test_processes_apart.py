"""Processes of one group: those that train models of their own, and those whose DDP comes after the guard."""

import json
import subprocess
from pathlib import Path

import pytest
from launching import run_python

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
x = torch.randn(12, 4)
if rank == 1:
    x[5, 2] = float("nan")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
called = model
if sys.argv[1] == "ddp":
    from dit_lora.guard import Guard

    guard = Guard.watch(model, optimizer, folder="guarded")
    called = DistributedDataParallel(model)
for (batch,) in DataLoader(TensorDataset(x), batch_size=3):
    optimizer.zero_grad()
    called(batch).square().mean().backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(others, weights)
if rank == 0:
    print("finite", [bool(one.isfinite().all()) for one in others], "equal", torch.equal(*others))
time.sleep(0.1)  # gloo lets go of its last tensors (docs/log.md)
dist.destroy_process_group()
"""


def run(folder: Path, kind: str, *guard: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return run_python(folder, *guard, "train.py", kind, ranks=2)


def test_a_process_that_trains_alone_skips_alone_and_speaks_for_itself(tmp_path: Path) -> None:
    process = run(tmp_path, "apart", "-m", "dit_lora.guard", "--folder", "guarded")
    assert process.returncode == 0, process.stderr
    assert "finite [True, True] equal False" in process.stdout
    assert "guard: process 1: step 2: non-finite loss; the step was not taken" in process.stderr
    assert "dataset index 5" in process.stderr
    assert "guard: step" not in process.stderr
    lines = (tmp_path / "guarded" / "process_1" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]
    assert not (tmp_path / "guarded" / "events.jsonl").exists()


def test_ranks_agree_though_ddp_comes_after_the_guard(tmp_path: Path) -> None:
    process = run(tmp_path, "ddp")
    assert process.returncode == 0, process.stderr
    assert "finite [True, True] equal True" in process.stdout
    assert "guard: step 2: non-finite gradient; the step was not taken" in process.stderr
    assert "dataset index 5 (rank 1)" in process.stderr
    assert not (tmp_path / "guarded" / "process_1" / "events.jsonl").exists()
