"""Kernels that are wrong from a step on: found within `guard.parity_every`, named, off, and their steps taken again."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_checks import by
from planted_kernels import FAULTS, plant
from runs import adapter, lines

from dit_lora.fuse import api

Main = Callable[[list[str]], None]
EVERY = 3
STALE = [name for name in FAULTS if "stale" in name]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` takes everything, by its reference."""
    monkeypatch.setattr(api, "_why_off", lambda *_: None)
    with by("reference", monkeypatch):
        yield


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


def apart(one: Path, other: Path) -> float:
    """How far a run's adapter is from another's, of what training has changed."""
    first, second = adapter(one), adapter(other)
    names = [name for name in first if "lora_B" in name]
    difference = sum((first[n] - second[n]).float().square().sum() for n in names)
    size = sum(second[n].float().square().sum() for n in names)
    return float((difference / size).sqrt())


CASES = [
    ("values 0.1 % off", "ada_norm", 4, ()),
    ("wrong rows", "ada_norm", 0, ("model.dtype=bf16",)),
    ("the last partial block dropped in backward", "ada_norm", 1, ("train.batch_size=1",)),
    ("stale memory in 2 % of calls", "ada_norm", 4, ()),
    *(
        thorough(fault, op, step, settings)
        for fault in FAULTS
        for op in ("ada_norm", "qk_norm_rope")
        for step in (0, 1, 4)
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
    args = [*smoke, "train.steps=8", f"guard.parity_every={EVERY}", "guard.snapshot_every=5"]
    args += ["train.save_every=8", *settings]
    with monkeypatch.context() as patch:
        plant(patch, op, fault, step)
        lora_main([*args, f"run.dir={tmp_path / 'run'}"])
    found = lines(tmp_path / "run", "events.jsonl")
    assert [event["verdict"]["switch"] for event in found] == [op], found
    (event,) = found
    assert event["verdict"]["cause"] == "kernel"
    assert event["kind"] == ("parity" if step else "preflight")
    assert step <= event["step"] <= step + EVERY
    assert event["action"] == ("rollback" if step else "fallback")
    assert ("nondeterministic" in event["verdict"]["words"]) is (fault in STALE)
    assert len(lines(tmp_path / "run", "metrics.jsonl")) == 8
    never = [*args, f"kernels.{op}=off", f"run.dir={tmp_path / 'never'}"]
    lora_main(never)
    within = 0.02 if "model.dtype=bf16" in settings else 1e-3
    assert apart(tmp_path / "run", tmp_path / "never") < within
