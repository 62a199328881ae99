"""What the judge of a fault refuses beside a wrong name: innocents lost, right switches off, words about nothing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.fault import Expected, Fault, judge_observation
from benchmarks.faults.suite import catalog
from benchmarks.faults.target_table import DEFAULT, targets_for
from benchmarks.faults.world import Observation, engine_of
from dit_lora.data.loading.quarantine import QuarantineRecord
from dit_lora.errors import DitLoraError

TARGETS = targets_for(DEFAULT)


def observed(folder: Path, *events: tuple[str, str, str | None]) -> Observation:
    """A run with events of a cause, an action and a switch."""
    lines: list[dict[str, Any]] = [
        {"verdict": {"cause": cause, "words": "", "switch": switch}, "action": action}
        for cause, action, switch in events
    ]
    return Observation(lines, None, None, folder, folder, "")


def why(expected: Expected, seen: Observation) -> tuple[str, ...]:
    return judge_observation(Fault("f", "place", "when", expected), seen, None, "b.mp4", TARGETS).why


def test_a_sample_that_is_left_out_for_good_is_seen(tmp_path: Path) -> None:
    observation = observed(tmp_path, ("step", "skip", None))
    expected = Expected("step", "skip", nobody_lost=True)
    lines = [asdict(QuarantineRecord("a.mp4", 0, to_epoch, 3, "step", "words")) for to_epoch in (0, None)]
    path = tmp_path / "quarantine.jsonl"
    path.write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
    assert not why(expected, observation)
    path.write_text(json.dumps(lines[1]) + "\n", encoding="utf-8")
    assert why(expected, observation) == ("left out for good: ['a.mp4']",)


def test_a_switch_that_is_off_and_right_is_seen(tmp_path: Path) -> None:
    both_events = [("transient", "retry", None), ("kernel", "fallback", "kernel:op")]
    observation = observed(tmp_path, *both_events)
    assert "kernel:op" in why(Expected("transient", "retry"), observation)[0]
    assert not why(Expected("transient", "retry", may_be_off=("kernel:op",)), observation)
    assert not why(Expected("kernel", "fallback"), observation)


def test_words_about_nothing_are_seen(tmp_path: Path) -> None:
    expected_silence = Expected("none", "none")
    assert not why(expected_silence, observed(tmp_path, ("precision", "report", None)))
    assert why(expected_silence, observed(tmp_path, ("transient", "retry", None)))


def test_a_fault_is_known_where_it_can_be() -> None:
    names = {fault.name: fault for fault in catalog(TARGETS, 2)}
    shared = {fault.name for fault in catalog(TARGETS, 2, "fsdp2")}
    single_rank = {fault.name for fault in catalog(TARGETS)}
    of_a_copy = "an adapter weight of one rank that is not the others'"
    of_a_row = "NaN for the second sample of a batch, whoever it is"
    assert of_a_copy in names
    assert of_a_copy not in shared | single_rank
    assert of_a_row in single_rank - names.keys()


def test_an_unknown_engine_is_refused() -> None:
    assert engine_of("fsdp2") == "fsdp2"
    with pytest.raises(DitLoraError, match="no engine is called 'fsdp'; there are: ddp, fsdp2"):
        engine_of("fsdp")
