"""The main job, end to end: train, load in a stock pipeline, resume bit for bit, split a batch any way."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch_environment, started
from safetensors.torch import load_file

from benchmarks import kill_nine
from dit_lora.commands.sample import SampleRequest, write_samples
from dit_lora.config.load import load_recipe
from dit_lora.errors import DitLoraError

Main = Callable[[list[str]], None]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trajectory(run: Path) -> list[tuple[float, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["samples"]) for m in metrics(run)]


def state(run: Path, step: int) -> dict[str, bytes]:
    """Weights and optimizer of a checkpoint, byte for byte."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    return {n: (folder / n).read_bytes() for n in ("trainable.safetensors", "optimizer.safetensors")}


PLAIN_SCRIPT = """
import sys, torch
from diffusers import CogVideoXPipeline
model, adapter, inputs, out = sys.argv[1:]
pipe = CogVideoXPipeline.from_pretrained(model)
pipe.load_lora_weights(adapter)
with torch.no_grad():
    result = pipe.transformer(**torch.load(inputs, weights_only=True)).sample
torch.save(result, out)
assert not any(name.startswith("dit_lora") for name in sys.modules)
"""


@pytest.mark.parametrize("variant", [pytest.param("cogvideox-2b", marks=pytest.mark.thorough), "cogvideox-5b"])
def test_a_plain_diffusers_script_reproduces_the_trained_transformer(
    lora_main: Main,
    smoke: list[str],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    variant: str,
) -> None:
    """alpha 8, rank 4, dropout in training; the script imports nothing of ours."""
    from diffusers import CogVideoXPipeline

    from dit_lora.adapters.attach import attach_lora
    from dit_lora.config.recipe import ModelConfig
    from dit_lora.families import get_family

    path, run = tiny_checkpoints[variant], tmp_path / "run"
    args = [*smoke, f"model.path={path}", f"run.dir={run}", "train.steps=6", "lora.dropout=0.1"]
    lora_main(args)

    # The trained transformer, rebuilt from the last checkpoint.
    recipe = load_recipe(run / "config.yaml")
    family = get_family("cogvideox")
    transformer = family.open(ModelConfig(family="cogvideox", path=str(path))).denoiser.load_transformer(torch.float32)
    attach_lora(transformer, recipe.lora, family.lora_targets, seed=99)
    weights = load_file(run / "checkpoints" / "step_000006" / "trainable.safetensors")
    assert len(weights) == 16
    transformer.load_state_dict(weights, strict=False)
    transformer.eval()

    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 3, 4, 4, 6),
        "encoder_hidden_states": torch.randn(2, 226, 32),
        "timestep": torch.tensor([3, 900]),
    }
    if variant == "cogvideox-5b":
        pipe = CogVideoXPipeline.from_pretrained(path)
        inputs["image_rotary_emb"] = pipe._prepare_rotary_positional_embeddings(32, 48, 3, "cpu")
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [
        sys.executable,
        "-I",
        "-c",
        PLAIN_SCRIPT,
        path,
        run / "adapter",
        tmp_path / "inputs.pt",
    ]
    subprocess.run([*command, tmp_path / "out.pt"], check=True, env=launch_environment())
    with torch.no_grad():
        trained = transformer(**inputs).sample
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), trained)


