"""`guard.gradient_every` compares gradients of a run with its loss, and changes nothing of a healthy run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import lines, same_adapter
from safetensors.torch import load_file

from dit_lora.commands.replay import replay_bundle
from dit_lora.commands.replayed_gradient import GradientReplayResult
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.guard.gradient_check.directions import WeightDisplacement
from dit_lora.training.recovery import build
from dit_lora.training.recovery.gradient_watch import PeriodicGradientCheck

Main = Callable[[list[str]], None]
LAYER = "transformer_blocks.1.attn1.to_v"


@pytest.fixture
def args(smoke: list[str]) -> list[str]:
    args = [*smoke, "train.steps=3", "train.batch_size=1", "train.accumulate=2", "lora.dropout=0.2"]
    return [*args, "guard.preflight=false", "train.save_every=3"]


class FaultyKernel:
    """A component that halves the gradient of one layer after a step, until it is off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after_step: int = 0) -> None:
        self.is_on = after_step == 0
        fallback = Fallback("qk_norm_rope", "kernel", self.disable_temporarily, self.disable, "PyTorch's own ops")
        monkeypatch.setattr(build, "list_fallbacks", lambda _model: [fallback])
        finish = PeriodicGradientCheck.__post_init__

        def plant(watch: PeriodicGradientCheck) -> None:
            finish(watch)
            for name, parameter in watch.setup.transformer.named_parameters():
                if parameter.requires_grad and name.startswith(LAYER):
                    parameter.register_hook(lambda gradient: gradient / 2 if self.is_on else gradient)

        monkeypatch.setattr(PeriodicGradientCheck, "__post_init__", plant)
        find_if_due = PeriodicGradientCheck.is_due

        def begin_after_step(watch: PeriodicGradientCheck, step: int) -> bool:
            self.is_on |= step == after_step and not watch.recovery.state.switched_off
            return find_if_due(watch, step)

        monkeypatch.setattr(PeriodicGradientCheck, "is_due", begin_after_step)

    def disable(self) -> None:
        self.is_on = False

    @contextmanager
    def disable_temporarily(self) -> Iterator[None]:
        self.is_on = False
        yield
        self.is_on = True


def read_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in lines(run, "events.jsonl") if event["kind"] == "gradient_check"]


