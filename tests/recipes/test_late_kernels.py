"""Kernels that go wrong at a step: found within `guard.parity_every`, named and off, and their steps taken again."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import quick_runs
import torch
from launching import on_ranks
from planted_kernels import FAULTS, as_on_a_gpu, plant, run_planted
from runs import adapter, lines, same_adapter
from topologies import Case

from dit_lora.guard.comparison import block_parity
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.training.recovery import kernel_parity

Main = Callable[[list[str]], None]
EVERY = 3
STALE = [name for name in FAULTS if "stale" in name]


@pytest.fixture
def smoke(smoke: list[str]) -> list[str]:
    """Kernels are compared after the last step, as users' are."""
    return [*smoke, "guard.parity_every=500"]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("fault") in STALE:
        monkeypatch.setattr(quick_runs, "PASSES", block_parity.MIN_PASSES)  # wrong in some passes only
    with as_on_a_gpu(monkeypatch):
        yield


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


def apart(one: Path, other: Path) -> float:
    """How far a run's adapter is from another's, of what training has changed."""
    first_weights, second_weights = adapter(one), adapter(other)
    names = [name for name in first_weights if "lora_B" in name]
    difference = sum((first_weights[n] - second_weights[n]).float().square().sum() for n in names)
    size = sum(second_weights[n].float().square().sum() for n in names)
    return float((difference / size).sqrt())


CASES = [
    thorough("values 0.1 % off", "ada_norm", 4, ()),
    ("wrong rows", "ada_norm", 0, ("model.dtype=bf16",)),
    thorough("the last partial block dropped in backward", "ada_norm", 1, ("train.batch_size=1",)),
    *(
        thorough(fault, op, step, settings)
        for fault in FAULTS
        for op in ("ada_norm", "qk_norm_rope")
        for step in (0, 1, 4, 50)
        for settings in ((), ("model.dtype=bf16",), ("train.batch_size=1",))
    ),
]


