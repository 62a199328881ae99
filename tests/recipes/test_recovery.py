"""Runs that meet a fault and go on: they end with exactly the adapter of a run that never had it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import lines, same_adapter, trajectory
from safetensors.torch import load_file

from benchmarks.faults.media.cache import overwrite
from dit_lora.commands.replay import replay_bundle
from dit_lora.data.cache.cache import TensorCache
from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser
from dit_lora.guard.fallbacks import preserve_attention_backends
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.numerics.objectives import LossOutput
from dit_lora.training.recovery.monitoring import StepMonitor

Main = Callable[[list[str]], None]
WEIGHT = "transformer_blocks.1.attn1.to_k.lora_B.default.weight"


class WeightFault:
    """A trained weight that goes bad in memory when a step begins, each time that step is in `steps`."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: Iterable[int]) -> None:
        self.left = list(steps)
        forward, losses = StepMonitor.record_forward_outputs, CogVideoXDenoiser.losses
        due: list[int] = []

        def begin(watcher: StepMonitor, step: int) -> Any:
            due.append(step)
            return forward(watcher, step)

        def faulty(checkpoint: Any, transformer: Any, *arguments: Any) -> LossOutput:
            step = due.pop() if due else 0  # the first micro-step's call, and no replay's
            if step in self.left:
                self.left.remove(step)
                transformer.get_parameter(WEIGHT).data[0, 0] = torch.nan
            return losses(checkpoint, transformer, *arguments)

        patch.setattr(StepMonitor, "record_forward_outputs", begin)
        patch.setattr(CogVideoXDenoiser, "losses", faulty)


@pytest.mark.parametrize(("seed", "times"), [(12, 1), (42, 2)])
def test_a_nan_in_one_cached_latent_ends_as_a_run_on_a_folder_without_the_clip(  # type: ignore[no-untyped-def]
    lora_main: Main, poisoned, without, bad_clip: str, tmp_path: Path, seed: int, times: int
) -> None:
    """Also where one step holds the clip twice, as the last of an epoch and the first of the next."""
    run, never = tmp_path / "run", tmp_path / "never"
    args = [*poisoned, f"train.seed={seed}"]
    lora_main([*args, f"run.dir={run}"])
    lora_main([*args, without, f"run.dir={never}"])
    assert same_adapter(run, never)
    assert trajectory(run) == trajectory(never)
    assert not (never / "events.jsonl").exists()
    events = lines(run, "events.jsonl")
    assert [(e["step"], e["action"]) for e in events] == [(3, "quarantine")] * times
    for event in events:
        assert event["sample_ids"] == [bad_clip]
        assert event["verdict"]["cause"] == "data"
        assert "latent_mean has 1 NaN" in event["verdict"]["words"]
    (record,) = lines(run, "quarantine.jsonl")
    assert (record["sample_id"], record["from_epoch"], record["to_epoch"]) == (bad_clip, 0, None)
    assert len(list((tmp_path / "cache" / "videos").rglob("*.bad"))) == 1


@pytest.mark.parametrize("stopped_at", [2, 4])
def test_interrupted_before_or_after_the_bad_clip_it_ends_the_same(  # type: ignore[no-untyped-def]
    lora_main: Main, poisoned: list[str], without: str, tmp_path: Path, stopped_at: int
) -> None:
    run, never = tmp_path / "run", tmp_path / "never"
    lora_main([*poisoned, f"run.dir={run}", f"train.steps={stopped_at}"])
    lora_main([*poisoned, f"run.dir={run}", "train.resume=auto"])
    lora_main([*poisoned, without, f"run.dir={never}"])
    assert same_adapter(run, never)
    assert trajectory(run) == trajectory(never)
    assert len(lines(run, "events.jsonl")) == 1


