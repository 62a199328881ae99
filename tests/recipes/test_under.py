"""Frozen adapters under the one that trains: on in training, off or on in samples, and no part of the result."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import trained
from runs import adapter, lines, same_adapter, trajectory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import apart

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling

Main = Callable[[list[str]], None]
SHOWN = [
    "validation.prompts=[a red square]",
    "validation.inference_steps=2",
    "validation.eval_draws=2",
]


@pytest.fixture
def under(smoke: list[str], tmp_path: Path) -> Path:
    """An adapter of other layers and rank than the recipe's, strong enough to be seen."""
    base, file = Path(model_of(smoke)), tmp_path / "under.safetensors"
    targets = ("to_q", "ff.net.2", "proj_out")
    earlier = trained("cogvideox", base, tmp_path / "earlier", rank=3, alpha=5, targets=targets).folder / ADAPTER_FILE
    generator = torch.Generator().manual_seed(4)
    tensors = {n: 0.1 * torch.randn(tensor.shape, generator=generator) for n, tensor in load_file(earlier).items()}
    with safe_open(earlier, framework="pt") as opened:
        save_file(tensors, file, metadata=opened.metadata())
    return file


def entry(file: Path, **more: Any) -> str:
    return f"lora.under=[{json.dumps({'path': str(file), **more})}]"


def eval_losses(run: Path) -> list[float]:
    return [line["eval_loss"] for line in lines(run, "eval_loss.jsonl")]


def shown(run: Path, step: int) -> Path:
    return run / "samples" / f"step_{step:06d}" / "prompt_00.mp4"


def sampled(model: str, out: Path, **adapters: Path) -> Path:
    """What the stock pipeline makes with these adapters."""
    checkpoint = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=model))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    for name, file in adapters.items():
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=name)
    if adapters:
        pipeline.set_adapters([*adapters])
    sampling = Sampling(VideoShape(9, 32, 48), 2, 6.0, 0)
    frames = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a red square"), sampling)
    return write_sample(out, frames, 8)


def model_of(smoke: list[str]) -> str:
    return next(arg for arg in smoke if arg.startswith("model.path=")).partition("=")[2]


