"""Checks of short runs are reduced by counts that all ranks share, and never where the recipe sets them."""

from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.load import parse_recipe
from dit_lora.training.check_budget import (
    CHECK_SHARE,
    EvalSize,
    count_affordable_block_passes,
    find_reduced_eval_size,
    has_eval_size_setting,
    limit_eval_size,
)
from dit_lora.training.journal import Journal, read_reduced_eval_size

FULL = EvalSize(16, 4)


@pytest.mark.parametrize(
    ("num_trained_samples", "size"),
    [(20, (2, 1)), (400, (9, 1)), (1000, (16, 1)), (2000, (16, 2)), (2900, (16, 4)), (10**6, (16, 4))],
)
def test_draws_are_reduced_first_and_then_clips(num_trained_samples: int, size: tuple[int, int]) -> None:
    assert limit_eval_size(FULL, num_trained_samples) == size


def test_few_clips_and_no_draws_stay_as_they_are() -> None:
    assert limit_eval_size(EvalSize(1, 4), 20) == (1, 2)
    assert limit_eval_size(EvalSize(16, 0), 20) == (16, 0)
    assert limit_eval_size(EvalSize(0, 4), 20).num_clips == 0


@pytest.mark.parametrize("num_steps", [0, 12, 200, 2000])
def test_passes_of_a_comparison_stay_within_the_share(num_steps: int) -> None:
    num_blocks, num_kernels = 12, 2
    passes = count_affordable_block_passes(num_steps, num_blocks, num_kernels)
    # A third of a step's passes is the forward pass that each kernel takes.
    cost_in_steps = num_kernels * (passes + num_blocks / 3) / num_blocks
    assert cost_in_steps <= CHECK_SHARE * num_steps or passes == 0
    assert (passes > 0) is (num_steps >= 200)


@pytest.mark.parametrize(
    ("validation", "is_own", "size"),
    [
        ({}, False, (2, 1)),
        ({"eval_draws": 4}, True, (2, 1)),
        ({"eval_clips": 16}, True, (2, 1)),
        ({"every": 2}, False, None),
        ({"every": 500}, False, (2, 1)),
    ],
)
def test_what_the_recipe_sets_is_measured_as_asked(
    recipe_values: dict[str, Any], validation: dict[str, Any], is_own: bool, size: tuple[int, int] | None
) -> None:
    recipe_values["validation"] = validation
    recipe_values["train"]["steps"] = 20
    recipe = parse_recipe(recipe_values, "recipe")
    assert has_eval_size_setting(recipe) is is_own
    assert find_reduced_eval_size(recipe, 99, 40) == size
    assert find_reduced_eval_size(recipe, 99, 10**6) is None


def test_a_resumed_run_continues_with_the_size_it_began_with(tmp_path: Path) -> None:
    assert read_reduced_eval_size(tmp_path) == (False, None)
    Journal(tmp_path, start_step=0).write_eval_losses(0, {"eval_loss": 1.5})
    assert read_reduced_eval_size(tmp_path) == (True, None)
    Journal(tmp_path, start_step=0).write_eval_losses(0, {"eval_loss": 1.5}, EvalSize(4, 1))
    assert read_reduced_eval_size(tmp_path) == (True, EvalSize(4, 1))
