"""What a run leaves when its guard stops it: the last good step, on disk, and what was found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recovering import Guarded, equal, make_diagnosis

from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.finite_gate import NonFiniteError


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


@pytest.mark.parametrize("cause", ["data", "transient", "kernel", "unknown"])
def test_a_stop_saves_the_last_good_step_and_says_what_helps(tmp_path: Path, cause: str) -> None:
    guarded = Guarded(tmp_path, on_nonfinite=["stop"])
    sample = guarded.in_step(3)[0]
    samples = [sample] if cause in ("data", "unknown") else []
    with pytest.raises(NonFiniteError) as error:
        guarded.fail_step(3, make_diagnosis(cause, *samples))
    message = str(error.value)
    assert message.startswith("step 3: non-finite loss; the weights are those of step 2\n")
    assert f": it is {cause}" in message
    assert ("replay the bundle" in message) == (cause in ("kernel", "unknown"))
    assert ("train.resume=auto" in message) == (cause in ("data", "transient"))
    assert ("save", 2) in guarded.files.calls
    assert ("set_aside_bad", samples) in guarded.files.calls
    assert error.value.event == guarded.files.events[0]


@pytest.mark.parametrize(
    ("step", "cause", "words"),
    [
        (3, "learning_rate", "nothing was saved at this step: start again"),
        (3, "weights", "nothing was saved at this step: train.resume=auto continues from the newest"),
        (1, "transient", "the weights are those of step 0"),
    ],
)
def test_a_stop_saves_nothing_where_nothing_is_good(tmp_path: Path, step: int, cause: str, words: str) -> None:
    guarded = Guarded(tmp_path, on_nonfinite=["stop"])
    with pytest.raises(NonFiniteError) as error:
        guarded.fail_step(step, make_diagnosis(cause))
    assert "save" not in [call[0] for call in guarded.files.calls]
    assert words in str(error.value)


def test_a_stop_whose_checkpoint_cannot_be_written_still_names_the_cause(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, on_nonfinite=["stop"])
    guarded.files.refuse = DitLoraError("cannot save the checkpoint of step 2: disk full")
    with pytest.raises(NonFiniteError) as error:
        guarded.fail_step(3, make_diagnosis("data", guarded.in_step(3)[0]))
    assert "it is data" in str(error.value)
    assert str(error.value).endswith("disk full")


def frozen(found: Diagnosis) -> Diagnosis:
    return replace(found, evidence={**found.evidence, "frozen": True})


def test_a_bad_frozen_weight_costs_no_trained_one(guarded: Guarded) -> None:
    """The step was not taken: the trained weights are those of the previous step, which are saved."""
    guarded.recovery.snapshots.take_snapshot(2)
    guarded.train(3, 4)
    expected = guarded.copy()
    with pytest.raises(NonFiniteError) as error:
        guarded.fail_step(5, frozen(make_diagnosis("weights")))
    assert ("save", 4) in guarded.files.calls
    assert equal(guarded.state(), expected)
    assert "the weights are those of step 4" in str(error.value)
    assert "step 4 is saved in checkpoints/step_000004: " in str(error.value)


@pytest.mark.parametrize(("newest", "saved"), [(0, [2]), (2, []), (3, [])])
def test_a_stop_for_bad_trained_weights_saves_the_newest_snapshot_that_no_checkpoint_is_newer_than(
    tmp_path: Path, newest: int, saved: list[int]
) -> None:
    guarded = Guarded(tmp_path, on_nonfinite=["stop"])
    guarded.train(1, 2)
    guarded.recovery.snapshots.take_snapshot(2)
    expected = guarded.copy()
    guarded.train(3, 4)
    guarded.files.newest = newest
    guarded.model.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError) as error:
        guarded.fail_step(5, make_diagnosis("weights"))
    assert [call[1] for call in guarded.files.calls if call[0] == "save"] == saved
    assert equal(guarded.state(), expected) == bool(saved)
    expected_message = (
        "step 2 is saved in checkpoints/step_000002, without the 2 after it"
        if saved
        else ("nothing was saved at this step")
    )
    assert expected_message in str(error.value)


def test_what_was_found_is_said_once_after_all_its_places_and_a_rollback_says_what_it_costs(
    guarded: Guarded,
) -> None:
    guarded.recovery.snapshots.take_snapshot(0)
    guarded.train(1, 5)
    diagnoses = [replace(make_diagnosis("weights"), micro_step=micro) for micro in range(2)]
    assert guarded.fail_step(6, *diagnoses) == 0
    (message,) = guarded.files.said
    assert message.count(diagnoses[0].message) == 1
    assert "rolled back to step 0: 5 healthy step(s) are repeated" in message
    assert len(guarded.files.events) == 2
