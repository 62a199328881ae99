"""The guard needs torch alone: an environment is made of nothing else, and a loop there is guarded."""

import subprocess
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from launching import ROOT
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

LOOP = """
import importlib.util
import torch
from dit_lora.guard import Guard, RecoveryConfig

others = ("accelerate", "diffusers", "peft", "pydantic", "safetensors", "transformers", "yaml", "psutil")
assert not [name for name in others if importlib.util.find_spec(name)]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = Guard.attach(None, model, optimizer, config=RecoveryConfig(max_skips=3), folder="guard")
for step in range(5):
    x = torch.randn(5, 3)
    if step in (2, 3):
        x[3, 1] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
guard.require_finite()
event, _ = guard.events
print(event["step"], *event["sample_ids"], event["verdict"]["cause"])
print(all(bool(p.isfinite().all()) for p in model.parameters()))
with torch.no_grad():
    model[0].weight[1, 1] = float("inf")
try:
    guard.require_finite()
except Exception as error:
    print(type(error).__name__, error)
print(all(bool(p.isfinite().all()) for p in model.parameters()))
"""


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return the distribution and all that it needs here, by name."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


def test_a_loop_is_guarded_where_torch_alone_is_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for package_files in needed("torch", {}).values():
        root = Path(str(package_files.locate_file("")))
        for top in {file.parts[0] for file in package_files.files or () if file.parts[0] != ".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(root / top)
    (packages / "here.pth").write_text(f"{ROOT}\n")
    python = tmp_path / "venv" / "bin" / "python"
    process = subprocess.run([python, "-c", LOOP], cwd=tmp_path, capture_output=True, text=True, env={}, check=False)
    assert process.returncode == 0, process.stderr
    skipped_line, finite, *put_back, is_finite_line = process.stdout.splitlines()
    assert skipped_line == "3 row 3 of micro-batch 0 inputs"
    assert (finite, put_back, is_finite_line) == ("True", [], "True"), process.stdout
    assert (tmp_path / "guard" / "events.jsonl").exists()
    assert (tmp_path / "guard" / "guard.json").exists()
    assert not (tmp_path / "guard" / "bundles").exists()
    assert process.stderr.count("no bundles are written, because safetensors is not") == 1
