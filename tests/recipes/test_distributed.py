"""Two ranks on this CPU: started by torchrun (accelerate launch --cpu would start one), or forked as it does."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands import launch as accelerate_launch
from launching import ROOT, SCRIPT, Ranks, started
from runs import poison

from dit_lora.data.synthetic.clips import write_shapes

pytestmark = pytest.mark.slow


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trajectory(run: Path) -> torch.Tensor:
    return torch.tensor([(m["loss"], m["grad_norm"], m["samples"]) for m in metrics(run)])


def test_two_ranks_with_half_the_batch_each_train_alike(  # type: ignore[no-untyped-def]
    launch, lora_main, smoke, tmp_path, shape_clips: Path
) -> None:
    """Same losses and gradient norms, over buckets, caption dropout and eval loss; half encode each.

    By torchrun itself: its ranks have hash seeds of their own.
    """
    write_shapes(tmp_path / "stills", clips=4, frames=1, height=64, width=96, fps=8)
    sources = [{"path": str(shape_clips)}, {"path": str(tmp_path / "stills"), "loss_weight": 0.5}]
    common = [*smoke, "train.steps=8", "data.caption_dropout=0.5", "validation.eval_draws=2"]
    common += ["data.path=", f"data.sources={json.dumps(sources)}", "data.buckets={frames: [1, 9]}"]
    result = launch(
        [*common, "train.batch_size=2", "train.accumulate=2", f"run.dir={tmp_path / 'two'}"],
        ranks=2,
        really=True,
    )
    assert result.returncode == 0, result.stderr
    assert "2 processes on cpu, float32" in result.stderr
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["processes"] == 2
    lora_main([*common, "train.batch_size=8", f"run.dir={tmp_path / 'one'}"])
    torch.testing.assert_close(trajectory(tmp_path / "two"), trajectory(tmp_path / "one"), rtol=1e-5, atol=0)
    eval_losses = [
        json.loads(line)["eval_loss"]
        for run in ("one", "two")
        for line in (tmp_path / run / "eval_loss.jsonl").read_text().splitlines()
    ]
    assert eval_losses[:2] == pytest.approx(eval_losses[2:], rel=1e-6)


@pytest.mark.thorough  # test_topologies.py has such a clip in each engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_in_one_cached_latent_stops_all_ranks_before_it_touches_a_weight(  # type: ignore[no-untyped-def]
    launch, lora_main, smoke, tmp_path, shape_clips: Path, ranks: int
) -> None:
    """It names the clip, exits 3, and leaves the weights of the step before, bit for bit."""
    run, clean = tmp_path / "run", tmp_path / "clean"
    split = ["train.batch_size=1", f"train.accumulate={2 // ranks}", "train.seed=2"]
    split += ["guard.on_nonfinite=[stop]"]
    sample = sorted(path.name for path in shape_clips.glob("*.mp4"))[3]
    entry = poison(tmp_path / "cache", sample)

    result = launch([*smoke, *split, "train.steps=9", f"run.dir={run}"], ranks=ranks)
    assert result.returncode != 0
    event = json.loads((run / "events.jsonl").read_text())
    step = event["step"]
    assert event["sample_ids"] == [sample]
    assert event["kind"] == "non_finite_loss"
    assert event["action"] == "stop"
    assert (run / event["bundle"] / "bundle.json").exists()  # whichever rank wrote it
    assert result.stderr.count(f"step {step}: non-finite loss") == 1  # said once, by one rank
    assert f"{sample} (rank {event['rank']}): in its cache entry {entry.key[:16]} of {entry.path}" in result.stderr
    assert "1 NaN" in result.stderr
    assert "weights are those of step" in result.stderr
    assert not (run / "adapter").exists()
    assert sample in (run / "report.html").read_text()
    assert len(metrics(run)) == step - 1

    # The entry was set aside, so the same command with resume heals it and ends as a clean run does.
    assert step > 1
    args = [*smoke, *split, "train.steps=9"]
    before = run / "checkpoints" / f"step_{step - 1:06d}" / "trainable.safetensors"
    stopped_at = before.read_bytes()
    healed = launch([*args, f"run.dir={run}", "train.resume=auto"], ranks=ranks)
    assert healed.returncode == 0, healed.stderr
    result = launch([*args, f"run.dir={clean}", "train.save_every=1", "train.keep=100"], ranks=ranks)
    assert result.returncode == 0, result.stderr
    undisturbed = clean / "checkpoints" / f"step_{step - 1:06d}" / "trainable.safetensors"
    assert stopped_at == undisturbed.read_bytes()
    final_weights = "checkpoints/step_000009/trainable.safetensors"
    assert (run / final_weights).read_bytes() == (clean / final_weights).read_bytes()


_FAILING = """
import os, runpy, sys

from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser

stock, steps, rank = CogVideoXDenoiser.losses, [], sys.argv.pop(1)


def losses(self, transformer, batch, streams):
    # Activations are counted with tensors without values, or are known from another test.
    has_values = not any("Fake" in type(tensor).__name__ for tensor in batch.values())
    steps.extend([1] if transformer.training and has_values else [])
    if os.environ["RANK"] == rank and len(steps) == 3:
        raise RuntimeError("no memory")
    return stock(self, transformer, batch, streams)


CogVideoXDenoiser.losses = losses
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_error_of_one_rank_loses_no_line_of_a_step_that_was_taken(
    smoke: list[str], tmp_path: Path, rank: int
) -> None:
    """Step 2 is read after the launch of step 3, which fails; rank 0 writes, and sees rank 1's broken connection."""
    script, run = tmp_path / "failing.py", tmp_path / "run"
    script.write_text(_FAILING.format(script=str(ROOT / "recipes" / "lora.py")))
    quiet = ["guard.preflight=false", "guard.monitor_every=0", "guard.parity_every=0"]
    steps = ["train.steps=5", "train.batch_size=1", "train.accumulate=1"]
    result = started([rank, *smoke, *quiet, *steps, f"run.dir={run}"], 2, script=script).wait()
    assert result.returncode == 1, result.stderr
    assert "no memory" in result.stderr
    assert [line["step"] for line in metrics(run)] == [1, 2]


def test_asking_for_two_processes_and_getting_one_is_refused(
    smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `accelerate launch`, whose only process is forked here."""
    processes: list[Ranks] = []

    def fork(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        assert command[:2] == [sys.executable, str(SCRIPT)]
        processes.append(started(command[2:], env=env))
        return SimpleNamespace(wait=lambda: None, returncode=0)

    monkeypatch.setattr(accelerate_launch, "subprocess", SimpleNamespace(Popen=fork))
    arguments = ["--cpu", "--num_processes", "2", str(SCRIPT), *smoke, f"run.dir={tmp_path / 'run'}"]
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(arguments))
    (process,) = processes
    result = process.wait()
    assert result.returncode != 0
    assert "several processes were asked for and the run has 1" in result.stderr
    assert not (tmp_path / "run").exists()
