"""Samples during training keep to a share of the steps' time, by what the last ones took."""

import pytest

from dit_lora.training.session.sample_budget import SamplingTimeBudget


def test_samples_are_spread_so_that_they_keep_to_the_share() -> None:
    """Steps of 1 s, samples of 5 s every 10 steps, at most a fifth of the time."""
    budget = SamplingTimeBudget(0.2)
    budget.add_sampling_time(0, 5.0, is_between=False)
    for step in range(1, 101):
        budget.step_s += 1.0
        if step % 10:
            continue
        if budget.is_affordable():
            budget.add_sampling_time(step, 5.0, is_between=True)
        else:
            budget.record_step_without_samples(step)
    assert budget.skipped_steps == [10, 20, 40, 60, 70, 90]
    assert budget.sample_s == 20.0


def test_the_first_samples_are_taken_when_nothing_is_known_of_their_time() -> None:
    budget = SamplingTimeBudget(0.1)
    assert budget.is_affordable()
    budget.add_sampling_time(2, 1.0, is_between=True)
    budget.step_s = 15.0
    assert not budget.is_affordable()
    budget.step_s = 20.0
    assert budget.is_affordable()


def test_without_a_share_nothing_is_left_out() -> None:
    budget = SamplingTimeBudget(None)
    budget.add_sampling_time(2, 1000.0, is_between=True)
    assert budget.is_affordable()
    assert budget.describe_skipped() is None


@pytest.mark.parametrize(
    ("steps", "listed"),
    [([4], "4;"), (range(2, 16, 2), "2, 4, 6, 8, 10 and 2 more;"), (range(1, 6), "1, 2, 3, 4, 5;")],
)
def test_the_closing_line_says_which_and_how_to_get_them(steps: range, listed: str) -> None:
    budget = SamplingTimeBudget(0.1, skipped_steps=list(steps))
    assert budget.describe_skipped() == f"no samples at steps {listed} validation.max_sample_share=null takes all"


def test_a_step_that_is_repeated_counts_once_and_not_if_it_has_samples_at_last() -> None:
    budget = SamplingTimeBudget(0.1)
    for step in (2, 4, 4, 6):
        budget.record_step_without_samples(step)
    budget.add_sampling_time(6, 1.0, is_between=False)
    assert budget.skipped_steps == [2, 4]