def load_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.thorough
def test_a_faulty_component_is_off_from_the_first_step_and_the_run_is_as_if_unchecked(
    lora_main: Main,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean, repaired = tmp_path / "clean", tmp_path / "repaired"
    with monkeypatch.context() as patch:

        def fail(displacement: WeightDisplacement, position: int) -> float:
            move_to(displacement, position)
            raise TypeError("no such op")

        move_to = WeightDisplacement.move_weights_to_position
        patch.setattr(WeightDisplacement, "move_weights_to_position", fail)
        lora_main([*args, f"run.dir={clean}", "guard.gradient_every=2"])
    reason = "the gradient could not be checked against the loss: TypeError: no such op"
    assert f"guard: step 2: {reason}" in capsys.readouterr().err
    events = [(event["step"], event["action"], event["verdict"]["words"]) for event in read_events(clean)]
    assert events == [(1, "report", reason), (2, "report", reason)]
    FaultyKernel(monkeypatch)
    lora_main([*args, f"run.dir={repaired}", "guard.gradient_every=2"])
    (event,) = read_events(repaired)
    verdict = event["verdict"]
    assert (event["step"], event["action"], verdict["cause"], verdict["switch"]) == (
        1,
        "fallback",
        "kernel",
        "qk_norm_rope",
    )
    assert verdict["module"] == LAYER
    assert verdict["evidence"]["replays"] == ["differs"] * 3
    assert verdict["words"].endswith("; qk_norm_rope stays off for this run, and the step is repeated")
    output = capsys.readouterr()
    # The repeated step is checked again.
    assert "step 1: the gradient agrees with the loss" in output.out + output.err
    assert same_adapter(clean, repaired)
    first_state, second_state = (load_state(run / "checkpoints/step_000003") for run in (clean, repaired))
    assert len(first_state) > 30
    assert first_state.keys() == second_state.keys()
    assert all(torch.equal(first_state[name], second_state[name]) for name in first_state)


def test_a_run_goes_back_to_the_last_step_that_agreed_and_is_as_if_nothing_was_wrong(
    lora_main: Main,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean, repaired, warned = tmp_path / "clean", tmp_path / "repaired", tmp_path / "warned"
    args = [*args, "guard.gradient_every=2", "train.steps=4", "train.save_every=3", "train.ema=0.9"]
    lora_main([*args, f"run.dir={clean}"])
    with monkeypatch.context() as patch:
        FaultyKernel(patch, after_step=2)
        lora_main([*args, f"run.dir={repaired}"])
        (event,) = read_events(repaired)
        assert (event["step"], event["action"], event["verdict"]["module"]) == (4, "rollback", LAYER)
        text = "qk_norm_rope stays off for this run, and training goes back to step 1: the next 3 are repeated"
        assert event["verdict"]["words"].endswith(text)
        assert [line["step"] for line in lines(repaired, "metrics.jsonl")] == [1, 2, 3, 4]
        for folder in ("step_000003", "step_000004"):
            saved = [load_state(run / "checkpoints" / folder) for run in (clean, repaired)]
            assert len(saved[0]) > 30
            assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())
    # Without leave to roll back, the steps that may be wrong are named.
    FaultyKernel(monkeypatch, after_step=2)
    lora_main([*args, "guard.on_nonfinite=[fallback]", f"run.dir={warned}"])
    (event,) = read_events(warned)
    assert (event["step"], event["action"]) == (4, "fallback")
    text = "and the step is repeated; step 3 may have been trained with it"
    assert event["verdict"]["words"].endswith(text)
    assert not same_adapter(clean, warned)


@pytest.mark.thorough
def test_without_leave_to_fall_back_the_run_stops_and_keeps_what_was_trained(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FaultyKernel(monkeypatch, after_step=1)
    settings = ["guard.gradient_every=3", "guard.on_nonfinite=[stop]"]
    with pytest.raises(NonFiniteError, match=r"stopped, because guard\.on_nonfinite has no fallback") as stopped:
        lora_main([*args, *settings, f"run.dir={tmp_path / 'run'}"])
    assert "; step 2 may have been trained with it" in str(stopped.value)
    assert "step 2 is saved in checkpoints/step_000002" in str(stopped.value)
    assert len(load_state(tmp_path / "run/checkpoints/step_000002")) > 30
    (event,) = read_events(tmp_path / "run")
    assert (event["action"], event["verdict"]["cause"], kernel.is_on) == ("stop", "kernel", True)
    evidence = event["verdict"]["evidence"]
    assert (evidence["result"], evidence["along"]) == ("differs", "gradient")
    assert evidence["ratio"] > 1 + evidence["bound"]
    # The bundle's gradient is as wrong here, and the one computed here agrees: the fault is not planted in a replay.
    replayed = replay_bundle(tmp_path / "run" / event["bundle"])
    assert isinstance(replayed, GradientReplayResult)
    recorded = replayed.recorded
    assert recorded.worst is not None
    assert (recorded.worst.ratio, recorded.worst.bound) == (evidence["ratio"], evidence["bound"])
    assert recorded.location is not None
    assert recorded.location.layer == event["verdict"]["module"] == LAYER
    assert (replayed.computed.result, len(replayed.sample_ids)) == ("agrees", 2)
    assert replayed.record()["recorded_gradient"]["module"] == LAYER
    assert "recorded gradient: the gradient is wrong: along the gradient, the slope" in replayed.format_text()
    # With a component off, only the gradient computed here counts.
    assert replayed.diagnosis is not None
    assert replay_bundle(tmp_path / "run" / event["bundle"], fp32=True).diagnosis is None
