"""Samples from a second checkpoint: its own transformer, VAE and text encoder, with the trained adapter in it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import lines, same_adapter

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.training.tasks.diffusion import validation

Main = Callable[[list[str]], None]
SHOWN = ["validation.prompts=[a red square]", "validation.inference_steps=2", "validation.seed=3"]


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights of its own in every component."""
    folder = tmp_path_factory.mktemp("turbo") / "tiny-turbo"
    get_family("cogvideox").build_tiny_checkpoint("cogvideox-5b", folder, 7)
    return folder


@pytest.mark.parametrize(
    "further",
    [
        pytest.param(["train.ema=0.5"], marks=pytest.mark.thorough),
        ["model.quantize=int8", "guard.preflight=false", "data.caption_dropout=0.3"],
        ["train.offload=group", "train.checkpointing=full", "validation.guidance_scale=0"],
    ],
)
def test_samples_are_those_of_the_stock_pipeline_of_the_second_with_the_adapter(
    lora_main: Main, smoke: list[str], turbo: Path, tmp_path: Path, further: list[str]
) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    common = [*smoke, *SHOWN, *further, "train.steps=2", "validation.eval_draws=1"]
    lora_main([*common, f"run.dir={plain}"])
    lora_main([*common, f"validation.model={turbo}", f"run.dir={run}"])
    # Nothing of it reaches training, or the eval loss.
    assert same_adapter(run, plain)
    assert [line["eval_loss"] for line in lines(run, "eval_loss.jsonl")] == [
        line["eval_loss"] for line in lines(plain, "eval_loss.jsonl")
    ]
    guidance = 0.0 if "validation.guidance_scale=0" in further else 6.0
    samples = {step: run / "samples" / f"step_{step:06d}" / "prompt_00.mp4" for step in (0, 2)}
    if "model.quantize=int8" in further:  # whose rounding no stock pipeline repeats
        plain_sample = plain / "samples" / "step_000002" / "prompt_00.mp4"
        assert samples[0].read_bytes() != samples[2].read_bytes() != plain_sample.read_bytes()
        return
    checkpoint = get_family("cogvideox").open(ModelConfig(family="cogvideox", path=str(turbo)))
    sampling = Sampling(VideoShape(9, 32, 48), 2, guidance, 3)
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    expected = checkpoint.sampler.generate(pipeline, checkpoint.sampler.prompt_kwargs("a red square"), sampling)
    assert samples[0].read_bytes() == write_sample(tmp_path / "base", expected, 8).read_bytes()
    sample_kwargs = {
        "inference_steps": 2,
        "guidance_scale": guidance,
        "seed": 3,
        "output_folder": tmp_path / "out",
    }
    (file,) = write_samples(SampleRequest(run, ("a red square",), model=str(turbo), **sample_kwargs))
    assert samples[2].read_bytes() == file.read_bytes() != samples[0].read_bytes()
    header = read_run_metadata(run / "adapter" / ADAPTER_FILE)
    assert header["samples_from"] == "tiny-turbo"
    assert str(tmp_path) not in json.dumps(header)


def test_it_is_held_while_samples_are_made_and_no_longer(
    lora_main: Main, smoke: list[str], turbo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    pipeline_refs: list[Any] = []
    write = validation._write_samples

    def noting(*args: Any) -> None:
        assert not any(pipeline_ref() is not None for pipeline_ref in pipeline_refs)
        write(*args)
        pipeline_refs.append(weakref.ref(args[-1]))

    monkeypatch.setattr(validation, "_write_samples", noting)
    args = [*smoke, *SHOWN, f"validation.model={turbo}", "train.steps=2", "validation.every=1"]
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    assert len(pipeline_refs) == 3


@pytest.fixture
def refused(lora_main: Main, smoke: list[str], tmp_path: Path) -> Callable[..., str]:
    def run(*overrides: str) -> str:
        with pytest.raises(DitLoraError) as error:
            lora_main([*smoke, *SHOWN, f"run.dir={tmp_path / 'run'}", *overrides])
        assert error.value.exit_code == 2
        assert not (tmp_path / "run").exists()
        return str(error.value)

    return run


@pytest.mark.usefixtures("nothing_encoded")
def test_another_architecture_is_refused_in_one_line(
    refused: Callable[..., str], tiny_checkpoints: dict[str, Path], turbo: Path, tmp_path: Path
) -> None:
    wider = Path(shutil.copytree(turbo, tmp_path / "wider"))
    config = json.loads((wider / "transformer" / "config.json").read_text())
    changed = {**config, "num_layers": 3, "_name_or_path": "elsewhere"}
    (wider / "transformer" / "config.json").write_text(json.dumps(changed))
    base = tiny_checkpoints["cogvideox-5b"]
    message = refused(f"validation.model={wider}")
    assert message == (f"validation.model: {wider} is of another architecture than {base}: num_layers 3, not 2")
    message = refused(f"validation.model={tiny_checkpoints['sana-600m']}")
    assert message.startswith("validation.model: ")
    assert "is a SanaPipeline checkpoint; family cogvideox trains" in message
    assert "\n" not in message
    message = refused("validation.model=./nowhere")
    assert message.startswith("validation.model: ./nowhere does not exist; give the folder of a Diffusers checkpoint")
    assert not (tmp_path / "cache").exists()


def test_what_has_no_adapter_alone_is_refused(refused: Callable[..., str], turbo: Path) -> None:
    second = f"validation.model={turbo}"
    assert "has no effect without validation.prompts" in refused(second, "validation.prompts=[]")
    message = refused(second, "optim.groups.connector.lr=1e-5")
    assert "use only the adapter, but " in message
    source = "{path: prior, caption: a, generate: 3}"
    data = "data.sources=[{path: clips}, " + source + "]"
    assert "generate them in a run without it first" in refused(second, "data.path=null", data)
    message = refused(second, "data.precompute=false")
    assert "has another text encoder than model.path" in message
