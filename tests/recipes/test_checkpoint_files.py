"""Weights of a run's checkpoint, given by their file: they act as strongly as in the run, or are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported import deltas
from launching import ROOT
from safetensors.torch import load_file
from typer.testing import CliRunner
from verified import quick

from dit_lora.adapters.diffusers_format import read_run_metadata
from dit_lora.cli.app import app
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family

Main = Callable[[list[str]], None]
SMOKE = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")
OF_THE_FILE = ("lora.rank=null", "lora.alpha=null", "lora.targets=null")
LAST = "checkpoints/step_000003/trainable.safetensors"


def run(main: Main, base: Path, clips: Path, out: Path, *more: str) -> Path:
    main([SMOKE, f"model.path={base}", *quick(clips, out, *more)])
    return out / "run" / LAST


def test_alpha_is_the_runs(
    lora_main: Main, tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    base = tiny_checkpoints["cogvideox-2b"]
    file = run(lora_main, base, shape_clips, tmp_path, "lora.rank=4", "lora.alpha=12")
    result = CliRunner().invoke(app, ["export", str(file), "--to=folded", f"--out={tmp_path / 'out'}"])
    assert result.exit_code == 0, result.output
    pipeline = (
        get_family("cogvideox")
        .open(ModelConfig(family="cogvideox", path=str(base)))
        .sampler.pipeline(torch.float32, text=False)
    )
    pipeline.load_lora_weights(tmp_path / "out")
    stored = load_file(file)
    layers = [name.removesuffix(".lora_A.default.weight") for name in stored if "lora_A" in name]
    a, b = ({n: stored[f"{n}.lora_{part}.default.weight"] for n in layers} for part in "AB")
    expected = {n: 3 * b[n].double() @ a[n].double() for n in layers}
    loaded_deltas = deltas(pipeline.transformer)
    assert loaded_deltas.keys() == expected.keys()
    for name, delta in expected.items():
        torch.testing.assert_close(loaded_deltas[name], delta, rtol=1e-5, atol=1e-9)


@pytest.mark.thorough
def test_a_checkpoint_that_does_not_say_alpha_is_refused_with_the_folder_to_give(
    lora_main: Main, tiny_checkpoints: dict[str, Path], shape_clips: Path, tmp_path: Path
) -> None:
    """A run that continued a file can have layers with alphas of their own."""
    base = tiny_checkpoints["cogvideox-2b"]
    run(lora_main, base, shape_clips, tmp_path / "one", "lora.rank=4", "lora.alpha=12")
    init = f"lora.init={tmp_path / 'one' / 'run'}"
    file = run(lora_main, base, shape_clips, tmp_path / "two", init, *OF_THE_FILE)
    result = CliRunner().invoke(app, ["export", str(file), "--to=folded", f"--out={tmp_path / 'out'}"])
    message = str(result.exception)
    assert "does not say its alpha" in message
    assert message.endswith(f"give its folder: {tmp_path / 'two' / 'run'}")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("lora", "diffusers"),
        ("lokr", "diffusers"),
        pytest.param("oft", "peft", marks=pytest.mark.thorough),
    ],
)
def test_the_averages_of_a_checkpoint_are_exported_as_the_run_saves_them(
    kind: str,
    form: str,
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
) -> None:
    options = ["lora.rank=null", "lora.alpha=null"] if kind == "oft" else ["lora.rslora=true"] * (kind == "lora")
    base = tiny_checkpoints["cogvideox-2b"]
    more = ["train.ema=0.5", f"lora.kind={kind}", *options]
    file = run(lora_main, base, shape_clips, tmp_path, *more)
    output_dir = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(file), f"--to={form}", f"--out={output_dir}"])
    assert result.exit_code == 0, result.output
    (saved,) = (tmp_path / "run" / "adapter").glob("*.safetensors")
    (exported,) = output_dir.glob("*.safetensors")
    metadata = read_run_metadata(exported)
    assert (metadata["family"], metadata["steps"], metadata["video"]["height"]) == (
        "cogvideox",
        3,
        32,
    )
    assert "output" not in metadata
    saved_tensors, exported_tensors = load_file(saved), load_file(exported)
    assert saved_tensors.keys() == exported_tensors.keys()
    assert all(torch.equal(saved_tensors[name], exported_tensors[name]) for name in saved_tensors)
    raw, averages = load_file(file), load_file(file.with_name("ema.safetensors"))
    assert not any(torch.equal(raw[n.removeprefix("ema/")], average) for n, average in averages.items())
