"""Runs that meet a fault and go on: they end with exactly the adapter of a run that never had it."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_lora.errors import DitLoraError
from dit_lora.families.cogvideox import CogVideoXCheckpoint
from dit_lora.numerics.gate import NonFiniteError
from dit_lora.numerics.switches import kept_attention
from dit_lora.objectives import LossOutput
from dit_lora.training.replay import replay_bundle
from dit_lora.training.watch import StepWatcher

Main = Callable[[list[str]], None]
WEIGHT = "transformer_blocks.1.attn1.to_k.lora_B.default.weight"
BAD = 3  # of the five clips; first met in step 3 of two samples each


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "pytorch_lora_weights.safetensors")


def same_adapter(one: Path, other: Path) -> bool:
    first, second = adapter(one), adapter(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def trajectory(run: Path) -> list[tuple[float, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines(run, "metrics.jsonl")]


@pytest.fixture
def bad_clip(shape_clips: Path) -> str:
    return sorted(path.name for path in shape_clips.glob("*.mp4"))[BAD]


@pytest.fixture
def without(shape_clips: Path, tmp_path: Path, bad_clip: str) -> str:
    """The override that trains on a folder which never had the bad clip."""
    folder = Path(shutil.copytree(shape_clips, tmp_path / "without"))
    for path in folder.glob(f"{Path(bad_clip).stem}.*"):
        path.unlink()
    table = folder / "metadata.jsonl"
    kept = [line for line in table.read_text().splitlines(True) if bad_clip not in line]
    table.write_text("".join(kept))
    return f"data.path={folder}"


@pytest.fixture
def args(smoke: list[str]) -> list[str]:
    """Quick, and with everything that draws: dropout, caption dropout, two micro-steps."""
    return [
        *smoke,
        "train.steps=9",
        "train.seed=12",
        "train.batch_size=1",
        "train.accumulate=2",
        "lora.dropout=0.1",
        "guard.snapshot_every=2",
        "guard.preflight=false",
    ]


@pytest.fixture
def poisoned(lora_main: Main, args: list[str], tmp_path: Path, bad_clip: str) -> list[str]:
    """The arguments, with one NaN in one clip's cached latent."""
    lora_main([*args, "train.steps=1", f"run.dir={tmp_path / 'fill'}"])
    for path in (tmp_path / "cache" / "videos").rglob("*.safetensors"):
        with safe_open(path, framework="pt") as entry:
            metadata = entry.metadata()
        if metadata["sample"] == bad_clip:
            tensors = load_file(path)
            tensors["latent_mean"].view(-1)[7] = torch.nan
            save_file(tensors, path, metadata=metadata)
            return args
    raise AssertionError(f"no entry of {bad_clip}")


