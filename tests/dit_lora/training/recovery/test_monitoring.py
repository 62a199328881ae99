"""What looks at every step: statistics in metrics.jsonl, spikes as events, and the clip that they give."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.spikes import SpikeDetector
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.distributed import engine as engine_module
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.verify.output_fingerprint import SEED

Main = Callable[[list[str]], None]
WATCHED = ["guard.spike_window=20", "train.batch_size=1", "guard.preflight=false"]


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def line(norm: float, loss: float = 1.0) -> dict[str, Any]:
    """As much of a line of metrics.jsonl as spikes are looked for in."""
    return {"grad_norm_groups": {"adapter": norm}, "loss_by_timestep": {"0-249": loss}}


def watcher(**parts: Any) -> StepMonitor:
    return StepMonitor(Snapshots(lambda: {}, interval_steps=10), **parts)


def test_a_watcher_without_parts_does_nothing() -> None:
    idle_watcher = watcher()
    with idle_watcher.record_forward_outputs(50):
        pass
    idle_watcher.collect_gradient_statistics(50)
    idle_watcher.before_update(50)
    idle_watcher.after_update(50)
    assert idle_watcher.get_clip_bound("adapter") is None
    assert idle_watcher.collect_statistics(50) is None
    assert idle_watcher.find_hidden_infinities(50) == []
    assert idle_watcher.find_metric_spikes(line(1.0)) == []


def test_statistics_are_of_the_steps_that_are_due_and_of_no_other() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watched = watcher(monitor=Monitor(model, interval_steps=3))
    for step in (1, 2, 3, 4):
        with watched.record_forward_outputs(step):
            output = model(torch.ones(1, 2))
        output.sum().backward()
        watched.collect_gradient_statistics(step)
        watched.before_update(step)
        optimizer.step()
        watched.after_update(step)
        optimizer.zero_grad()
        statistics = watched.collect_statistics(step)
        if step != 3:
            assert statistics is None
            continue
        assert statistics is not None
        assert set(statistics["1"]) == {"grad_norm", "update_ratio", "abs_max", "headroom"}


def test_the_watcher_waits_for_a_snapshot_before_the_weights_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(Snapshots, "before_update", lambda self: waited.append("snapshot"))
    watcher().before_update(1)
    assert waited == ["snapshot"]


def test_spikes_are_told_of_losses_by_timestep_and_of_norms_by_group() -> None:
    watched = watcher(spikes=SpikeDetector(window=20, threshold=5))
    watched.replace_history(line(1.0 + 0.01 * (k % 3), 2.0 + 0.01 * (k % 3)) for k in range(20))
    assert watched.find_metric_spikes(line(1.0, 2.0)) == []
    spikes = watched.find_metric_spikes(line(9.0, 8.0))
    assert [spike.name for spike in spikes] == ["loss 0-249", "grad_norm adapter"]
    assert "grad_norm adapter 9 is" in spikes[1].message


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_clip_is_the_detectors_limit_where_it_is_asked_for_and_known(adaptive: bool) -> None:
    detector = SpikeDetector(window=20, threshold=5)
    watched = watcher(spikes=detector, adaptive_clip=adaptive)
    assert watched.get_clip_bound("adapter") is None  # in the warm-up
    watched.replace_history(line(1.0 + 0.01 * (k % 3)) for k in range(20))
    limit = detector.get_spike_limit("grad_norm adapter")
    assert limit is not None
    assert 1.0 < limit < 1.2
    assert watched.get_clip_bound("adapter") == (limit if adaptive else None)
    assert watched.get_clip_bound("connector") is None


def test_statistics_of_modules_are_in_metrics_at_the_asked_steps(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    """In the others not, and with 0 never; no bit of the training changes."""
    runs = [tmp_path / name for name in ("every", "never")]
    for run, interval in zip(runs, (2, 0), strict=True):
        args = [f"guard.monitor_every={interval}", "train.steps=5", f"run.dir={run}"]
        lora_main([*smoke, *args])
    watched, never = map(lines, runs)
    assert [m["step"] for m in watched if "modules" in m] == [2, 4]
    assert not any("modules" in m for m in never)
    modules = watched[1]["modules"]
    layer = modules["transformer_blocks.0.attn1.to_q"]
    assert set(layer) == {"grad_norm", "update_ratio", "abs_max", "headroom"}
    assert 0 < layer["update_ratio"] < 1
    total = sum(values.get("grad_norm", 0.0) ** 2 for values in modules.values()) ** 0.5
    assert total == pytest.approx(watched[1]["grad_norm"], rel=1e-3)  # before clipping
    weights = "checkpoints/step_000005/trainable.safetensors"
    assert (runs[0] / weights).read_bytes() == (runs[1] / weights).read_bytes()


def spiking(patch: pytest.MonkeyPatch, at: int, factor: float) -> None:
    """The loss of one call, counted from 1, multiplied; memory counting and base fingerprints are not calls."""
    losses, calls = CogVideoXDenoiser.losses, []

    def changed(self: Any, transformer: Any, batch: Any, streams: RandomStreams) -> LossOutput:
        output = losses(self, transformer, batch, streams)
        if isinstance(output.losses, FakeTensor) or streams.seed == SEED:
            return output
        calls.append(1)
        worst = factor if len(calls) == at else 1.0
        return output._replace(losses=output.losses * worst)

    patch.setattr(CogVideoXDenoiser, "losses", changed)


def test_a_spike_is_an_event_and_training_goes_on(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    spiking(monkeypatch, at=25, factor=100.0)
    args = ["guard.spike_threshold=30", "train.steps=27", f"run.dir={run}"]
    lora_main([*smoke, *WATCHED, *args])
    (event,) = lines(run, "events.jsonl")
    assert (event["step"], event["kind"], event["action"]) == (25, "spike", "report")
    assert event["verdict"]["words"].startswith("grad_norm adapter")
    assert set(event) == {*("step", "micro_step", "rank", "kind", "sample_ids", "verdict", "action", "seconds")}
    assert len(lines(run)) == 27


@pytest.mark.parametrize(("clip", "smaller"), [("1.0", "limit"), ("0.01", "clip"), ("null", "limit")])
def test_the_adaptive_clip_is_the_smaller_of_the_recipes_and_the_limit(  # type: ignore[no-untyped-def]
    lora_main: Main, smoke, tmp_path: Path, monkeypatch, clip: str, smaller: str
) -> None:
    """At a spike in step 25, whose gradient is a hundred times the usual."""
    spiking(monkeypatch, at=25, factor=100.0)
    clipped: list[float] = []
    step = engine_module.take_step_unless_bad

    def spy(optimizer: Any, bad: torch.Tensor) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        clipped.append(torch.nn.utils.get_total_norm(gradients).item())
        step(optimizer, bad)

    monkeypatch.setattr(engine_module, "take_step_unless_bad", spy)
    run = tmp_path / "run"
    args = ["guard.spike_threshold=10", "guard.adaptive_clip=true", f"optim.clip={clip}"]
    lora_main([*smoke, *WATCHED, *args, "train.steps=25", f"run.dir={run}"])
    norms = [m["grad_norm"] for m in lines(run)]
    detector = SpikeDetector(window=20, threshold=10)
    for norm in norms[:24]:
        detector.add_value_and_detect("adapter", norm)
    limit = detector.get_spike_limit("adapter")
    assert limit is not None
    assert norms[24] > 1.0 > limit
    assert clipped[24] == pytest.approx(limit if smaller == "limit" else 0.01, rel=1e-3)
    usual = [min(norm, 0.01) if smaller == "clip" else norm for norm in norms[:24]]
    assert clipped[:24] == pytest.approx(usual, rel=1e-3)


def test_a_resumed_run_clips_as_the_uninterrupted_one(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    """The detector has seen the earlier lines; in its warm-up, and past it, to the last bit."""
    tight = ["guard.spike_threshold=0.1", "guard.adaptive_clip=true", "lora.dropout=0.2"]
    common = [*smoke, *WATCHED, *tight]
    lora_main([*common, "train.steps=34", f"run.dir={tmp_path / 'whole'}"])
    parts = [*common, f"run.dir={tmp_path / 'parts'}"]
    lora_main([*parts, "train.steps=11"])
    lora_main([*parts, "train.steps=27", "train.resume=auto"])
    lora_main([*parts, "train.steps=34", "train.resume=auto"])
    lora_main([*smoke, *WATCHED, tight[2], "train.steps=34", f"run.dir={tmp_path / 'plain'}"])
    uninterrupted, repeated, plain = (
        load_file(tmp_path / name / "checkpoints/step_000034/trainable.safetensors")
        for name in ("whole", "parts", "plain")
    )
    assert all(torch.equal(uninterrupted[name], repeated[name]) for name in uninterrupted)
    assert not all(torch.equal(uninterrupted[name], plain[name]) for name in uninterrupted)  # it did clip
    events = [lines(tmp_path / name, "events.jsonl") for name in ("whole", "parts")]
    assert events[0] == events[1] != []


def test_a_rollback_forgets_what_was_observed_of_the_steps_that_it_undoes(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their norms would count twice, and the clip would be another."""
    tight = ["guard.spike_threshold=0.1", "guard.adaptive_clip=true", "guard.snapshot_every=10"]
    common = [*smoke, *WATCHED, *tight, "train.steps=34"]
    lora_main([*common, f"run.dir={tmp_path / 'clean'}"])
    losses, calls = CogVideoXDenoiser.losses, []

    def poisoning(self: Any, transformer: Any, *arguments: Any) -> LossOutput:
        calls.append(1)
        if len(calls) == 30:
            next(p for p in transformer.parameters() if p.requires_grad).data[0, 0] = torch.nan
        return losses(self, transformer, *arguments)

    monkeypatch.setattr(CogVideoXDenoiser, "losses", poisoning)
    lora_main([*common, f"run.dir={tmp_path / 'run'}"])
    assert [e["step"] for e in lines(tmp_path / "run", "events.jsonl") if e["action"] == "rollback"]
    weights = "checkpoints/step_000034/trainable.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (tmp_path / "clean" / weights).read_bytes()
