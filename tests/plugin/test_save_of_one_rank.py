"""Two ranks under the command, of which one alone saves right after the step that spoiled the weights."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from launching import run_python

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
if sys.argv[1] == "sharded":
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 7):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    if step == 3 and (sys.argv[1] == "ddp" or dist.get_rank() == 1):
        moment = next(iter(optimizer.state.values()))["exp_avg"]
        getattr(moment, "_local_tensor", moment).view(-1)[1] = float("nan")
    optimizer.step()
    # A sharded weight is gathered by all ranks, and saved by one.
    saved = {n: getattr(p, "full_tensor", lambda p=p: p.detach())() for n, p in model.named_parameters()}
    if step in (3, 6) and dist.get_rank() == 0:
        torch.save(saved, f"step_{step}.pt")
weights = torch.cat([p.flatten() for p in saved.values()])
others = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(others, weights)
if dist.get_rank() == 0:
    print("finite", bool(weights.isfinite().all()), "equal", torch.equal(*others))
time.sleep(0.1)  # gloo lets go of its last tensors (docs/log.md)
dist.destroy_process_group()
"""


def run(folder: Path, kind: str, *guard: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return run_python(folder, *guard, "train.py", kind, ranks=2)


GUARD = ("-m", "dit_lora.guard", "--folder", "guarded")


def is_finite(path: Path) -> bool:
    return all(bool(t.isfinite().all()) for t in torch.load(path, weights_only=True).values())


def test_it_goes_back_by_itself_and_the_others_with_their_next_step(tmp_path: Path) -> None:
    assert run(tmp_path, "ddp").returncode == 0
    assert not is_finite(tmp_path / "step_3.pt")
    process = run(tmp_path, "ddp", *GUARD)
    assert process.returncode == 0, process.stderr
    assert "finite True equal True" in process.stdout
    assert is_finite(tmp_path / "step_3.pt")
    assert is_finite(tmp_path / "step_6.pt")
    assert "rank 0 was about to save weights that are not finite: the optimizer's" in process.stderr
    events = [json.loads(line) for line in (tmp_path / "guarded" / "events.jsonl").open()]
    assert {(e["verdict"]["cause"], e["action"]) for e in events} == {("optimizer", "rollback")}
    # Both are back at the start: the moments have the age of the steps since.
    assert [e["weights_of_step"] for e in events] == [0, 0]


@pytest.mark.thorough
def test_what_was_gathered_of_another_ranks_bad_part_is_written_and_said(tmp_path: Path) -> None:
    """The rank that saves has a part that is good."""
    assert run(tmp_path, "sharded").returncode == 0
    assert not is_finite(tmp_path / "step_3.pt")
    (tmp_path / "step_3.pt").unlink()
    process = run(tmp_path, "sharded", *GUARD)
    assert process.returncode == 0, process.stderr
    assert "finite True equal True" in process.stdout
    assert not is_finite(tmp_path / "step_3.pt")
    assert is_finite(tmp_path / "step_6.pt")
    (warning,) = [line for line in process.stderr.splitlines() if "step_3.pt" in line]
    assert "step_3.pt is saved with values that are not finite: 0.weight has 1 NaN among" in warning
    events = [json.loads(line) for line in (tmp_path / "guarded" / "events.jsonl").open()]
    reported = [(event["kind"], event["verdict"]["cause"], event["action"]) for event in events]
    assert reported == [
        ("non_finite_save", "unknown", "report"),
        ("non_finite_weights", "optimizer", "rollback"),
    ]
