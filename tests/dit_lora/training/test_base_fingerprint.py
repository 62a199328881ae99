"""What a run's end and its resumes compare with its start: the base's output, and what kernels make of the model's."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import same_adapter, without_verification
from torch import nn
from typer.testing import CliRunner
from verified import SMOKES, failing, quick

from dit_lora.adapters.attach import find_tuner_layers
from dit_lora.cli.app import app
from dit_lora.commands.verify import verify_adapter
from dit_lora.errors import DitLoraError
from dit_lora.numerics.tolerances import BLOCK_TOLERANCE
from dit_lora.training import base_fingerprint
from dit_lora.training import fit as running
from dit_lora.training import prepare as preparing
from dit_lora.training.base_fingerprint import BASE_OUTPUT
from dit_lora.training.run import Run
from dit_lora.training.task import Setup
from dit_lora.verify import output_fingerprint
from dit_lora.verify.verified_files import VERIFICATION_FILE
from dit_lora_kernels import ada_norm

Main = Callable[[list[str]], None]
FROZEN = "transformer_blocks.1.ff.net.2.weight"
BOTH = ("optim.groups.connector={lr: 1.0e-3}", "train.ema=0.9")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoded") / "cache"


@pytest.fixture
def start(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    cache: Path,
    tmp_path: Path,
) -> Callable[..., str]:
    """Run the smoke recipe in its own folder; gives its messages, or the error with which it ended."""

    def started(*more: str, run: str = "run") -> str:
        args = quick(shape_clips, tmp_path, f"model.path={tiny_checkpoints['cogvideox-2b']}", *more)
        heard = io.StringIO()
        with contextlib.redirect_stderr(heard):
            lora_main(
                [
                    str(SMOKES / "cogvideox.yaml"),
                    *args,
                    f"data.cache={cache}",
                    f"run.dir={tmp_path / run}",
                ]
            )
        return heard.getvalue()

    return started


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[Run], None]], None]:
    """Let something happen to the next run after a step."""
    after = running._check_and_save

    def when(step: int, act: Callable[[Run], None]) -> None:
        def then(run: Run, result: Any) -> None:
            after(run, result)
            if result.step == step:
                act(run)

        monkeypatch.setattr(running, "_check_and_save", then)

    return when


def flip(run: Run) -> None:
    run.transformer.get_parameter(FROZEN).data.neg_()


def ended(start: Callable[..., str], *more: str) -> str:
    with pytest.raises(DitLoraError) as caught:
        start(*more)
    assert caught.value.exit_code == 1
    return str(caught.value)


@pytest.mark.parametrize("more", [(), BOTH], ids=["lora", "with base weights and averages"])
def test_a_frozen_weight_that_changes_is_not_certified(
    start: Callable[..., str], at_step: Any, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """By the run, by the command, and for the Hub; a run as sound passes, though base weights trained."""
    assert "output as trained" in start(*more)
    shutil.rmtree(tmp_path / "run")
    at_step(3, flip)  # after the last checkpoint: digests have seen it no more
    message = ended(start, *more)
    assert "output: the base is not what it was at the run's start" in message
    assert "its frozen weights or buffers have changed in memory" in message
    record = json.loads((tmp_path / "run" / VERIFICATION_FILE).read_text())
    assert not record["passed"]
    assert [name for name, check in record["checks"].items() if not check["passed"]] == ["output"]
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "the base is not what it was at the run's start" in " ".join(result.output.split())
    assert "--model" not in result.output
    pushed = CliRunner().invoke(app, ["push", str(tmp_path / "run"), "me/kitten", "--dry-run"])
    assert pushed.exit_code == 1


def test_an_output_that_is_not_finite_is_not_certified(
    start: Callable[..., str], at_step: Any, tmp_path: Path
) -> None:
    """NaN only outside of training, from a hook: no loss shows it, and the weights are finite."""

    def spoil(run: Run) -> None:
        frozen_module = run.transformer.get_submodule(FROZEN.rpartition(".")[0])
        frozen_module.register_forward_hook(
            lambda _module, _args, output: output if torch.is_grad_enabled() else output * torch.nan
        )

    at_step(3, spoil)
    message = ended(start)
    assert "with adapters and kernels off its output is not finite" in message
    assert "a hook or another forward changes the run's" in message
    assert failing(verify_adapter(tmp_path / "run")) == {"output"}


def test_a_resume_compares_itself_with_the_first_start(
    start: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(*BOTH, "train.steps=4", run="whole")
    start(*BOTH, "train.steps=2", "train.save_every=1", "train.keep=9")
    record = (tmp_path / "run" / BASE_OUTPUT).read_text()
    assert json.loads(record)["since"] == 0
    resume_args = (*BOTH, "train.steps=4", "train.resume=auto")
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    shutil.copytree(tmp_path / "run", tmp_path / "other")

    messages = start(*resume_args)
    assert "no record" not in messages
    assert (tmp_path / "run" / BASE_OUTPUT).read_text() == record
    assert same_adapter(tmp_path / "run", tmp_path / "whole")
    # In another folder, from this one's checkpoint.
    resume_option = f"train.resume={tmp_path / 'run' / 'checkpoints' / 'step_000002'}"
    start(*BOTH, "train.steps=4", resume_option, run="elsewhere")
    assert (tmp_path / "elsewhere" / BASE_OUTPUT).read_text() == record

    (tmp_path / "old" / BASE_OUTPUT).unlink()  # of a version that wrote none
    messages = start(*resume_args, run="old")
    assert "the output at step 2 is used instead" in messages
    assert json.loads((tmp_path / "old" / BASE_OUTPUT).read_text())["since"] == 2
    assert same_adapter(tmp_path / "old", tmp_path / "whole")

    note = base_fingerprint.record_base_fingerprint

    def damaged(setup: Setup[Any, Any], resume_from: Path | None, **options: Any) -> Any:
        setup.transformer.get_parameter(FROZEN).data.neg_()
        return note(setup, resume_from, **options)

    monkeypatch.setattr(preparing, "record_base_fingerprint", damaged)
    with pytest.raises(DitLoraError, match="the base is not what it was at this run's first start"):
        start(*resume_args, run="other")


def test_no_output_is_computed_twice(start: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels: the base's at the start, and at the end the base's and the trained model's."""
    without_verification(monkeypatch)
    # Triton's interpreter takes a minute.
    monkeypatch.setattr(ada_norm, "launches", lambda _tensor: False)
    compute, disable_kernels = output_fingerprint._compute_output, output_fingerprint.disable_kernels
    num_contexts, has_adapter = 0, []

    @contextlib.contextmanager
    def disable_and_count(*arguments: Any) -> Iterator[None]:
        nonlocal num_contexts
        num_contexts += 1
        with disable_kernels(*arguments):
            yield
        num_contexts -= 1

    def compute_and_record(reference: Any, model: nn.Module, *more: Any) -> torch.Tensor:
        if num_contexts:
            has_adapter.append(not any(layer.disable_adapters for layer in find_tuner_layers(model)))
        return compute(reference, model, *more)

    monkeypatch.setattr(output_fingerprint, "_compute_output", compute_and_record)
    for module in (output_fingerprint, base_fingerprint):
        monkeypatch.setattr(module, "disable_kernels", disable_and_count)
    start(*KERNELS)
    assert has_adapter == [False, False, True]


