"""The adapter that each save leaves: the stock pipeline loads its folder and gives the sample of that step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXPipeline
from safetensors.torch import load_file
from typer.testing import CliRunner

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.cli.app import app
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.video import write_sample
from dit_lora.environment.safetensors_files import read_metadata
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.training.checkpoints.files import is_complete_checkpoint, list_checkpoints
from dit_lora.training.tasks.diffusion import task

Main = Callable[[list[str]], None]
PROMPT = "a red square"


def sample_with_stock_pipeline(base: Path, adapter: Path, output: Path) -> bytes:
    pipeline = CogVideoXPipeline.from_pretrained(base)
    pipeline.load_lora_weights(adapter)
    sampler = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=str(base))).sampler
    frames = sampler.generate(pipeline, sampler.prompt_kwargs(PROMPT), Sampling(VideoShape(9, 32, 48), 2, 6.0, 3))
    return write_sample(output, frames, 8).read_bytes()


def test_every_save_of_a_resumed_run_has_its_averages_as_a_lora(
    lora_main: Main, smoke: list[str], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    run, base = tmp_path / "run", tiny_checkpoints["cogvideox-5b"]
    every = ["train.save_every=2", "validation.every=2", "train.keep=1", "train.ema=0.5"]
    shown = [f"validation.prompts=[{PROMPT}]", "validation.inference_steps=2", "validation.seed=3"]
    common = [*smoke, *every, *shown, f"run.dir={run}"]
    lora_main([*common, "train.steps=4"])
    lora_main([*common, "train.steps=6", "train.resume=auto"])
    # The state of older steps is pruned, their adapters stay.
    assert list(list_checkpoints(run)) == [6]
    folders = sorted((run / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_000002", "step_000004", "step_000006"]
    assert [path.name for path in folders[0].iterdir()] == [ADAPTER_FILE]
    for folder in folders:
        sample = run / "samples" / folder.name / "prompt_00.mp4"
        assert sample.read_bytes() == sample_with_stock_pipeline(base, folder, tmp_path / "stock")
    # The last save is the result, but for the output that only `verify` reads.
    saved, result = folders[-1] / ADAPTER_FILE, run / "adapter" / ADAPTER_FILE
    averages = load_file(result)
    assert all(torch.equal(tensor, averages[name]) for name, tensor in load_file(saved).items())
    config = "lora_adapter_metadata"
    assert json.loads(read_metadata(saved)[config]) == json.loads(read_metadata(result)[config])
    assert read_run_metadata(saved) == {k: v for k, v in read_run_metadata(result).items() if k != "output"}
    assert read_run_metadata(folders[0] / ADAPTER_FILE)["steps"] == 2
    exported = CliRunner().invoke(app, ["export", str(folders[0]), "--to=diffusers", f"--out={tmp_path / 'out'}"])
    assert exported.exit_code == 0, exported.output
    first, copied = load_file(folders[0] / ADAPTER_FILE), load_file(tmp_path / "out" / ADAPTER_FILE)
    assert all(torch.equal(tensor, copied[name]) for name, tensor in first.items())


def test_an_adapter_that_cannot_be_written_costs_neither_the_state_nor_the_run(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save = task.save_adapter

    def fail_at_a_save(model: Any, pipeline: Any, folder: Path, *args: Any) -> Path:
        if folder.name != "adapter":
            (folder / ".staged").mkdir()
            raise RuntimeError("a converter does not know the model")
        return save(model, pipeline, folder, *args)

    monkeypatch.setattr(task, "save_adapter", fail_at_a_save)
    lora_main([*smoke, "train.steps=2", "train.save_every=1", f"run.dir={tmp_path / 'run'}"])
    warning = "warning: step 1 has no adapter: RuntimeError: a converter does not know the model; training continues"
    assert warning in capsys.readouterr().err
    checkpoints = list_checkpoints(tmp_path / "run")
    assert [is_complete_checkpoint(path) for path in checkpoints.values()] == [True, True]
    assert not (checkpoints[1] / ".staged").exists()
    assert (tmp_path / "run" / "adapter" / ADAPTER_FILE).is_file()
