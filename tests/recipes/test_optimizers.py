"""Recipes under each optimizer: a fault and a resume on the way, they end bit for bit as a run without either."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from chat_runs import Main, common, with_peft, write_data
from launching import ROOT
from runs import lines
from safetensors.torch import load_file

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import DitLoraError
from dit_lora.numerics.objectives import LossOutput
from dit_lora.training import loop

pytest.importorskip("bitsandbytes")
pytest.importorskip("prodigyopt")

STEPS = 4
QUICK = (
    f"train.steps={STEPS}",
    "validation.prompts=[]",
    "validation.eval_draws=0",
    "guard.preflight=false",
    "guard.monitor_every=0",
    "train.ema=0.8",
    "lora.rank=128",  # matrices of 4096 elements and more, which 8-bit moments are for
    "optim.groups.connector.clip=0.5",
    "optim.schedule=cosine",
)


class Optimizer(NamedTuple):
    adapter_lr: float
    base_lr: float
    moment: str
    """End of the name of its first moments."""
    dtypes: set[torch.dtype]
    """The dtypes of these moments."""


OPTIMIZERS = {
    "adamw_8bit": Optimizer(1e-3, 1e-4, "state1", {torch.uint8, torch.float32}),
    "prodigy": Optimizer(1, 1, "exp_avg", {torch.float32}),
}
thorough = pytest.mark.thorough


@pytest.fixture
def two_faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Arms a NaN loss in step 3, which is healthy when it is taken again, and a NaN weight in step 4."""
    forward = loop.forward

    def arm() -> None:
        armed, later = {3: "loss"}, {4: "weight"}

        def spoiled(losses: Any, model: Any, batch: Any, place: Any) -> Any:
            # Not in the pass of step 4 that is dropped as step 3 trips.
            if (place.step, place.micro_step) == (3, 0) and not armed:
                armed.update(later)
                later.clear()
            fault = armed.pop(place.step, None)
            if fault == "weight":
                next(p for p in model.parameters() if p.requires_grad).data.view(-1)[1] = torch.nan
            output = forward(losses, model, batch, place)
            if fault == "loss":
                return LossOutput(output.losses * torch.nan, output.timesteps)
            return output

        monkeypatch.setattr(loop, "forward", spoiled)

    return arm


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "family",
    [
        "cogvideox",
        pytest.param("sana", marks=thorough),
        pytest.param("videochat2", marks=thorough),
    ],
)
def test_faults_and_a_resume_change_no_bit(  # type: ignore[no-untyped-def]
    family: str,
    optimizer: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    two_faults,
) -> None:
    """Weights, averages and optimizer: 2 steps, then 2 resumed ones of which each trips once.

    The second is answered by a rollback over the first, which has then moved all that the optimizer keeps.
    """
    args = recipe_of(family, tiny_checkpoints, shape_clips, tmp_path)
    groups = ["connector", "backbone"] if family == "videochat2" else ["connector"]
    expected = OPTIMIZERS[optimizer]
    args += [*QUICK, f"optim.name={optimizer}", f"optim.groups.adapter.lr={expected.adapter_lr}"]
    args += [f"optim.groups.{group}.lr={expected.base_lr}" for group in groups]
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    lora_main([*args, f"run.dir={uninterrupted}"])
    lora_main([*args, f"run.dir={parts}", "train.save_every=2", "train.keep=9"])
    shutil.rmtree(parts / "checkpoints" / "step_000004")  # as if killed after step 2
    two_faults()
    lora_main([*args, f"run.dir={parts}", "train.save_every=2", "train.resume=auto"])
    actions = [(event["step"], event["action"]) for event in lines(parts, "events.jsonl")]
    assert actions == [(3, "retry"), (4, "rollback")]
    assert state(parts) == state(uninterrupted)
    rates = [line["lr_groups"]["adapter"] for line in lines(parts, "metrics.jsonl")]
    assert rates == [line["lr_groups"]["adapter"] for line in lines(uninterrupted, "metrics.jsonl")]
    moments = load_file(uninterrupted / "checkpoints" / "step_000004" / "optimizer.safetensors")
    assert {tensor.dtype for name, tensor in moments.items() if name.endswith(expected.moment)} == expected.dtypes
    if optimizer == "prodigy":
        assert rates[0] == 1e-6  # its first estimate, times lr
        assert moments["adapter/k"].item() == moments["connector/k"].item() == STEPS
        assert moments["adapter/d_numerator"].item() > 0
    if family == "videochat2":
        with_peft(uninterrupted)
    else:
        loads_in_its_pipeline(tiny_checkpoints, family, uninterrupted)


def recipe_of(family: str, tiny_checkpoints: dict[str, Path], clips: Path, tmp_path: Path) -> list[str]:
    """The family's smoke recipe; clips and images of another size, to be quick."""
    if family == "videochat2":
        data = write_data(tmp_path / "data")
        base = tiny_checkpoints["videochat2-mistral"]
        return common(family, base, data, tmp_path)
    size = ["data.height=32", "data.width=48"]
    if family == "sana":
        clips, size = tmp_path / "images", []
        write_shapes(clips, clips=4, frames=1, height=64, width=96, fps=1)
    return [
        str(ROOT / "recipes" / "smoke" / f"{family}.yaml"),
        f"model.path={tiny_checkpoints[VARIANTS[family]]}",
        f"data.path={clips}",
        f"data.cache={tmp_path / 'cache'}",
        *size,
    ]


VARIANTS = {"cogvideox": "cogvideox-5b", "sana": "sana-600m"}


def loads_in_its_pipeline(tiny_checkpoints: dict[str, Path], family: str, run: Path) -> None:
    """In a stock pipeline, and with another effect than none."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(tiny_checkpoints[VARIANTS[family]])
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    trained = {n: p for n, p in pipe.transformer.named_parameters() if "lora_B" in n}
    assert trained
    assert all(p.any() for p in trained.values())


def state(run: Path) -> dict[str, bytes]:
    """Weights, averages and optimizer of the last checkpoint; an adapter's metadata may have any order."""
    folder = run / "checkpoints" / f"step_{STEPS:06d}"
    names = {path.name for path in folder.glob("*.safetensors")} - {ADAPTER_FILE, BASE_FILE}
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.usefixtures("nothing_encoded")
@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can")
def test_an_optimizer_that_cannot_run_here_is_refused_before_anything_is_encoded(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    with pytest.raises(DitLoraError, match=r"this run is on cpu; use optim\.name=adamw_8bit"):
        lora_main([*smoke, "optim.name=paged_adamw_8bit", f"run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