@pytest.mark.parametrize(("fault", "op", "step", "settings"), CASES)
def test_it_is_found_and_named_and_the_end_is_a_clean_runs(
    fault: str,
    op: str,
    step: int,
    settings: tuple[str, ...],
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = max(8, step + EVERY + 1) if step else EVERY + 1  # one that preflight finds takes back no step
    args = [*smoke, f"train.steps={steps}", f"guard.parity_every={EVERY}"]
    args += ["guard.snapshot_every=5", f"train.save_every={steps}", *settings]
    with monkeypatch.context() as patch:
        plant(patch, op, fault, step)
        lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    events = lines(tmp_path / "run", "events.jsonl")
    assert [event["verdict"]["switch"] for event in events] == [op], events
    (event,) = events
    assert event["verdict"]["cause"] == "kernel"
    assert event["kind"] == ("parity" if step else "preflight")
    assert step <= event["step"] <= step + EVERY
    assert event["action"] == ("rollback" if step else "fallback")
    # Of queries and keys in turn, every second call is the keys': stale in each, and the same each time.
    if (op, fault) != ("qk_norm_rope", STALE[-1]):
        assert ("nondeterministic" in event["verdict"]["words"]) is (fault in STALE)
    assert len(lines(tmp_path / "run", "metrics.jsonl")) == steps
    never = [*args, f"kernels.{op}=off", f"run.dir={tmp_path / 'never'}"]
    lora_main(never)
    if "model.dtype=bf16" not in settings:
        assert apart(tmp_path / "run", tmp_path / "never") < 1e-3
        return
    # In bf16 the right kernel rounds otherwise than the stock code; it was on until it went wrong.
    lora_main([*args, f"run.dir={tmp_path / 'right'}"])
    rounding = apart(tmp_path / "right", tmp_path / "never")
    assert apart(tmp_path / "run", tmp_path / "never") < max(0.02, 2 * rounding)


def test_a_comparison_changes_no_bit_of_the_run(lora_main: Main, smoke: list[str], tmp_path: Path) -> None:
    """With all that draws: dropout of adapters and captions, two micro-steps, averages."""
    args = [*smoke, "train.steps=5", "lora.dropout=0.2", "data.caption_dropout=0.3"]
    args += ["train.batch_size=1", "train.accumulate=2", "train.ema=0.9", "guard.preflight=true"]
    for interval in (0, 1):
        folder = tmp_path / str(interval)
        lora_main([*args, f"guard.parity_every={interval}", f"run.dir={folder}"])
    assert same_adapter(tmp_path / "0", tmp_path / "1")
    losses = [[m["loss"] for m in lines(tmp_path / name, "metrics.jsonl")] for name in ("0", "1")]
    assert losses[0] == losses[1]
    assert not lines(tmp_path / "1", "events.jsonl")


@pytest.mark.parametrize("names", [("late",), thorough(("before", "right"))])
def test_sharded_weights_are_compared_and_a_late_fault_on_two_ranks_is_named(
    smoke: list[str], tmp_path: Path, names: tuple[str, ...]
) -> None:
    """In bf16, where only the comparison in fp32 can see it; one clip a rank."""
    args = [*smoke, "train.steps=4", "guard.parity_every=2", "model.dtype=bf16"]
    args += ["train.batch_size=1", "train.save_every=9"]
    faults = {
        "late": ("wrong rows", 1),
        "before": ("the last partial block dropped in backward", 0),
        "right": ("wrong rows", 9),
    }
    cases = [(Case("fsdp2", (*args, f"run.dir={tmp_path / name}")), *faults[name]) for name in names]
    for rank in on_ranks(2, run_planted, cases, timeout=1200):
        assert [(outcome.exit_code, outcome.error) for outcome in rank] == [(0, "")] * len(names)
        assert all(outcome.sharded for outcome in rank)
    events = {name: lines(tmp_path / name, "events.jsonl") for name in names}
    expected = {"late": [("parity", "ada_norm")], "before": [("preflight", "ada_norm")], "right": []}
    assert {
        name: [(event["kind"], event["verdict"]["switch"]) for event in found] for name, found in events.items()
    } == {name: expected[name] for name in names}
    assert all((event["step"], event["action"]) == (2, "rollback") for event in events.get("late", []))


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_what_no_comparison_reached_is_said_and_is_not_on_by_itself(
    mode: str,
    lora_main: Main,
    smoke: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def too_large(_block: torch.nn.Module) -> Iterator[None]:
        raise torch.OutOfMemoryError
        yield

    monkeypatch.setattr(block_parity, "convert_to_fp32", too_large)
    args = [*smoke, "model.dtype=bf16", "train.steps=1", f"kernels.ada_norm={mode}"]
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    events = {e["verdict"]["switch"]: e for e in lines(tmp_path / "run", "events.jsonl")}
    assert {*events} == {"ada_norm", "qk_norm_rope", "lora_linear"}
    message = events["ada_norm"]["verdict"]["words"]
    assert "was not compared with its reference: not enough memory" in message
    assert message.endswith("requires it by name" if mode == "on" else "switched off for this run")
    assert events["ada_norm"]["action"] == ("report" if mode == "on" else "fallback")


def test_one_clip_and_a_bucket_of_few_are_compared_by_rows_that_differ(
    lora_main: Main,
    smoke: list[str],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a batch of two equal rows, the first one's tables are right for both."""
    one_clip_dir = tmp_path / "one"
    one_clip_dir.mkdir()
    clip = sorted(shape_clips.glob("*.mp4"))[0]
    for path in shape_clips.glob(f"{clip.stem}.*"):
        shutil.copy(path, one_clip_dir)
    table = (shape_clips / "metadata.jsonl").read_text().splitlines(True)
    (one_clip_dir / "metadata.jsonl").write_text("".join(t for t in table if clip.name in t))
    plant(monkeypatch, "ada_norm", "wrong rows", 0)
    args = [*smoke, f"data.path={one_clip_dir}", "train.batch_size=2", "train.steps=1"]
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    (event,) = lines(tmp_path / "run", "events.jsonl")
    assert event["verdict"]["switch"] == "ada_norm"


@pytest.mark.thorough
def test_where_nothing_is_held_the_steps_are_said_and_where_nothing_may_be_done_the_run_stops(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*smoke, "train.steps=4", "guard.parity_every=3", "guard.preflight=false"]
    args += ["kernels.ada_norm=on", "train.save_every=9"]
    plant(monkeypatch, "ada_norm", "wrong rows", 1)
    lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    (event,) = lines(tmp_path / "run", "events.jsonl")
    assert (event["action"], event["step"]) == ("fallback", 3)
    assert "steps 1 to 3 may have been trained with it" in event["verdict"]["words"]
    with pytest.raises(NonFiniteError, match="a kernel is faulty"):
        lora_main([*args, "guard.on_nonfinite=[stop]", f"run.dir={tmp_path / 'stopped'}"])


def test_blocks_of_a_deep_model_are_compared_in_turn() -> None:
    names = ["embed", *(f"blocks.{number}" for number in range(20)), "out"]
    compared_blocks, turn = set(), 0
    for _ in range(3):
        chosen_blocks, turn = kernel_parity.choose_blocks(names, turn)
        assert {"embed", "blocks.0", "blocks.19", "out"} <= chosen_blocks
        assert len(chosen_blocks) == 2 + kernel_parity._MAX_BLOCKS
        compared_blocks |= chosen_blocks
    assert compared_blocks == {*names}