def test_the_run_folder_holds_what_the_docs_say(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora_main(
        [
            *smoke,
            f"run.dir={run}",
            "train.steps=4",
            "train.save_every=2",
            "validation.prompts=[a, b]",
            "validation.eval_draws=2",
            "validation.every=2",
            "validation.inference_steps=2",
            "run.trackers=[tensorboard]",
        ]
    )
    files = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    assert files >= {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "eval_loss.jsonl",
        "adapter/pytorch_lora_weights.safetensors",
        "checkpoints/step_000002/manifest.json",
        "checkpoints/step_000004/manifest.json",
        *(f"samples/step_00000{s}/prompt_0{p}.mp4" for s in (0, 2, 4) for p in (0, 1)),
        "report.html",
    }
    assert any("tfevents" in name for name in files)
    assert load_recipe(run / "config.yaml").train.steps == 4
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == version("torch")
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["samples"] for line in lines] == [2, 4, 6, 8]
    assert all(line["lr"] == 1e-3 for line in lines)
    eval_losses = [json.loads(line) for line in (run / "eval_loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in eval_losses] == [0, 2, 4]
    assert eval_losses[-1]["eval_loss"] < eval_losses[0]["eval_loss"]
    # The adapter at a save gives the sample of that step.
    saved = run / "checkpoints" / "step_000002"
    (sample,) = write_samples(SampleRequest(saved, ("a",), inference_steps=2, output_folder=tmp_path / "samples"))
    assert sample.read_bytes() == (run / "samples" / "step_000002" / "prompt_00.mp4").read_bytes()


SPLITS = {
    "1 x 4": ["train.batch_size=1", "train.accumulate=4"],
    "2 x 2": ["train.batch_size=2", "train.accumulate=2"],
}


def test_a_batch_may_be_split_into_micro_steps(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    """Same losses and gradient norms as batch 4 x 1, within fp32 rounding; caption dropout included."""
    common = [*smoke, "train.steps=8", "data.caption_dropout=0.5", "optim.clip=0.02"]
    lora_main([*common, "train.batch_size=4", f"run.dir={tmp_path / 'whole'}"])
    expected = torch.tensor(trajectory(tmp_path / "whole"))
    for name, split in SPLITS.items():
        lora_main([*common, *split, f"run.dir={tmp_path / name}"])
        torch.testing.assert_close(torch.tensor(trajectory(tmp_path / name)), expected, rtol=1e-5, atol=0, msg=name)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_7_and_13_resumed_steps_equal_20(lora_main: Main, smoke: list[str], tmp_path: Path, accumulate: int) -> None:
    """Bit for bit: adapter, optimizer, metrics, in the middle of an epoch, with dropout everywhere."""
    common = [
        *smoke,
        f"train.accumulate={accumulate}",
        "lora.dropout=0.2",
        "data.caption_dropout=0.3",
        "optim.groups.connector.lr=1e-5",
        "optim.groups.adapter_b.lr=1e-2",
    ]
    lora_main([*common, "train.steps=20", f"run.dir={tmp_path / 'whole'}"])
    parts = [*common, f"run.dir={tmp_path / 'parts'}"]
    lora_main([*parts, "train.steps=7"])
    torch.manual_seed(123)  # what other code does to the global generator must not matter
    lora_main([*parts, "train.steps=20", "train.resume=auto"])
    assert state(tmp_path / "parts", 20) == state(tmp_path / "whole", 20)
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    adapters = [tmp_path / name / "adapter" for name in ("parts", "whole")]
    for file in ("pytorch_lora_weights.safetensors", "base_weights.safetensors"):
        resumed, uninterrupted = (load_file(adapter / file) for adapter in adapters)
        assert all(torch.equal(resumed[name], uninterrupted[name]) for name in {**resumed, **uninterrupted})


@pytest.mark.slow
def test_kill_9_at_any_moment_then_resume_equals_the_undisturbed_run(smoke: list[str], tmp_path: Path) -> None:
    """As `python -m benchmarks.kill_nine` does a hundred times, and on two ranks too."""
    trial = kill_nine.Trial(
        kill_nine.load_script().main,
        [*smoke, *kill_nine.SETTINGS],
        tmp_path,
        steps=30,
        chance=random.Random(3),
    )
    kill_nine.play(trial, rounds=4, progress=False)
    assert trial.tally.failures == []
    assert trial.tally.kills.total() == 4
    assert trial.tally.ended >= 1


def written_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_and_the_resumed_run_equals_the_undisturbed_one(
    lora_main: Main, smoke: list[str], tmp_path: Path, number: int, code: int
) -> None:
    common = [*smoke, "train.steps=60", "train.save_every=1000", "train.batch_size=1"]
    run = tmp_path / "interrupted"
    process = started([*common, f"run.dir={run}"])
    while written_lines(run) < 5:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    result = process.wait()
    assert result.returncode == code
    assert "to continue, add train.resume=auto" in result.stderr
    assert "Traceback" not in result.stderr
    lora_main([*common, f"run.dir={run}", "train.resume=auto"])
    lora_main([*common, f"run.dir={tmp_path / 'whole'}"])
    assert state(run, 60) == state(tmp_path / "whole", 60)


def test_validation_does_not_touch_the_weights(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    """Eval loss and samples at every step change no bit of the training (N20)."""
    common = [*smoke, "train.steps=3", "lora.dropout=0.2"]
    lora_main([*common, f"run.dir={tmp_path / 'plain'}"])
    watched = ["validation.every=1", "validation.eval_draws=1", "validation.prompts=[x]"]
    lora_main([*common, *watched, "validation.inference_steps=1", f"run.dir={tmp_path / 'watched'}"])
    assert state(tmp_path / "watched", 3) == state(tmp_path / "plain", 3)


def test_an_untested_environment_is_refused_before_anything_is_written(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from dit_lora.training.session import session

    environment = session.probe_environment()
    newer = dataclasses.replace(environment, versions={**environment.versions, "peft": "1.0.0"})
    monkeypatch.setattr(session, "probe_environment", lambda: newer)
    args = [*smoke, f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    with pytest.raises(DitLoraError, match=r"peft>=0\.20,<1 is needed; got 1\.0\.0; pip install") as error:
        lora_main(args)
    assert "run.allow_untested=true" in str(error.value)
    assert not (tmp_path / "run").exists()
    lora_main([*args, "run.allow_untested=true"])
    assert (tmp_path / "run" / "adapter").is_dir()


def test_bf16_trains_with_fp32_adapters(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora_main(
        [
            *smoke,
            "model.dtype=bf16",
            "train.steps=3",
            f"run.dir={run}",
            "optim.groups.connector.lr=1e-5",
            "validation.prompts=[x]",
            "validation.eval_draws=2",
        ]
    )
    eval_losses = [json.loads(line) for line in (run / "eval_loss.jsonl").read_text().splitlines()]
    assert eval_losses[1]["eval_loss"] < eval_losses[0]["eval_loss"]
    assert (run / "samples" / "step_000003" / "prompt_00.mp4").is_file()
    weights = load_file(run / "checkpoints" / "step_000003" / "trainable.safetensors")
    assert all(tensor.dtype is torch.float32 for tensor in weights.values())
    assert all(torch.isfinite(torch.tensor(line[1:3])).all() for line in trajectory(run))


def test_gradient_checkpointing_gives_the_same_adapter(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    for mode in ("none", "selective", "full"):
        lora_main(
            [
                *smoke,
                f"train.checkpointing={mode}",
                "train.steps=4",
                "lora.dropout=0.2",
                f"run.dir={tmp_path / mode}",
            ]
        )
    assert state(tmp_path / "none", 4) == state(tmp_path / "full", 4)
    assert state(tmp_path / "none", 4) == state(tmp_path / "selective", 4)


def test_an_adapter_that_learned_nothing_is_refused(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(DitLoraError, match="every B matrix is zero") as error:
        lora_main([*smoke, "train.steps=2", f"run.dir={tmp_path / 'run'}"])
    assert error.value.exit_code == 1
    assert not (tmp_path / "run" / "adapter").exists()