def test_an_earlier_runs_quarantine_leaves_the_sample_out_from_the_start(
    lora_main: Main, poisoned: list[str], without: str, bad_clip: str, tmp_path: Path
) -> None:
    """Only what was left out for good; and the new run keeps a list of its own, which a resume goes on with."""
    earlier, run, never = (tmp_path / name for name in ("first", "run", "never"))
    lora_main([*poisoned, f"run.dir={earlier}"])
    record = lines(earlier, "quarantine.jsonl")[0]
    once = {**record, "sample_id": "00_red_disc.mp4", "from_epoch": 0, "to_epoch": 0}
    quarantine_file = tmp_path / "given.jsonl"
    quarantine_file.write_text(f"{json.dumps({**record, 'from_epoch': 2})}\n{json.dumps(once)}\n")
    seeded = [*poisoned, f"run.dir={run}", f"guard.quarantine={quarantine_file}"]
    lora_main([*seeded, "train.steps=5"])
    assert [r["sample_id"] for r in lines(run, "quarantine.jsonl")] == [bad_clip]
    quarantine_file.unlink()
    lora_main([*seeded, "train.resume=auto"])
    lora_main([*poisoned, without, f"run.dir={never}"])
    assert same_adapter(run, never)
    assert not (run / "events.jsonl").exists()


def test_without_budget_it_stops_with_exit_code_3_and_the_last_good_step(
    lora_main: Main, poisoned: list[str], without: str, bad_clip: str, tmp_path: Path
) -> None:
    run, never = tmp_path / "run", tmp_path / "never"
    with pytest.raises(NonFiniteError, match=bad_clip) as error:
        lora_main([*poisoned, f"run.dir={run}", "guard.max_skips=0"])
    assert error.value.exit_code == 3
    assert lines(run, "events.jsonl")[0]["action"] == "stop"
    assert not (run / "adapter").exists()
    assert not (run / "quarantine.jsonl").exists()
    lora_main([*poisoned, without, f"run.dir={never}", "train.save_every=2", "train.keep=9"])
    weights = "checkpoints/step_000002/trainable.safetensors"
    assert (run / weights).read_bytes() == (never / weights).read_bytes()


def test_the_skips_of_a_run_count_on_after_a_resume(lora_main: Main, poisoned: list[str], tmp_path: Path) -> None:
    run = [*poisoned, f"run.dir={tmp_path / 'run'}", "guard.max_skips=1"]
    lora_main([*run, "train.steps=4"])
    state = tmp_path / "run" / "checkpoints" / "step_000004" / "state.json"
    assert json.loads(state.read_text())["guard"]["policy"]["skips"] == 1
    for entry in list(TensorCache(tmp_path / "cache" / "videos").iter_entries()):
        overwrite(entry, "latent_mean", 0, torch.zeros(2))  # what is left of it is not what was
    with pytest.raises(NonFiniteError) as error:
        lora_main([*run, "train.resume=auto"])
    assert error.value.exit_code == 3


@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_a_weight_that_goes_bad_is_rolled_back_and_no_bit_of_it_stays(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: str
) -> None:
    """In step 6, whose snapshot is of step 4; step 5 is taken twice and written once."""
    run, clean = tmp_path / "run", tmp_path / "clean"
    args = [*args, f"train.ema={ema}"]
    lora_main([*args, f"run.dir={clean}"])
    fault = WeightFault(monkeypatch, [6])
    lora_main([*args, f"run.dir={run}"])
    assert not fault.left
    assert len(lines(run, "events.jsonl")) == 2  # of each micro-batch
    for event in lines(run, "events.jsonl"):
        assert (event["step"], event["action"]) == (6, "rollback")
        assert event["verdict"]["cause"] == "weights"
        assert WEIGHT in event["verdict"]["words"]
    assert same_adapter(run, clean)
    assert trajectory(run) == trajectory(clean)
    assert [m["samples"] for m in lines(run, "metrics.jsonl")] == list(range(2, 20, 2))