@pytest.mark.parametrize("on", [False, True])
def test_it_is_in_training_in_no_file_and_in_samples_as_said(
    lora_main: Main, smoke: list[str], under: Path, tmp_path: Path, on: bool
) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    # What is remembered of the bare base's eval loss is not taken for this one's.
    common = [*smoke, *SHOWN, "train.steps=3", "guard.preflight=true"]
    lora_main([*common, f"run.dir={plain}"])
    lora_main([*common, entry(under, in_samples=on), f"run.dir={run}"])
    # Training and the eval loss have it: the same as that adapter alone, at the start.
    started = tmp_path / "started"
    lora_main([*common, "lora.rank=null", "lora.alpha=null", f"lora.init={under}", f"run.dir={started}"])
    assert eval_losses(run)[0] == pytest.approx(eval_losses(started)[0], rel=1e-6)
    assert eval_losses(run)[0] != pytest.approx(eval_losses(plain)[0], rel=1e-4)
    assert not same_adapter(run, plain)
    # The file holds what trained, and the stock pipeline what samples show.
    assert adapter(run).keys() == adapter(plain).keys()
    file = run / "adapter" / ADAPTER_FILE
    model, adapters = model_of(smoke), {"under": under} if on else {}
    base = sampled(model, tmp_path / "base", **adapters)
    trained = sampled(model, tmp_path / "with", trained=file, **adapters)
    assert apart(shown(run, 0), base) < apart(base, trained) / 10
    assert apart(shown(run, 3), trained) < apart(base, trained) / 10
    verified = json.loads((run / "verification.json").read_text())
    assert verified["passed"]
    assert verified["checks"]["output"]["words"].startswith("as trained")
    metadata = read_run_metadata(file)
    (recorded,) = metadata["under"]
    assert (recorded["name"], recorded["scale"], recorded["in_samples"]) == (
        "under.safetensors",
        1.0,
        on,
    )
    assert len(recorded["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(metadata)


@pytest.mark.parametrize(
    "further",
    [
        ["model.quantize=int8"],
        ["train.offload=group", "train.checkpointing=full"],
        ["model.dtype=bf16", "lora.dropout=0.2", "train.ema=0.5"],
        ["optim.groups.connector.lr=1e-4", "train.checkpointing=selective"],
        ["kernels.lora_linear=off"],
    ],
)
def test_resuming_is_bit_for_bit_and_the_result_is_verified(
    lora_main: Main, smoke: list[str], under: Path, tmp_path: Path, further: list[str]
) -> None:
    common = [*smoke, *further, "train.accumulate=2"]
    lora_main([*common, entry(under), "train.steps=4", f"run.dir={tmp_path / 'whole'}"])
    parts = [*common, f"run.dir={tmp_path / 'parts'}"]
    lora_main([*parts, entry(under), "train.steps=2"])
    moved = Path(shutil.copy(under, tmp_path / "moved.safetensors"))
    lora_main([*parts, entry(moved, in_samples=True), "train.steps=4", "train.resume=auto"])
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    assert same_adapter(tmp_path / "parts", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "verification.json").read_text())["passed"]
    weights = load_file(tmp_path / "whole" / "checkpoints" / "step_000004" / "trainable.safetensors")
    assert not any("under_" in name for name in weights)
    for override in (entry(moved, scale=0.5), "lora.under=[]"):
        with pytest.raises(DitLoraError, match=r"belongs to another recipe(.|\n)*lora\.under: "):
            lora_main([*parts, override, "train.steps=5", "train.resume=auto"])


def test_a_second_model_for_samples_has_it_too_where_samples_have_it(
    lora_main: Main, smoke: list[str], under: Path, tmp_path: Path
) -> None:
    turbo, run = tmp_path / "turbo", tmp_path / "run"
    get_family("cogvideox").build_tiny_checkpoint("cogvideox-5b", turbo, 7)
    entries = [{"path": str(under), "in_samples": True}, {"path": str(under), "scale": 3}]
    args = [*smoke, *SHOWN, f"lora.under={json.dumps(entries)}", f"validation.model={turbo}"]
    lora_main([*args, "train.steps=2", f"run.dir={run}"])
    model, file = str(turbo), run / "adapter" / ADAPTER_FILE
    base = sampled(model, tmp_path / "base", under=under)
    trained = sampled(model, tmp_path / "with", trained=file, under=under)
    assert apart(shown(run, 0), base) < apart(base, trained) / 10
    assert apart(shown(run, 2), trained) < apart(base, trained) / 10


def test_two_of_them_add_up_with_their_scales(lora_main: Main, smoke: list[str], under: Path, tmp_path: Path) -> None:
    """Twice at half is once, but for rounding; and one against itself is none."""
    common = [*smoke, *SHOWN, "validation.prompts=[]", "train.steps=1"]
    names = {
        "once": [{"path": str(under)}],
        "halves": [{"path": str(under), "scale": 0.5}] * 2,
        "none": [{"path": str(under), "scale": 2}, {"path": str(under), "scale": -2}],
    }
    losses = {}
    for name, entries in names.items():
        lora_main([*common, f"lora.under={json.dumps(entries)}", f"run.dir={tmp_path / name}"])
        losses[name] = eval_losses(tmp_path / name)[0]
    lora_main([*common, f"run.dir={tmp_path / 'plain'}"])
    assert losses["halves"] == pytest.approx(losses["once"], rel=1e-6)
    assert losses["none"] == pytest.approx(eval_losses(tmp_path / "plain")[0], rel=1e-5)
    assert losses["once"] != pytest.approx(losses["none"], rel=1e-4)


@pytest.mark.usefixtures("nothing_encoded")
def test_what_is_no_adapter_of_this_model_is_refused_by_its_number(
    lora_main: Main, smoke: list[str], under: Path, tmp_path: Path
) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(DitLoraError) as error:
            lora_main([*smoke, *overrides, f"run.dir={tmp_path / 'run'}"])
        assert error.value.exit_code == 2
        return str(error.value)

    message = refused(f"lora.under={json.dumps([str(under), './nowhere'])}")
    assert message == "lora.under[1]: ./nowhere does not exist"
    renamed = {f"x.{name}": tensor for name, tensor in load_file(under).items()}
    save_file(renamed, tmp_path / "other.safetensors")
    message = refused(entry(tmp_path / "other.safetensors"))
    assert "5 of its layers are not in the model" in message
    assert "scale 0 has no effect" in refused(entry(under, scale=0))
    assert "in_sample: unknown key" in refused(entry(under, in_sample=True))
    assert not (tmp_path / "cache").exists()
