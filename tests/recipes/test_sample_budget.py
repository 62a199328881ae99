"""`validation.max_sample_share` in runs: which samples are left out, and that training is the same without them."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import on_ranks
from runs import lines, same_adapter
from topologies import Case, run_all

from dit_lora.training.session.phases import PHASES_FILE
from dit_lora.training.tasks.diffusion.task import DiffusionTask

Main = Callable[[list[str]], None]
PROMPT = ["validation.prompts=[a red disc moves]", "validation.inference_steps=1"]
STEPS = ["train.steps=6", "train.save_every=6", "validation.every=2", "lora.dropout=0.2"]


def sampled_steps(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run / "samples").iterdir())


def test_samples_during_training_can_be_left_out_and_training_stays_the_same(
    lora_main: Main, smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout draws from the default generators, which samples would move if they used them."""
    args = [*smoke, *PROMPT, *STEPS, "guard.preflight=false"]
    lora_main([*args, f"run.dir={tmp_path / 'all'}"])
    assert "no samples" not in capsys.readouterr().err
    began = time.perf_counter()
    lora_main([*args, "validation.max_sample_share=1e-9", f"run.dir={tmp_path / 'few'}"])
    wall_s = time.perf_counter() - began
    log = capsys.readouterr().err
    assert sampled_steps(tmp_path / "all") == [0, 2, 4, 6]
    # None are known to be affordable: the base's took time.
    assert sampled_steps(tmp_path / "few") == [0, 6]
    assert same_adapter(tmp_path / "all", tmp_path / "few")
    last = tmp_path / "all" / "samples" / "step_000006" / "prompt_00.mp4"
    assert last.read_bytes() == (tmp_path / "few" / last.relative_to(tmp_path / "all")).read_bytes()
    assert log.count("no samples, to keep within validation.max_sample_share") == 1
    skipped = "no samples at steps 2, 4; validation.max_sample_share=null takes all"
    assert skipped in log.splitlines()
    assert json.loads((tmp_path / "few" / PHASES_FILE).read_text())["reductions"]["samples"] == skipped
    require_whole_time(log, tmp_path / "few", wall_s)


def require_whole_time(log: str, run: Path, wall_s: float) -> None:
    """The parts are the wall time, and the steps are those of metrics.jsonl; the closing line has the same parts."""
    record = json.loads((run / PHASES_FILE).read_text())
    parts = record["time"]
    # The process is that of the tests: what it did before the run counts as imports.
    imports = next(phase["seconds"] for phase in record["phases"] if phase["name"] == "imports")
    # Written before the report, and before the process ends.
    assert sum(parts.values()) - imports == pytest.approx(wall_s, rel=0.3)
    assert parts["steps"] == pytest.approx(sum(step["seconds"] for step in lines(run, "metrics.jsonl")), abs=0.01)
    assert parts["samples"] > 0
    line = next(line for line in log.splitlines() if line.startswith("time: "))
    # Parts that round to zero are left out.
    names = re.findall(r" ([a-z ]+) [\d.]+(?=,|$)", line)
    assert names == [name for name in parts if name in names]
    assert {"start", "other"} <= set(names)


def test_the_samples_of_a_run_that_ends_early_are_made_up_for(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its last validation was an ordinary one, whose samples were left out."""
    run = tmp_path / "run"
    monkeypatch.setattr(DiffusionTask, "compute_eval_loss", lambda self, setup: 1.0)
    stop = ["train.stop_after=1", "validation.eval_draws=1"]
    limit = ["validation.max_sample_share=1e-9", "guard.preflight=false"]
    lora_main([*smoke, *PROMPT, *STEPS, *stop, *limit, f"run.dir={run}"])
    assert lines(run, "metrics.jsonl")[-1]["step"] == 2
    assert sampled_steps(run) == [0, 2]
    assert "no samples at" not in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_leave_out_the_same_samples(smoke: list[str], tmp_path: Path) -> None:
    """The main process measures them, and the other rank, which has no samples to generate, follows it."""
    run = tmp_path / "run"
    options = ["train.accumulate=1", "train.batch_size=1", "guard.preflight=false", "guard.monitor_every=0"]
    case = Case("ddp", (*smoke, *PROMPT, *STEPS, *options, "validation.max_sample_share=1e-9", f"run.dir={run}"))
    results = on_ranks(2, run_all, [case])
    assert [rank[0].error for rank in results] == ["", ""]
    assert sampled_steps(run) == [0, 6]
