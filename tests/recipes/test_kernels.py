"""Runs on fused kernels: what is said, what is found wrong before the first step, and what in the middle."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_checks import by
from runs import lines

from dit_lora.commands.replay import replay_bundle
from dit_lora.errors import DitLoraError
from dit_lora.fuse import api, attention
from dit_lora.fuse.models import cogvideox
from dit_lora.training import check_cache
from dit_lora.training.check_cache import REUSED
from dit_lora.training.recovery import kernel_parity

Main = Callable[[list[str]], None]
ON = ["kernels.ada_norm=on", "kernels.qk_norm_rope=on", "kernels.finite_norm=on"]


@pytest.fixture
def smoke(smoke: list[str]) -> list[str]:
    """Kernels are compared after the last step, as users' are."""
    return [*smoke, "guard.parity_every=500"]


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with by("reference", monkeypatch):
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes everything."""
    monkeypatch.setattr(api, "_find_off_reason", lambda *_: None)


def test_a_run_says_what_it_replaced_and_what_it_did_not(
    lora_main: Main, smoke: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora_main([*smoke, *ON, "train.steps=2", f"run.dir={tmp_path / 'run'}"])
    output = capsys.readouterr().err
    assert output.count("kernels: ") == 1
    for modules in ("lora_linear (8 modules)", "ada_norm (2 modules)", "qk_norm_rope (2 modules)"):
        assert modules in " ".join(output.split())
    assert not lines(tmp_path / "run", "events.jsonl")


def test_a_kernel_that_the_model_has_no_place_for_is_refused(
    lora_main: Main, smoke: list[str], tmp_path: Path
) -> None:
    args = [*smoke, "kernels.silu_dwconv_glu=on", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(DitLoraError, match="can use silu_dwconv_glu"):
        lora_main(args)
    assert not (tmp_path / "run").exists()


def wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenDiT's kernel: every sample is modulated by the first one's table."""
    joint_ada_norm = cogvideox.joint_ada_norm

    def wrong(streams: Any, *args: Any, **kwargs: Any) -> Any:
        shared_streams = [s._replace(shift=s.shift[:1].expand_as(s.shift)) for s in streams]
        return joint_ada_norm(shared_streams, *args, **kwargs)

    monkeypatch.setattr(cogvideox, "joint_ada_norm", wrong)


def test_a_wrong_kernel_is_off_before_the_first_step(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And training is that of a run that never had it."""
    wrong_row(monkeypatch)
    lora_main([*smoke, "train.steps=3", f"run.dir={tmp_path / 'run'}"])
    (event,) = lines(tmp_path / "run", "events.jsonl")
    assert event["kind"] == "preflight"
    assert event["verdict"]["switch"] == "ada_norm"
    assert "transformer_blocks.0" in event["verdict"]["module"]
    never = [*smoke, "kernels.ada_norm=off", "train.steps=3", f"run.dir={tmp_path / 'never'}"]
    lora_main(never)
    losses = [[line["loss"] for line in lines(tmp_path / name, "metrics.jsonl")] for name in ("run", "never")]
    assert losses[0] == losses[1]


def test_a_kernel_that_was_switched_off_stays_off_wherever_the_run_goes_on(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the kernel is there again, and where it is not."""
    args = [*smoke, f"run.dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        patch.setattr(api, "_find_off_reason", lambda *_: None)
        wrong_row(patch)
        lora_main([*args, "train.steps=1"])
    with monkeypatch.context() as patch:
        patch.setattr(api, "_find_off_reason", lambda *_: None)
        lora_main([*args, "train.steps=2", "train.resume=auto"])
    assert "guard: ada_norm stays off" in capsys.readouterr().err
    lora_main([*args, "train.steps=3", "train.resume=auto"])
    assert "stays off" not in capsys.readouterr().err
    assert len(lines(tmp_path / "run", "metrics.jsonl")) == 3


def test_a_wrong_kernel_that_was_asked_for_is_refused(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_row(monkeypatch)
    with pytest.raises(DitLoraError, match=r"ada_norm differs .* it is set to on"):
        lora_main([*smoke, *ON, f"run.dir={tmp_path / 'run'}"])
    assert not lines(tmp_path / "run", "metrics.jsonl")


def test_a_kernel_that_goes_wrong_later_is_named_and_left_and_replayed(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From step 2 on, after step 1 was read at once, its last row overflows for every input."""
    rope, steps = attention.qk_norm_rope, []

    def overflows(heads: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rotated = rope(heads, *args, **kwargs)
        return torch.cat([rotated[:, :-1], rotated[:, -1:] * 1e38 * 10], dim=1) if steps else rotated

    def noted(line: dict[str, Any]) -> None:
        if line["step"] == 1:
            steps.append(1)

    from dit_lora.training.journal import Journal

    step = Journal.write_step
    monkeypatch.setattr(Journal, "write_step", lambda j, line, m: (noted(line), step(j, line, m))[1])
    monkeypatch.setattr(attention, "qk_norm_rope", overflows)
    run = tmp_path / "run"
    lora_main([*smoke, "train.steps=4", f"run.dir={run}"])
    (event,) = lines(run, "events.jsonl")
    assert (event["step"], event["action"]) == (2, "fallback")
    assert (event["verdict"]["cause"], event["verdict"]["switch"]) == ("kernel", "qk_norm_rope")
    assert len(lines(run, "metrics.jsonl")) == 4
    assert "qk_norm_rope" in json.dumps(event["verdict"])
    replayed = replay_bundle(run / event["bundle"])
    assert replayed.diagnosis is not None
    assert replayed.diagnosis.switch == "qk_norm_rope"
    assert replay_bundle(run / event["bundle"], without=["qk_norm_rope"]).diagnosis is None


def test_kernels_that_were_right_are_remembered_for_the_same_and_nothing_else(
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    as_on_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what was found wrong is never taken for right."""
    compared: list[str] = []
    differing = kernel_parity.PeriodicKernelComparison.iterate_differing_kernels

    def noted(watch: Any, batches: Any, num_passes: int) -> Any:
        compared.append("compared")
        return differing(watch, batches, num_passes)

    monkeypatch.setattr(kernel_parity.PeriodicKernelComparison, "iterate_differing_kernels", noted)
    args = [*smoke, "train.steps=1", "guard.parity_every=0", "guard.preflight=true"]

    def compares(name: str, *settings: str) -> bool:
        compared.clear()
        lora_main([*args, f"run.dir={tmp_path / name}", *settings])
        phases = json.loads((tmp_path / name / "phases.json").read_text())
        was_remembered = phases["reductions"].get("kernels at the start") == REUSED
        assert was_remembered is not bool(compared)
        return bool(compared)

    with monkeypatch.context() as patch:
        wrong_row(patch)
        assert compares("wrong")
        assert compares("wrong_again")
    assert compares("first")
    assert not compares("second")
    assert compares("anew", "guard.preflight=anew")
    assert compares("other_shape", "data.height=48")
    assert compares("other_adapter", "lora.rank=5")
    assert compares("other_kernels", "kernels.qk_norm_rope=off")
    assert not compares("third")
    with monkeypatch.context() as patch:
        patch.setattr(check_cache, "compute_sources_digest", lambda: "other sources")
        assert compares("other_sources")
    # Goes on from weights that no comparison has seen.
    assert compares("third", "train.steps=2", "train.resume=auto")
