"""What stops a run on one rank besides bad data; two ranks are in test_distributed.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.faults.media.cache import overwrite
from dit_lora.data.cache.cache import TensorCache
from dit_lora.errors import DitLoraError
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.numerics.streams import derive_seed

Main = Callable[[list[str]], None]


def state(run: Path, step: int) -> dict[str, bytes]:
    """Weights and optimizer of a checkpoint, byte for byte."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    return {n: (folder / n).read_bytes() for n in ("trainable.safetensors", "optimizer.safetensors")}


class _NanGradient(torch.autograd.Function):
    """The identity, whose gradient has one NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = torch.nan
        return grad


def test_a_nan_gradient_under_a_finite_loss_stops_before_clipping_and_the_optimizer(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that fails only in backward: no loss shows it; clipping would spread it to every weight (N16)."""
    from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser

    predict, armed = CogVideoXDenoiser.predict_in_training, [derive_seed(42, "dropout", 3, 0, 0)]

    def faulty(self: Any, *arguments: Any) -> torch.Tensor:
        prediction = predict(self, *arguments)
        # Once, where torch's own generator is that of step 3.
        if [torch.initial_seed()] != armed:
            return prediction
        armed.clear()
        return _NanGradient.apply(prediction)

    monkeypatch.setattr(CogVideoXDenoiser, "predict_in_training", faulty)
    common = [*smoke, "train.batch_size=1", "train.accumulate=2", "train.steps=4"]
    common += ["guard.on_nonfinite=[stop]", "guard.preflight=false"]  # which would predict too
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError, match="step 3: non-finite gradient; the weights are those of step 2"):
        lora_main([*common, f"run.dir={run}"])
    event = json.loads((run / "events.jsonl").read_text())
    assert event["kind"] == "non_finite_gradient"
    assert event["verdict"]["cause"] == "transient"
    assert event["action"] == "stop"
    monkeypatch.undo()
    lora_main([*common, f"run.dir={tmp_path / 'clean'}", "train.save_every=1", "train.keep=9"])
    assert state(run, 2) == state(tmp_path / "clean", 2)


def test_a_divergence_says_what_to_change_and_never_saves_what_is_not_finite(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    """Resuming would repeat the step bit for bit, so that is not the advice."""
    run = tmp_path / "run"
    args = [
        "optim.groups.adapter.lr=1e38",
        "optim.clip=null",
        "train.steps=6",
        "train.save_every=1",
    ]
    with pytest.raises(DitLoraError) as error:
        lora_main([*smoke, *args, f"run.dir={run}"])
    assert error.value.exit_code == 3
    message = str(error.value)
    assert "the learning rate is too high" in message
    assert "train.resume=auto" not in message
    for weights in (run / "checkpoints").rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(weights).values())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_whose_every_sample_is_bad_ends_with_one_message_that_says_so(
    lora_main: Main, smoke: list[str], tmp_path: Path, workers: int
) -> None:
    args = [*smoke, "train.batch_size=1", f"data.workers={workers}"]
    for entry in list(TensorCache(tmp_path / "cache" / "videos").iter_entries()):
        overwrite(entry, "latent_mean", 0, torch.tensor([torch.nan]))
    with pytest.raises(DitLoraError, match="no sample is left") as error:
        lora_main([*args, "train.steps=6", f"run.dir={tmp_path / 'run'}"])
    assert "Traceback" not in str(error.value)
    assert error.value.exit_code == 3
