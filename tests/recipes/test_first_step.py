"""The work before a run's first step and the work that waits until it is taken; the order changes nothing else."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPT, launch_environment
from runs import lines, same_adapter, trajectory

from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser
from dit_lora.training import fit as fitting
from dit_lora.training.checkpoints.files import list_checkpoints
from dit_lora.training.recovery import preflight as checking
from dit_lora.training.run import Run
from dit_lora.training.tasks.diffusion.task import DiffusionTask

Main = Callable[[list[str]], None]


@pytest.fixture
def args(smoke: list[str]) -> list[str]:
    """Three steps with two eval losses and samples of one prompt."""
    prompt = "validation.prompts=[a red disc moves]"
    more = ["train.steps=3", "validation.eval_draws=2", prompt, "validation.inference_steps=1"]
    return [*smoke, *more, "guard.parity_every=0"]


def test_the_base_is_shown_after_the_first_step_as_it_was_before(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: its loss and its samples, and what is trained. Nothing of the second step is under way."""
    validations: list[tuple[int, int, bool]] = []
    validate = fitting.validate

    def noted(run: Run, step: int) -> None:
        num_steps = len(lines(run.session.dir, "metrics.jsonl"))
        no_gradient = all(p.grad is None for p in run.transformer.parameters())
        validations.append((step, num_steps, no_gradient))
        validate(run, step)

    monkeypatch.setattr(fitting, "validate", noted)
    later, before = tmp_path / "later", tmp_path / "before"
    lora_main([*args, f"run.dir={later}"])
    assert validations == [(0, 1, True)]
    with monkeypatch.context() as patch:
        patch.setattr("dit_lora.training.base_fingerprint.has_only_untrained_adapters", lambda model: False)
        lora_main([*args, f"run.dir={before}"])
    assert validations[1:] == [(0, 0, True)]
    assert same_adapter(later, before)
    assert trajectory(later) == trajectory(before)
    losses = lines(later, "eval_loss.jsonl")
    assert [line["step"] for line in losses] == [0, 3]
    assert losses == lines(before, "eval_loss.jsonl")
    assert losses[0] != losses[1]
    samples = [sorted((run / "samples").rglob("*.mp4")) for run in (later, before)]
    assert [path.parent.name for path in samples[0]] == ["step_000000", "step_000003"]
    for sample, expected in zip(*samples, strict=True):
        assert sample.read_bytes() == expected.read_bytes()


def test_what_trains_from_other_values_than_zero_is_shown_before_it_is_trained(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_before: list[int] = []
    validate = fitting.validate

    def noted(run: Run, step: int) -> None:
        steps_before.append(len(lines(run.session.dir, "metrics.jsonl")))
        validate(run, step)

    monkeypatch.setattr(fitting, "validate", noted)
    full = ["train.mode=full", "lora={}", "optim.groups={backbone: {lr: 1e-4}}"]
    lora_main([*args, *full, f"run.dir={tmp_path / 'run'}"])
    assert steps_before == [0]


def test_samples_that_fail_are_left_out_and_the_run_goes_on(
    lora_main: Main,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def failing(*_: Any) -> None:
        raise DitLoraError("cannot use a validation prompt")

    monkeypatch.setattr(DiffusionTask, "write_samples", failing)
    lora_main([*args, "train.save_every=1", f"run.dir={tmp_path}/run"])
    printed = "".join(capfd.readouterr())
    assert "are skipped this time: cannot use a validation prompt" in printed
    assert list(list_checkpoints(tmp_path / "run"))


def test_a_run_that_is_stopped_in_its_first_step_shows_its_base_when_it_goes_on(
    lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops it does not wait for samples."""

    @contextmanager
    def asked(_launcher: object) -> Iterator[Callable[[], int]]:
        yield lambda: 143

    stopped, uninterrupted = tmp_path / "stopped", tmp_path / "whole"
    args = [*args, "validation.every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "handle_stop_signals", asked)
        with pytest.raises(InterruptedRunError):
            lora_main([*args, f"run.dir={stopped}"])
    assert list(list_checkpoints(stopped)) == [1]
    assert not lines(stopped, "eval_loss.jsonl")
    assert not (stopped / "samples").exists()
    lora_main([*args, f"run.dir={stopped}", "train.resume=auto"])
    lora_main([*args, f"run.dir={uninterrupted}"])
    assert lines(stopped, "eval_loss.jsonl") == lines(uninterrupted, "eval_loss.jsonl")
    assert same_adapter(stopped, uninterrupted)
    sample = Path("samples", "step_000000", "prompt_00.mp4")
    assert (stopped / sample).read_bytes() == (uninterrupted / sample).read_bytes()


def test_one_pass_serves_the_checks_of_gradients_and_of_attention(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the run's own, with gradients: attention backends are judged at its calls, and precision by its peaks."""
    passes: list[bool] = []
    losses, remembered = CogVideoXDenoiser.losses, checking._check_with_cache
    findings: list[Any] = []

    def counted(*inputs: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return losses(*inputs)

    def judged(setup: Any, one: Any, seen: Any) -> Any:
        assert [calls.query.shape[-2] for calls in seen.attention_calls]
        began = len(passes)
        findings.extend(remembered(setup, one, seen))
        assert passes[began - 1]
        assert len(passes) == began, "the checks ran the model again"
        return findings

    monkeypatch.setattr(CogVideoXDenoiser, "losses", counted)
    monkeypatch.setattr(checking, "_check_with_cache", judged)
    lora_main([*smoke, "train.steps=1", f"run.dir={tmp_path / 'run'}"])
    messages = {finding.check: finding.message for finding in findings}
    assert messages["attention"].startswith("all 1 attention calls")
    assert messages["attention backend math"].startswith("correct for 1 of 1 calls")


@pytest.mark.thorough
def test_what_is_imported_is_no_matter_for_the_garbage_collector(lora_main: Main) -> None:
    """And at the end of the process nothing is reported as a leak, and Ctrl-C shows no traceback."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
    interrupted = (
        "import atexit, os, runpy, signal\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", interrupted, "--help"],
        env=launch_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: accelerate launch" in result.stdout
    assert "leak" not in result.stderr
    assert "Traceback" not in result.stderr
