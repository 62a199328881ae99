"""Limits kernel comparisons, the eval loss and gradient checks to a share of a run's training time.

The limits follow from counts, not from clocks: repeated runs make the same checks, and all ranks agree without
communication. They apply only where the recipe leaves a setting at its default.
"""

import math
from typing import NamedTuple

import torch

from dit_lora.config.recipe import Recipe

CHECK_SHARE = 0.015
"""Share of the steps that an eval loss before and after training may cost together, and that a comparison of kernels
may cost of the steps since the one before."""
MIN_EVAL_SAMPLES = 2
"""Forward passes that each eval loss may always take."""
GRADIENT_CHECK_SHARE = 0.01
"""Share of the steps that gradient checks may cost with `guard.gradient_every: auto`."""
_FORWARDS_PER_SAMPLE = 3
"""Cost of a training sample in forward passes: a backward pass takes about twice the time of a forward pass."""

_FORWARDS_PER_EVALUATION = 1.6
"""Cost of an evaluation of the loss in a gradient check, in forward passes: the weights are moved before each.

In steps of 150 ms on a CPU (`python -m benchmarks.gradient_check.cost`); in longer steps it is less."""


class EvalSize(NamedTuple):
    """Number of clips in the eval loss, and number of noise draws for each."""

    num_clips: int
    num_draws: int


def get_full_eval_size(recipe: Recipe, num_clips: int) -> EvalSize:
    """The size that the recipe asks for, with so many clips in the data."""
    return EvalSize(min(num_clips, recipe.validation.eval_clips), recipe.validation.eval_draws)


def find_reduced_eval_size(recipe: Recipe, num_clips: int, num_trained_samples: int) -> EvalSize | None:
    """The size of the eval losses of a new run; None for the recipe's own size.

    Args:
        recipe: Losses during training are measured in full, because the recipe asks for them.
        num_clips: Number of clips in the data.
        num_trained_samples: See `limit_eval_size`.
    """
    interval = recipe.validation.every
    if interval is not None and interval < recipe.train.steps:
        return None
    full = get_full_eval_size(recipe, num_clips)
    limited = limit_eval_size(full, num_trained_samples)
    return limited if limited != full else None


def has_eval_size_setting(recipe: Recipe) -> bool:
    """True if the recipe sets the clips or draws of the eval loss."""
    return bool({"eval_draws", "eval_clips"} & recipe.validation.model_fields_set)


def limit_eval_size(full: EvalSize, num_trained_samples: int) -> EvalSize:
    """The largest size whose two eval losses, before and after training, cost `CHECK_SHARE` of the training.

    Draws are reduced first, then clips.

    Args:
        full: The size that the recipe asks for.
        num_trained_samples: Samples of all steps of the run, for each rank that runs all of the eval loss.
    """
    # No draws: the recipe measures no eval loss.
    if not full.num_draws:
        return full
    affordable = max(MIN_EVAL_SAMPLES, int(CHECK_SHARE * num_trained_samples * _FORWARDS_PER_SAMPLE / 2))
    # All clips are kept as long as each has one draw.
    num_draws = min(full.num_draws, max(1, affordable // max(1, full.num_clips)))
    return EvalSize(min(full.num_clips, affordable), num_draws)


def count_affordable_block_passes(num_steps: float, num_blocks: int, num_kernels: int) -> int:
    """Passes of one block, forward and backward, that the comparison of each kernel may take; 0 or more.

    Args:
        num_steps: The steps that pay for the comparison, in steps of as many samples as are compared.
        num_blocks: Number of repeated blocks in the model.
        num_kernels: Number of kernels that are compared one after the other.
    """
    # Each kernel also takes a forward pass of the whole model, which gives the blocks their inputs.
    passes = CHECK_SHARE * num_steps * num_blocks / num_kernels - num_blocks / _FORWARDS_PER_SAMPLE
    return max(0, int(passes))


def estimate_gradient_evaluations(dtype: torch.dtype) -> int:
    """Evaluations of the loss in a gradient check of a model that computes in `dtype`."""
    # As benchmarks/gradient_check counts over healthy steps: in 16 bits, a replay in fp32 costs three times as much.
    return 22 if dtype in (torch.float32, torch.float64) else 80


def count_steps_to_cover_check(num_evaluations: int) -> int:
    """Number of steps that pay for a gradient check: their `GRADIENT_CHECK_SHARE` is as long as the check."""
    # An evaluation has a forward pass of all samples of a step.
    num_forwards = num_evaluations * _FORWARDS_PER_EVALUATION
    return math.ceil(num_forwards / _FORWARDS_PER_SAMPLE / GRADIENT_CHECK_SHARE)
