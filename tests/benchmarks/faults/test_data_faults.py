"""Bad samples are refused by name or left out without a trace; and the judge of it can say no."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from benchmarks.faults.data import FAULTS, DataFault, SoundOddity
from benchmarks.faults.fault import Expected
from benchmarks.faults.media.kind import write_good
from benchmarks.faults.suite import catalog, judge_all
from benchmarks.faults.target_table import DEFAULT, FAULT_TARGETS, targets_for
from benchmarks.faults.world import World


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("sana-600m", 4),
        ("dit-tiny", 1),
        pytest.param("flux-kontext", 4, marks=pytest.mark.thorough),
        pytest.param("ltx-2.3", 15, marks=pytest.mark.thorough),
    ],
)
def test_bad_samples_are_named_and_left_out(variant: str, count: int) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    targets = FAULT_TARGETS[variant]
    faults = [fault for fault in catalog(targets) if fault in FAULTS and fault.location == "data"]
    results = list(judge_all(faults, targets))
    assert not {result.name: result.why for result in results if not result.passed}
    assert len(results) == count


def test_every_variant_has_a_data_fault() -> None:
    for targets in FAULT_TARGETS.values():
        assert any(isinstance(fault, DataFault) for fault in catalog(targets)), targets.variant


def a_fault(name: str, kind: type[DataFault] = DataFault) -> Any:
    """The one of this name."""
    (data_fault,) = [fault for fault in FAULTS if fault.name == f"data: {name}"]
    assert isinstance(data_fault, kind)
    return data_fault


def write_fine(folder: Path) -> None:
    """A sample that nothing is wrong with, and its line."""
    write_good(folder / "fine.mp4")
    with (folder / "metadata.jsonl").open("a") as listing:
        listing.write('{"file_name": "fine.mp4", "text": "nothing is wrong"}\n')


def test_the_judge_can_say_no(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    world = World(tmp_path, Accelerator(cpu=True), targets_for(DEFAULT))
    world.reference("clean", ())

    accepted_fault = replace(a_fault("no bytes"), name="fine", file="fine.mp4", add_sample=write_fine)
    judgment = accepted_fault.judge(world)
    assert (judgment.named, judgment.recovered) == (False, False)
    assert {"not said: fine.mp4", "training had begun"} <= set(judgment.why)
    assert "the adapter is not that of a run that never had the sample" in judgment.why

    vague_fault = replace(a_fault("no bytes"), expected=Expected("refused", "left out", ("too dark",)))
    world.shared[vague_fault.peers(world.targets)] = world.shared[accepted_fault.peers(world.targets)]
    judgment = vague_fault.judge(world)
    assert (judgment.named, judgment.why[0]) == (False, "not said: too dark")

    rotation_fault = a_fault("a rotation flag", SoundOddity)
    lost_judgment = replace(rotation_fault, name="lost", files=("lost.mp4",)).judge(world)
    assert (lost_judgment.named, lost_judgment.recovered) == (True, False)
    assert lost_judgment.why == ("lost.mp4 is not trained on",)
    refused = replace(rotation_fault, name="refused", add_sample=a_fault("no bytes").add_sample).judge(world)
    assert (refused.named, refused.recovered) == (False, False)
