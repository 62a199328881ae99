"""The recovery part of the GPU check, on a CPU: it passes, and it fails where something is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, launch_environment


@pytest.mark.thorough
def test_a_bad_sample_and_a_kill_are_survived_on_a_cpu(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_recovery", "--device", "cpu", "--steps", "60", "--work", str(tmp_path)],
        env=launch_environment(), cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert "non_finite_loss, quarantine: latent_mean has" in process.stdout
    assert "killed after step" in process.stdout
    assert "adapters are equal to the bit" in process.stdout


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu_recovery import Runs

    return Runs(tmp_path, "cuda", 2)


def written(runs: Any, name: str, losses: list[float], adapter: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder = runs.work / name
    (folder / "adapter").mkdir(parents=True)
    lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses, start=1)]
    # A step that was taken again, and a line that was being written when the kill came.
    text = "\n".join([json.dumps({"step": 1, "loss": 9.0}), *lines]) + '\n{"step": 3, "lo'
    (folder / "metrics.jsonl").write_text(text)
    save_file(adapter, folder / "adapter" / "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize(
    ("losses", "device", "wrong"),
    [
        ([1.0, 2.0], "cpu", False),
        ([1.0, 2.0002], "cpu", True),  # to the bit
        ([1.0, 2.0002], "cuda", False),  # sums in another order
        ([1.0, 2.02], "cuda", True),
        ([1.0], "cuda", True),
    ],
)
def test_what_a_resume_may_differ_by(runs: Any, losses: list[float], device: str, wrong: bool) -> None:
    import torch

    runs.device = device
    adapter = {"w": torch.randn(3, generator=torch.Generator().manual_seed(0))}
    written(runs, "undisturbed", [1.0, 2.0], adapter)
    written(runs, "resumed", losses, adapter)
    assert bool(runs._differences()) == wrong


def test_an_adapter_that_is_not_finite_is_found(runs: Any) -> None:
    import torch

    written(runs, "resumed", [1.0, 2.0], {"w": torch.tensor([1.0, torch.nan])})
    assert runs._unfinished("resumed") == ["resumed: w is not finite"]
    written(runs, "short", [1.0], {"w": torch.ones(1)})
    assert runs._unfinished("short") == ["short: 1 of 2 steps"]