def test_a_lowered_learning_rate_and_what_was_spent_survive_a_resume(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad twice at step 5: the second rollback goes further back, to step 2, and halves the rates."""
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    with monkeypatch.context() as patch:
        WeightFault(patch, [5, 5])
        lora_main([*args, f"run.dir={uninterrupted}"])
    with monkeypatch.context() as patch:
        WeightFault(patch, [5, 5])
        lora_main([*args, f"run.dir={parts}", "train.steps=6"])
    lora_main([*args, f"run.dir={parts}", "train.resume=auto"])
    assert [m["lr"] for m in lines(parts, "metrics.jsonl")] == [1e-3] * 2 + [5e-4] * 7
    assert trajectory(parts) == trajectory(uninterrupted)
    assert same_adapter(parts, uninterrupted)
    guard = json.loads((parts / "checkpoints/step_000009/state.json").read_text())["guard"]
    assert guard["state"] == {"lr_scale": 0.5, "switched_off": []}
    assert guard["policy"] == {"skips": 0, "rollbacks": 2, "last_rollback_step": 5}
    WeightFault(monkeypatch, [10])
    with pytest.raises(NonFiniteError) as error:
        lora_main([*args, f"run.dir={parts}", "train.resume=auto", "train.steps=11"])
    assert error.value.exit_code == 3


def test_a_rollback_removes_the_checkpoints_of_the_trajectory_that_it_leaves(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume after a kill must not find the steps taken at the old learning rate."""
    run = tmp_path / "run"
    WeightFault(monkeypatch, [6, 6, 6])
    options = ["guard.snapshot_every=4", "train.save_every=1", "train.keep=9"]
    with pytest.raises(NonFiniteError):
        lora_main([*args, f"run.dir={run}", *options])
    scales = {
        path.parent.name: json.loads(path.read_text())["guard"]["state"]["lr_scale"]
        for path in (run / "checkpoints").rglob("state.json")
    }
    assert scales == {f"step_{step:06d}": 0.5 for step in range(1, 6)}


def test_a_stop_never_saves_weights_that_ran_away_as_those_of_the_step_before(
    lora_main: Main, args: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    high = ["optim.groups.adapter.lr=1e3", "optim.clip=null", "guard.on_nonfinite=[stop]"]
    with pytest.raises(NonFiniteError, match="diverged weights"):
        lora_main([*args, *high, f"run.dir={run}"])
    for path in (run / "checkpoints").rglob("trainable.safetensors"):
        assert max(tensor.abs().max().item() for tensor in load_file(path).values()) < 100


def broken_flash(patch: pytest.MonkeyPatch) -> None:
    """An attention backend that gives one NaN, as long as it is on."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def faulty(*arguments: Any, **options: Any) -> torch.Tensor:
        output = attention(*arguments, **options)
        if output.requires_grad and torch.backends.cuda.flash_sdp_enabled():
            output = output.contiguous().clone()
            output.view(-1)[0] = torch.nan
        return output

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", faulty)


def test_a_backend_that_was_switched_off_stays_off_after_a_resume(
    lora_main: Main,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    broken_flash(monkeypatch)
    with preserve_attention_backends():
        lora_main([*args, f"run.dir={uninterrupted}"])
    with preserve_attention_backends():
        lora_main([*args, f"run.dir={parts}", "train.steps=4"])
    with preserve_attention_backends():
        lora_main([*args, f"run.dir={parts}", "train.resume=auto"])
        assert not torch.backends.cuda.flash_sdp_enabled()
    for event in lines(parts, "events.jsonl"):
        assert (event["step"], event["action"]) == (1, "fallback")
        assert event["verdict"]["switch"] == "attention:flash"
    assert "attention:flash stays off, because it was faulty" in capsys.readouterr().err
    assert same_adapter(parts, uninterrupted)


def test_a_bundle_of_bad_weights_holds_them(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WeightFault(monkeypatch, [6])
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    event = lines(tmp_path / "run", "events.jsonl")[0]
    replayed = replay_bundle(tmp_path / "run" / event["bundle"])
    assert replayed.diagnosis is not None
    assert replayed.diagnosis.cause == event["verdict"]["cause"] == "weights"


@pytest.mark.slow
@pytest.mark.thorough  # every engine does in test_topologies.py
def test_two_ranks_leave_the_sample_out_and_end_as_two_ranks_without_it(  # type: ignore[no-untyped-def]
    launch, poisoned: list[str], without: str, bad_clip: str, tmp_path: Path
) -> None:
    run, never = tmp_path / "run", tmp_path / "never"
    split = ["train.accumulate=1", "train.seed=2"]  # the clip comes to rank 1
    result = launch([*poisoned, *split, f"run.dir={run}"], ranks=2)
    assert result.returncode == 0, result.stderr
    result = launch([*poisoned, *split, without, f"run.dir={never}"], ranks=2)
    assert result.returncode == 0, result.stderr
    assert same_adapter(run, never)
    assert trajectory(run) == trajectory(never)
    (event,) = lines(run, "events.jsonl")
    assert (event["rank"], event["sample_ids"]) == (1, [bad_clip])
    assert (run / event["bundle"] / "bundle.json").exists()
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