def wrong(monkeypatch: pytest.MonkeyPatch, times: float) -> Callable[[Any], None]:
    """Let the fused modulation's result be wrong by a factor, from when it is called."""
    right = ada_norm.ada_norm_reference

    def reference(*args: Any) -> Any:
        output, *other_outputs = right(*args)
        return (times * output, *other_outputs)

    monkeypatch.setattr(ada_norm, "launches", lambda _tensor: False)  # as without a GPU and its interpreter
    return lambda _run: monkeypatch.setattr(ada_norm, "ada_norm_reference", reference)


KERNELS = ("kernels.ada_norm=on", "kernels.lora_linear=on")


def test_a_kernel_that_goes_wrong_is_named(
    start: Callable[..., str], at_step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And neither the base nor another kernel is."""
    at_step(3, wrong(monkeypatch, 1.05))  # after the last comparison of the run itself
    message = ended(start, *KERNELS)
    assert "output: kernels went wrong in the run: " in message
    assert "weights: ada_norm (" in message
    assert "lora_linear" not in message
    assert message.endswith("with kernels.ada_norm=off")
    assert failing(verify_adapter(tmp_path / "run")) == {"output"}


def test_a_hook_that_is_added_after_the_first_record_is_no_fault_of_a_kernel(
    start: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = preparing.record_base_fingerprint

    def record_and_hook(setup: Setup[Any, Any], *arguments: Any, **options: Any) -> Any:
        fingerprint = record(setup, *arguments, **options)
        assert fingerprint.initial_output is not None
        setup.transformer.proj_out.register_forward_hook(lambda _module, _inputs, output: 1.5 * output)
        return fingerprint

    monkeypatch.setattr(preparing, "record_base_fingerprint", record_and_hook)
    # Triton's interpreter takes a minute.
    monkeypatch.setattr(ada_norm, "launches", lambda _tensor: False)
    assert "a hook or another forward changes the run's output" in ended(start, *KERNELS, "guard.preflight=true")
    assert "lora_linear" not in "".join(path.read_text() for path in (tmp_path / "run").rglob("events.jsonl"))


@pytest.mark.parametrize(("times", "passes"), [(1 + BLOCK_TOLERANCE / 4, True), (1.05, False)])
def test_what_passes_at_the_start_passes_at_the_end(
    start: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    times: float,
    passes: bool,
) -> None:
    """One scale: a kernel as wrong all the time is refused before the first step, or not at all."""
    wrong(monkeypatch, times)(None)
    args = (*KERNELS, "guard.preflight=true", "train.steps=4")
    if passes:
        assert "output as trained" in start(*args)
        assert verify_adapter(tmp_path / "run").passed
        return
    with pytest.raises(DitLoraError, match="ada_norm"):
        start(*args)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_only_what_has_a_base_has_a_record(start: Callable[..., str], tmp_path: Path) -> None:
    full = ("train.mode=full", "lora={}", "optim.groups={backbone: {lr: 1.0e-3}}")
    assert "output as trained" in start(*full)
    assert not (tmp_path / "run" / BASE_OUTPUT).exists()
