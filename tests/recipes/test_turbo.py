"""Z-Image-Turbo over a frozen adapter, as in its recipe: on in training, off in samples, and watched by the guard."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from family_cases.case import captioned_images
from launching import ROOT
from runs import adapter
from safetensors.torch import save_file

from benchmarks.faults.arms import parameter
from benchmarks.faults.fault import Expected, between_steps
from benchmarks.faults.target_table import targets_for
from benchmarks.faults.triggers import Element
from benchmarks.faults.world import World
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.video import write_sample
from dit_lora.families import get_family
from dit_lora.families.base import Sampling

Main = Callable[[list[str]], None]
PLANTED = "layers.1.attention.to_q.lora_B.under_0"


@pytest.fixture
def under(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> Path:
    """An adapter of the layers' attention and feed-forward with the authors' names, as ai-toolkit writes it."""
    family = get_family("z_image")
    path = str(tiny_checkpoints["z-image-turbo"])
    model = family.open(ModelConfig(family="z_image", path=path)).denoiser.load_transformer(torch.float32)
    generator, tensors = torch.Generator().manual_seed(4), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("layers."):
            for matrix, size in (("A", (3, module.in_features)), ("B", (module.out_features, 3))):
                weight = 0.2 * torch.randn(size, generator=generator)
                tensors[f"diffusion_model.{name}.lora_{matrix}.weight"] = weight
    assert len(tensors) == 2 * 2 * 8
    save_file(tensors, tmp_path / "training_adapter.safetensors")
    return tmp_path / "training_adapter.safetensors"


def test_turbo_trains_over_what_takes_the_distillation_back_and_samples_without_it(
    lora_main: Main, tiny_checkpoints: dict[str, Path], under: Path, tmp_path: Path, capsys: Any
) -> None:
    base, run = tiny_checkpoints["z-image-turbo"], tmp_path / "run"
    captioned_images(tmp_path / "images")
    common = [
        str(ROOT / "recipes" / "smoke" / "z_image.yaml"),
        f"model.path={base}",
        f"data.path={tmp_path / 'images'}",
        f"data.cache={tmp_path / 'cache'}",
        "validation.prompts=[a red disc]",
        "validation.inference_steps=2",
        "validation.guidance_scale=0",
        "train.steps=3",
    ]
    lora_main([*common, f"run.dir={tmp_path / 'alone'}"])
    assert "distilled: " in capsys.readouterr().err
    lora_main([*common, f"lora.under=[{json.dumps(str(under))}]", f"run.dir={run}"])
    assert "distilled: " not in capsys.readouterr().err

    first_evals = [
        json.loads((folder / "eval_loss.jsonl").read_text().splitlines()[0]) for folder in (run, tmp_path / "alone")
    ]
    assert first_evals[0]["eval_loss"] != pytest.approx(first_evals[1]["eval_loss"], rel=1e-4)
    trained = run / "adapter" / ADAPTER_FILE
    assert not any("under" in name or "feed_forward" in name for name in adapter(run))
    assert read_run_metadata(trained)["under"][0]["name"] == under.name
    assert json.loads((run / "verification.json").read_text())["passed"]
    # Samples are the stock pipeline's, with what trained and nothing else.
    checkpoint = get_family("z_image").open(ModelConfig(family="z_image", path=str(base)))
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    sampling = Sampling(VideoShape(1, 64, 96), 2, 0.0, 0)
    for step in (0, 3):
        if step:
            pipeline.load_lora_weights(trained.parent, weight_name=trained.name)
        frames = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a red disc"), sampling)
        sample = run / "samples" / f"step_{step:06d}" / "prompt_00.png"
        assert sample.read_bytes() == write_sample(tmp_path / f"{step}", frames, 8).read_bytes()


@pytest.mark.parametrize("value", [float("nan"), pytest.param(3e38, marks=pytest.mark.thorough)])
def test_what_is_planted_in_the_frozen_adapter_is_named(under: Path, tmp_path: Path, value: float) -> None:
    """The guard stops: no step, no batch and no kernel is blamed for it."""
    world = World(tmp_path / "world", Accelerator(cpu=True), targets_for("z-image-turbo"))
    world.reference("clean", ())  # encodes what it trains on
    expected = Expected("weights", "stop", ("frozen weight",), module=PLANTED, exit_code=3)
    overrides = (("lora.under", [{"path": str(under)}]),)
    sound = world.observe("sound", None, overrides)
    assert (sound.error, sound.events) == (None, [])
    find, change = parameter(f"{PLANTED}.weight"), Element(value)
    fault = between_steps("planted", "base", expected, find, change, overrides=overrides)
    result = fault.judge(world)
    assert result.passed, result
    assert f"{PLANTED}.weight" in result.verdict
