"""The wiring of a run: every setting reaches what it sets, and validation only looks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import lines
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.faults.media.cache import overwrite
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.loading.batch import make_sample_seed
from dit_lora.errors import DitLoraError
from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams, derive_seed
from dit_lora.training.check_cache import REUSED
from dit_lora.verify.output_fingerprint import SEED

Main = Callable[[list[str]], None]
UNCOMPARED = ["guard.preflight=false", "guard.parity_every=0"]
"""Leaves only the forward passes of training and validation: comparisons of kernels, before and after, are off."""


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every call of the family's losses saw that computed them."""
    recorded_calls: list[dict[str, Any]] = []
    losses = CogVideoXDenoiser.losses

    def spy(self: Any, transformer: Any, batch: Any, streams: RandomStreams) -> LossOutput:
        counted = isinstance(batch["prompt_embeds"], FakeTensor)  # memory is, nothing computed
        if counted or streams.seed == SEED:  # or the result is noted, with made-up inputs
            return losses(self, transformer, batch, streams)
        recorded_calls.append(
            {
                "training": transformer.training,
                "grad": torch.is_grad_enabled(),
                "streams": (streams.seed, streams.sample_seeds),
                "text": batch["prompt_embeds"].clone(),
                "checkpointing": transformer.is_gradient_checkpointing,
                "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
        )
        return losses(self, transformer, batch, streams)

    monkeypatch.setattr(CogVideoXDenoiser, "losses", spy)
    return recorded_calls


def test_validation_looks_with_dropout_off_without_gradients_at_draws_of_its_own(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    shape_clips: Path,
    calls: list[dict[str, Any]],
) -> None:
    """Five clips, three draws each, of the base and after two training steps with heavy dropout."""
    run = tmp_path / "run"
    lora_main(
        [
            *smoke,
            f"run.dir={run}",
            "train.steps=2",
            "train.batch_size=1",
            "lora.dropout=0.9",
            "validation.eval_draws=3",
            *UNCOMPARED,
        ]
    )
    # Of the base once the first step is taken.
    training, before, after = [calls[0], calls[16]], calls[1:16], calls[17:]
    assert len(after) == 15
    for call in before + after:
        assert not call["training"]
        assert not call["grad"]
    assert all(call["training"] and call["grad"] for call in training)
    streams = [call["streams"] for call in before]
    assert streams == [call["streams"] for call in after]
    assert len(set(streams)) == 15
    assert {seed for seed, _ in streams} == {derive_seed(42, "held_out")}
    first_epoch = {(42, (make_sample_seed(path.name, 0),)) for path in shape_clips.glob("*.mp4")}
    training_streams = [call["streams"] for call in training]
    assert len(set(training_streams) & first_epoch) == 2


def test_checkpointing_and_cudnn_are_set(
    lora_main: Main, smoke: list[str], tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    for mode in ("full", "none", "selective"):
        calls.clear()
        args = [f"run.dir={tmp_path / mode}", "train.steps=1", f"train.checkpointing={mode}"]
        lora_main([*smoke, *UNCOMPARED, *args])
        assert {call["checkpointing"] for call in calls} == {mode != "none"}
        assert not any(call["cudnn"] for call in calls)


def test_deterministic_algorithms_are_those_of_the_run_alone_and_change_nothing_on_a_cpu(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    losses = []
    for deterministic in ("false", "true"):
        calls.clear()
        run = tmp_path / deterministic
        args = ["train.steps=2", f"train.deterministic={deterministic}", f"run.dir={run}"]
        lora_main([*smoke, *UNCOMPARED, *args])
        assert {call["deterministic"] for call in calls} == {deterministic == "true"}
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (deterministic == "true")
        assert not torch.are_deterministic_algorithms_enabled()
        losses.append([line["loss"] for line in metrics(run)])
    assert losses[0] == losses[1]


def test_an_op_without_a_deterministic_way_ends_the_run_by_its_name(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = CogVideoXDenoiser.losses

    def losses(self: Any, transformer: Any, batch: Any, streams: RandomStreams) -> LossOutput:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        return stock(self, transformer, batch, streams)

    monkeypatch.setattr(CogVideoXDenoiser, "losses", losses)
    with pytest.raises(DitLoraError, match=r"train.deterministic: PyTorch's put_ has no"):
        lora_main([*smoke, *UNCOMPARED, f"run.dir={tmp_path / 'run'}", "train.deterministic=true"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_caption_dropout_reaches_training(
    lora_main: Main, smoke: list[str], tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    for share, kinds in ((1.0, 1), (0.0, 5)):
        calls.clear()
        args = [f"data.caption_dropout={share}", "train.batch_size=1", "train.steps=5"]
        lora_main([*smoke, *UNCOMPARED, f"run.dir={tmp_path / str(share)}", *args])
        texts = {call["text"].numpy().tobytes() for call in calls}
        assert len(texts) == kinds


def test_each_groups_schedule_ends_with_the_run(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    lora_main(
        [
            *smoke,
            f"run.dir={run}",
            "train.steps=4",
            "optim.schedule=linear",
            "optim.groups.connector={lr: 1e-4, schedule: constant, warmup_steps: 2}",
        ]
    )
    rates = [line["lr_groups"] for line in metrics(run)]
    assert [r["adapter"] for r in rates] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [r["connector"] for r in rates] == pytest.approx([5e-5, 1e-4, 1e-4, 1e-4])


OTHER_TRAJECTORIES = {
    "train.seed=1": "train.seed",
    "train.batch_size=4": "train.batch_size x accumulate x processes",
    "train.accumulate=2": "train.batch_size x accumulate x processes",
    "data.caption_dropout=0.9": "data.caption_dropout",
    "data.fps=16": "data (digest of clips, captions and shape)",
    "model.dtype=bf16": "model.dtype",
    "model.path={other}": "model (digest of the transformer's files)",
    "lora.alpha=5": "lora.alpha",
    "optim.weight_decay=0.5": "optim.weight_decay",
    "optim.groups.adapter.lr=0.5": "optim.groups.adapter",
    "optim.schedule=linear": "train.steps",
}


def test_a_resume_that_would_change_the_trajectory_is_refused(
    lora_main: Main, smoke: list[str], tmp_path: Path, tiny_checkpoints: dict[str, Path]
) -> None:
    """And the run's own config.yaml stays as it was."""
    args = [*smoke, f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    lora_main(args)
    config = tmp_path / "run" / "config.yaml"
    before = config.read_bytes()
    for change, named in OTHER_TRAJECTORIES.items():
        override = change.format(other=tiny_checkpoints["cogvideox-2b"])
        with pytest.raises(DitLoraError, match="belongs to another recipe") as error:
            lora_main([*args, "train.resume=auto", override])
        assert named in str(error.value), change
        assert config.read_bytes() == before, change


def test_steps_may_grow_where_the_schedule_is_constant(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    run = [*smoke, f"run.dir={tmp_path / 'run'}"]
    lora_main([*run, "train.steps=1"])
    lora_main([*run, "train.steps=2", "train.resume=auto"])
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "against train.accumulate=1"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed precision fp16, against no by model.dtype"),
    ],
)
def test_a_launch_that_contradicts_the_recipe_is_refused(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    words: str,
) -> None:
    """Accelerate takes these from its launcher's environment, over what the script says."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(DitLoraError, match=words):
        lora_main([*smoke, f"run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_bad_clip_is_left_out_of_the_eval_loss_and_said(
    lora_main: Main, smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*smoke, "train.batch_size=1", "validation.held_out_draws=1"]  # the key of an earlier version
    lora_main([*args, "train.steps=1", f"run.dir={tmp_path / 'fill'}"])
    victim = min(TensorCache(tmp_path / "cache" / "videos").iter_entries(), key=lambda one: one.key)
    overwrite(victim, "latent_mean", 0, torch.tensor([torch.nan]))
    stop = "guard.on_nonfinite=[stop]"
    with pytest.raises(DitLoraError, match="non-finite loss"):
        lora_main([*args, "train.steps=5", f"run.dir={tmp_path / 'run'}", stop])
    output = capsys.readouterr().err
    assert output.count("eval loss: skipped") == 1
    assert output.count("note: validation.held_out_draws is now validation.eval_draws") == 2  # two runs
    line = json.loads((tmp_path / "run" / "eval_loss.jsonl").read_text().splitlines()[0])
    assert 0 < line["eval_loss"] < 10


def test_the_eval_loss_of_a_base_is_remembered_for_the_same_data_and_draws(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    """And that of a trained adapter is measured, always."""
    args = [*smoke, "train.steps=2", "guard.parity_every=0", "guard.preflight=true"]
    args += ["validation.eval_draws=2"]

    def losses(name: str, *settings: str) -> tuple[list[float], bool]:
        lora_main([*args, f"run.dir={tmp_path / name}", *settings])
        eval_losses = [line["eval_loss"] for line in lines(tmp_path / name, "eval_loss.jsonl")]
        phases = json.loads((tmp_path / name / "phases.json").read_text())
        return eval_losses, phases["reductions"].get("eval loss at step 0") == REUSED

    first_losses, was_known = losses("first")
    assert not was_known
    assert first_losses[0] != first_losses[1]
    repeated_losses, was_known = losses("again")
    assert was_known
    assert repeated_losses == first_losses
    other_seed_losses, was_known = losses("other", "train.seed=7")
    assert not was_known
    assert other_seed_losses[0] != first_losses[0]
    assert losses("anew", "guard.preflight=anew") == (first_losses, False)
    assert not losses("fewer", "validation.eval_clips=1")[1]
