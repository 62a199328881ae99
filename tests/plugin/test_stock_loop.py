"""The published CogVideoX LoRA script's form of loop, with NaN in one of five samples: two lines decide."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from launching import started
from safetensors.torch import load_file

LOOP = Path(__file__).with_name("stock_loop.py")


def run(checkpoint: Path, out: Path, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return started([checkpoint, out, *options], ranks, script=LOOP).wait()


def adapter(out: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(out / "pytorch_lora_weights.safetensors")
    assert len(tensors) == 16
    return tensors


def finite(out: Path) -> int:
    return sum(bool(torch.isfinite(tensor).all()) for tensor in adapter(out).values())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.thorough), (2, 1)])
def test_one_nan_sample_ruins_every_tensor_without_the_guard_and_none_with_it(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, ranks: int, accumulate: int
) -> None:
    options = ["--nan-sample", "3", "--steps", "8", "--accumulate", str(accumulate)]
    checkpoint = tiny_checkpoints["cogvideox-2b"]
    bare = run(checkpoint, tmp_path / "bare", *options, ranks=ranks)
    assert bare.returncode == 0, bare.stderr  # it ends as if all were well
    assert finite(tmp_path / "bare") == 0
    guarded = run(checkpoint, tmp_path / "guarded", *options, "--guard", ranks=ranks)
    assert guarded.returncode == 0, guarded.stderr
    assert finite(tmp_path / "guarded") == 16
    lines = (tmp_path / "guarded" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["verdict"]["cause"] for event in events} == {"data"}
    # The item as it was loaded; the model was given it with noise.
    messages = {event["verdict"]["words"] for event in events}
    assert messages == {"latents has 1 NaN among 288 values"}
    assert all(event["sample_ids"] == ["dataset index 3"] for event in events)
    assert all(event["action"] == "skip" for event in events)
    assert all(tensor.any() for name, tensor in adapter(tmp_path / "guarded").items() if "B" in name)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_healthy_loop_trains_bit_for_bit_the_same_with_the_guard(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, accumulate: int
) -> None:
    options = ["--steps", "5", "--accumulate", str(accumulate)]
    checkpoint = tiny_checkpoints["cogvideox-5b"]
    for name, extra in (("bare", []), ("guarded", ["--guard"])):
        process = run(checkpoint, tmp_path / name, *options, *extra)
        assert process.returncode == 0, process.stderr
    bare, guarded = adapter(tmp_path / "bare"), adapter(tmp_path / "guarded")
    assert all(torch.equal(bare[name], guarded[name]) for name in bare)
    assert not (tmp_path / "guarded" / "events.jsonl").exists()
