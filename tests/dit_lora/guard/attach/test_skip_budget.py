"""Cost of failed steps: each new cause counts once in the last hundred steps."""

from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.verdict import Cause, Verdict


def verdict(cause: Cause, *names: str, step: int = 1) -> Verdict:
    return Verdict(cause, "", step=step, rank=0, sample_ids=names)


def test_steps_that_failed_for_something_new_are_counted_and_samples_are_not() -> None:
    budget = SkipBudget()
    budget.skip(1, [verdict("data", "dataset index 5", "dataset index 6")])
    assert budget.spent(1) == 1
    budget.skip(2, [verdict("data", "dataset index 6")])
    assert budget.spent(2) == 1
    budget.skip(3, [verdict("data", "dataset index 6", "dataset index 7")])
    assert budget.spent(3) == 2
    # A numbered row is nobody that could have failed before.
    for step in (4, 5):
        budget.skip(step, [verdict("inputs", "row 1 of micro-batch 0")])
    budget.skip(6, [verdict("unknown")])
    assert budget.spent(6) == 5
    assert budget.spent(102) == 4
    assert budget.spent(200) == 0


def test_what_is_known_is_bad_as_it_is_stored() -> None:
    budget = SkipBudget()
    assert not budget.knows([verdict("data", "dataset index 5")])
    budget.skip(1, [verdict("data", "dataset index 5"), verdict("inputs", "dataset index 6")])
    assert budget.knows([verdict("data", "dataset index 5")])
    assert not budget.knows([verdict("inputs", "dataset index 6")])
    assert not budget.knows([verdict("data", "dataset index 5"), verdict("unknown")])
    assert not budget.knows([])


def test_many_lost_steps_in_a_row_train_nothing() -> None:
    budget = SkipBudget()
    for step in range(9):
        budget.skip(step, [verdict("data", "dataset index 5")])
    assert not budget.is_stuck(2)
    budget.lose(9, [verdict("data", "dataset index 5")])
    assert budget.is_stuck(2)
    assert not budget.is_stuck(20)
    budget.take(10)
    assert not budget.is_stuck(2)


def test_the_closing_line_has_every_sample_with_its_steps() -> None:
    budget = SkipBudget()
    assert budget.closing() is None
    budget.skip(1, [verdict("inputs", "clip 7")])
    for step in range(2, 4):
        budget.skip(step, [verdict("unknown", "dataset index 5")])
        budget.take(step + 2)
    budget.take(6)
    # What a rollback or a stop answers counts too.
    budget.lose(7, [verdict("data", "dataset index 5")])
    assert budget.closing() == (
        "4 of 7 optimizer steps were not taken; remove or mend the samples that cost them: "
        "dataset index 5 (3x), clip 7 (1x)"
    )
    budget.skip(9, [verdict("unknown")])
    line = budget.closing()
    assert line is not None
    assert line.endswith("clip 7 (1x); 1 had another cause (events.jsonl)")