class WeightFault:
    """A trained weight that goes bad in memory when a step begins, each time that step is in `steps`."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: Iterable[int]) -> None:
        self.left = list(steps)
        forward, losses = StepWatcher.forward, CogVideoXCheckpoint.losses
        due: list[int] = []

        def begin(watcher: StepWatcher, step: int) -> Any:
            due.append(step)
            return forward(watcher, step)

        def faulty(checkpoint: Any, transformer: Any, *arguments: Any) -> LossOutput:
            step = due.pop() if due else 0  # the first micro-step's call, and no replay's
            if step in self.left:
                self.left.remove(step)
                transformer.get_parameter(WEIGHT).data[0, 0] = torch.nan
            return losses(checkpoint, transformer, *arguments)

        patch.setattr(StepWatcher, "forward", begin)
        patch.setattr(CogVideoXCheckpoint, "losses", faulty)


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
    first, run, never = (tmp_path / name for name in ("first", "run", "never"))
    lora_main([*poisoned, f"run.dir={first}"])
    record = lines(first, "quarantine.jsonl")[0]
    once = {**record, "sample_id": "00_red_disc.mp4", "from_epoch": 0, "to_epoch": 0}
    given = tmp_path / "given.jsonl"
    given.write_text(f"{json.dumps({**record, 'from_epoch': 2})}\n{json.dumps(once)}\n")
    seeded = [*poisoned, f"run.dir={run}", f"guard.quarantine={given}"]
    lora_main([*seeded, "train.steps=5"])
    assert [r["sample_id"] for r in lines(run, "quarantine.jsonl")] == [bad_clip]
    given.unlink()
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


def test_the_skips_of_a_run_count_on_after_a_resume(
    lora_main: Main, poisoned: list[str], tmp_path: Path
) -> None:
    run = [*poisoned, f"run.dir={tmp_path / 'run'}", "guard.max_skips=1"]
    lora_main([*run, "train.steps=4"])
    state = tmp_path / "run" / "checkpoints" / "step_000004" / "state.json"
    assert json.loads(state.read_text())["guard"]["policy"]["skips"] == 1
    entries = list((tmp_path / "cache" / "videos").rglob("*.safetensors"))
    for path in entries:
        path.write_bytes(path.read_bytes()[:-5] + b"\x00" * 5)  # what is left of it is not what was
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
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with monkeypatch.context() as patch:
        WeightFault(patch, [5, 5])
        lora_main([*args, f"run.dir={whole}"])
    with monkeypatch.context() as patch:
        WeightFault(patch, [5, 5])
        lora_main([*args, f"run.dir={parts}", "train.steps=6"])
    lora_main([*args, f"run.dir={parts}", "train.resume=auto"])
    assert [m["lr"] for m in lines(parts, "metrics.jsonl")] == [1e-3] * 2 + [5e-4] * 7
    assert trajectory(parts) == trajectory(whole)
    assert same_adapter(parts, whole)
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
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    broken_flash(monkeypatch)
    with kept_attention():
        lora_main([*args, f"run.dir={whole}"])
    with kept_attention():
        lora_main([*args, f"run.dir={parts}", "train.steps=4"])
    with kept_attention():
        lora_main([*args, f"run.dir={parts}", "train.resume=auto"])
        assert not torch.backends.cuda.flash_sdp_enabled()
    for event in lines(parts, "events.jsonl"):
        assert (event["step"], event["action"]) == (1, "fallback")
        assert event["verdict"]["switch"] == "attention:flash"
    assert "attention:flash stays off: an earlier verdict" in capsys.readouterr().err
    assert same_adapter(parts, whole)


@pytest.fixture
def bundle(lora_main: Main, poisoned: list[str], tmp_path: Path) -> Path:
    lora_main([*poisoned, f"run.dir={tmp_path / 'run'}", "lora.dropout=0.3"])
    (event,) = lines(tmp_path / "run", "events.jsonl")
    return tmp_path / "run" / event["bundle"]


def test_a_bundle_comes_to_the_recorded_verdict_here_and_elsewhere(
    bundle: Path, bad_clip: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    here = replay_bundle(bundle)
    elsewhere = Path(shutil.copytree(bundle, tmp_path / "mail" / "attached"))
    there = replay_bundle(elsewhere, model=str(tiny_checkpoints["cogvideox-5b"]))
    for replayed in (here, there):
        assert replayed.verdict is not None
        assert replayed.verdict.cause == replayed.recorded["verdict"]["cause"] == "data"
        assert replayed.verdict.sample_ids == (bad_clip,)
        assert not replayed.notes
    with pytest.raises(DitLoraError, match="cogvideox-5b"):
        replay_bundle(elsewhere)  # its base model is named without its folders


def test_a_bundle_of_bad_weights_holds_them(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WeightFault(monkeypatch, [6])
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    event = lines(tmp_path / "run", "events.jsonl")[0]
    replayed = replay_bundle(tmp_path / "run" / event["bundle"])
    assert replayed.verdict is not None
    assert replayed.verdict.cause == event["verdict"]["cause"] == "weights"


def test_a_bundle_on_another_base_model_says_so(
    bundle: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_checkpoints["cogvideox-5b"], tmp_path / "other"))
    (weights,) = (other / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    next(iter(tensors.values())).add_(1e-3)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert (
        "base model's files are not those of the run"
        in replay_bundle(bundle, model=str(other)).notes[0]
    )


def test_a_bundle_holds_no_absolute_path(bundle: Path, tmp_path: Path) -> None:
    roots = [tmp_path, tmp_path.resolve().parents[-2], ROOT, Path.home()]
    for path in bundle.rglob("*"):
        data = path.read_bytes()
        assert not [root for root in roots if f"{root}/".encode() in data], path
    facts = (bundle / "bundle.json").read_text()
    assert not re.search(r'[" =:]/\w', facts)
    assert {path.suffix for path in bundle.iterdir()} == {".json", ".safetensors"}


def test_bundles_are_written_as_far_as_they_are_asked_for(
    lora_main: Main, poisoned: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lora_main([*poisoned, f"run.dir={run}", "guard.bundles=0"])
    assert not lines(run, "events.jsonl")[0].get("bundle")
    assert not (run / "bundles").exists()


@pytest.mark.slow
def test_two_ranks_leave_the_sample_out_and_end_as_two_ranks_without_it(  # type: ignore[no-untyped-def]
    launch, poisoned: list[str], without: str, bad_clip: str, tmp_path: Path
) -> None:
    run, never = tmp_path / "run", tmp_path / "never"
    split = ["train.accumulate=1", "train.seed=2"]  # the clip comes to rank 1
    done = launch([*poisoned, *split, f"run.dir={run}"], ranks=2)
    assert done.returncode == 0, done.stderr
    done = launch([*poisoned, *split, without, f"run.dir={never}"], ranks=2)
    assert done.returncode == 0, done.stderr
    assert same_adapter(run, never)
    assert trajectory(run) == trajectory(never)
    (event,) = lines(run, "events.jsonl")
    assert (event["rank"], event["sample_ids"]) == (1, [bad_clip])
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
