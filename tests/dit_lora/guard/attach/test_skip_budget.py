"""Cost of failed steps: each new cause counts once in the last hundred steps."""

from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.diagnosis import Cause, Diagnosis


def verdict(cause: Cause, *names: str, step: int = 1) -> Diagnosis:
    return Diagnosis(cause, "", step=step, rank=0, sample_ids=names)


def test_steps_that_failed_for_something_new_are_counted_and_samples_are_not() -> None:
    budget = SkipBudget()
    budget.count_skipped_step(1, [verdict("data", "dataset index 5", "dataset index 6")])
    assert budget.count_recent_incidents(1) == 1
    budget.count_skipped_step(2, [verdict("data", "dataset index 6")])
    assert budget.count_recent_incidents(2) == 1
    budget.count_skipped_step(3, [verdict("data", "dataset index 6", "dataset index 7")])
    assert budget.count_recent_incidents(3) == 2
    # A numbered row is nobody that could have failed before.
    for step in (4, 5):
        budget.count_skipped_step(step, [verdict("inputs", "row 1 of micro-batch 0")])
    budget.count_skipped_step(6, [verdict("unknown")])
    assert budget.count_recent_incidents(6) == 5
    assert budget.count_recent_incidents(102) == 4
    assert budget.count_recent_incidents(200) == 0


def test_what_is_known_is_bad_as_it_is_stored() -> None:
    budget = SkipBudget()
    assert not budget.has_known_causes([verdict("data", "dataset index 5")])
    budget.count_skipped_step(1, [verdict("data", "dataset index 5"), verdict("inputs", "dataset index 6")])
    assert budget.has_known_causes([verdict("data", "dataset index 5")])
    assert not budget.has_known_causes([verdict("inputs", "dataset index 6")])
    assert not budget.has_known_causes([verdict("data", "dataset index 5"), verdict("unknown")])
    assert not budget.has_known_causes([])


def test_many_lost_steps_in_a_row_train_nothing() -> None:
    budget = SkipBudget()
    for step in range(9):
        budget.count_skipped_step(step, [verdict("data", "dataset index 5")])
    assert not budget.has_too_many_lost_steps(2)
    budget.count_lost_step(9, [verdict("data", "dataset index 5")])
    assert budget.has_too_many_lost_steps(2)
    assert not budget.has_too_many_lost_steps(20)
    budget.count_taken_step(10)
    assert not budget.has_too_many_lost_steps(2)


def test_the_closing_line_has_every_sample_with_its_steps() -> None:
    budget = SkipBudget()
    assert budget.format_summary() is None
    budget.count_skipped_step(1, [verdict("inputs", "clip 7")])
    for step in range(2, 4):
        budget.count_skipped_step(step, [verdict("unknown", "dataset index 5")])
        budget.count_taken_step(step + 2)
    budget.count_taken_step(6)
    # What a rollback or a stop answers counts too.
    budget.count_lost_step(7, [verdict("data", "dataset index 5")])
    assert budget.format_summary() == (
        "4 of 7 optimizer steps were not taken; remove or repair the samples that caused it: "
        "dataset index 5 (3x), clip 7 (1x)"
    )
    budget.count_skipped_step(9, [verdict("unknown")])
    line = budget.format_summary()
    assert line is not None
    assert line.endswith("clip 7 (1x); 1 had another cause (events.jsonl)")
