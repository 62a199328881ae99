"""A run with data that it is not trained on: its loss, the checkpoints that it ranks, and when it ends the run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import on_ranks
from runs import lines
from topologies import Case, run_all

from dit_lora.adapters.diffusers_format import read_run_metadata
from dit_lora.data.loading.batch import Batch
from dit_lora.training import base_fingerprint
from dit_lora.training import fit as fitting
from dit_lora.training.checkpoint_state import BEST_FILE
from dit_lora.training.checkpoints.files import list_checkpoints
from dit_lora.training.fit import RunCallbacks
from dit_lora.training.run import Run
from dit_lora.training.tasks.diffusion.task import DiffusionTask

Main = Callable[[list[str]], None]
LOSSES = {0: 0.5, 2: 0.3, 4: 0.4, 6: 0.35}
"""Of the held-out clips, by step: after step 2 they only rise again."""
OPTIONS = ("validation.data=0.3", "validation.eval_draws=1", "validation.every=2")


def record_ids(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of all samples that training reads from now on."""
    ids: set[str] = set()
    load = RunCallbacks.load_batches

    def load_and_record(callbacks: RunCallbacks, start_step: int) -> Iterator[Batch]:
        for batch in load(callbacks, start_step):
            ids.update(batch.ids)
            yield batch

    monkeypatch.setattr(RunCallbacks, "load_batches", load_and_record)
    return ids


def test_held_out_clips_are_measured_and_never_trained_on(
    lora_main: Main, smoke: list[str], shape_clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, run = record_ids(monkeypatch), tmp_path / "run"
    steps = ["train.steps=4", "train.batch_size=2", "train.accumulate=1"]
    lora_main([*smoke, *OPTIONS, *steps, f"run.dir={run}"])
    record = json.loads((run / "data.json").read_text())
    assert len(record["held_out"]) == 1
    assert trained | {*record["held_out"]} == {path.name for path in shape_clips.glob("*.mp4")}
    assert not trained & {*record["held_out"]}
    assert record["samples"] == json.loads((run / "facts.json").read_text())["data"]["clips"] == 4
    measured = lines(run, "eval_loss.jsonl")
    assert [line["step"] for line in measured] == [0, 2, 4]
    assert all(line["eval_loss"] != line["validation_loss"] > 0 for line in measured)
    page = (run / "report.html").read_text()
    assert "Validation loss" in page
    assert "memorises the training clips" in page


def use_losses(patches: pytest.MonkeyPatch) -> None:
    """Each validation gets the next of `LOSSES`."""
    remaining = list(LOSSES.values())
    patches.setattr(DiffusionTask, "compute_validation_loss", lambda self, setup: remaining.pop(0))


def test_a_run_ends_when_the_validation_loss_no_longer_falls_through_a_resume_too(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_losses(monkeypatch)
    run = tmp_path / "run"
    stop = ["train.steps=20", "train.save_every=4", "train.stop_after=2", "train.resume=auto"]
    args = [*smoke, *OPTIONS, *stop, f"run.dir={run}"]
    # A checkpoint of step 2 as well, which has the best loss.
    args += ["train.save_every=2", "train.keep=1", "train.keep_best=1"]
    validate = fitting.validate

    def end_after_4(started: Run, step: int) -> None:
        validate(started, step)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fitting, "validate", end_after_4)
        with pytest.raises(KeyboardInterrupt):
            lora_main(args)
    capsys.readouterr()
    lora_main(args)
    closing = (
        "stopped early after step 6: no lower validation loss in 2 validations; the best was 0.3000 at step 2, "
        f"saved in {run}/checkpoints/step_000002"
    )
    assert capsys.readouterr().err.count(closing) == 2
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == [*range(1, 7)]
    assert {line["step"]: line["validation_loss"] for line in lines(run, "eval_loss.jsonl")} == LOSSES
    assert [*list_checkpoints(run)] == [2, 6]
    best = json.loads((run / "checkpoints" / BEST_FILE).read_text())
    assert best == [{"checkpoint": "step_000002", "step": 2, "validation_loss": 0.3}]
    adapter = run / "adapter" / "pytorch_lora_weights.safetensors"
    assert read_run_metadata(adapter)["steps"] == 6
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert "of 20, stopped early" in (run / "report.html").read_text()
    # Resumed, it does nothing twice: there is no loss left to give.
    written = {path: path.stat().st_mtime_ns for path in (adapter, run / "report.html")}
    facts = (run / "facts.json").read_text()
    # `push` says to resume a run whose facts are damaged.
    (run / "facts.json").write_text(facts[:50])
    with monkeypatch.context() as patched:
        # Nor is an output of the base computed.
        patched.setattr(base_fingerprint, "_compute_base_output", None)
        lora_main(args)
    assert (run / "facts.json").read_text() == facts
    assert len(lines(run, "metrics.jsonl")) == 6
    assert {path: path.stat().st_mtime_ns for path in written} == written
    log = capsys.readouterr().err
    assert f"the run in {run} is finished: step 6 was its last\n" in log
    assert "verified" not in log
    # An earlier step is not the end of the run that went on.
    lora_main([*args, "train.steps=2", f"train.resume={run}/checkpoints/step_000002"])
    assert read_run_metadata(adapter)["steps"] == 2


@pytest.mark.slow
def test_two_ranks_end_after_the_same_step(smoke: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = ["train.steps=20", "train.save_every=20", "train.stop_after=1", "train.accumulate=1", "train.batch_size=1"]
    quiet = ["guard.preflight=false", "guard.monitor_every=0", "guard.parity_every=0"]
    case = Case("ddp", (*smoke, *OPTIONS, *steps, *quiet, f"run.dir={run}"), prepare=use_losses)
    results = on_ranks(2, run_all, [case])
    assert [rank[0].error for rank in results] == ["", ""]
    assert len(lines(run, "metrics.jsonl")) == 4
    # Saved though `train.save_every` does not divide the step.
    assert [*list_checkpoints(run)] == [4]
