"""Decides when a run ends because its loss at fixed noise no longer falls (`train.stop_after`)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class EarlyStop:
    """Where a run ends before the recipe's last step."""

    step: int | None = None
    """The step after which training ends; None while it goes on."""


def find_best_step_if_stalled(losses: Mapping[int, float], stop_after: int) -> int | None:
    """Find the step of the lowest loss if at least `stop_after` later measurements are not lower; else None.

    Of equal losses, the first one is the lowest. `losses` are by step, and include step 0 if it was measured.
    """
    # Derived from the log, so that a resumed run counts on.
    best = min(losses, key=lambda step: (losses[step], step), default=0)
    return best if sum(step > best for step in losses) >= stop_after else None
