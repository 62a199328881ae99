"""Track which optimizers skipped their last step, so that their learning rate schedules skip it too."""

from collections import Counter
from typing import Any

from dit_lora.guard.gate import ACCELERATED
from dit_lora.patching import is_a


class Turns:
    """Counts each optimizer's steps, whether they were taken or skipped."""

    def __init__(self) -> None:
        self._turns: Counter[int] = Counter()
        """Number of steps due so far, taken or skipped, by the optimizer's id."""
        self._left_out: set[int] = set()
        """Ids of optimizers whose last step was skipped."""
        self._moved_at: dict[int, int] = {}
        """The optimizer's step count when a schedule last advanced, by the schedule's id."""

    def count(self, optimizer: Any, *, left_out: bool) -> None:
        """Count a step of the optimizer, which is passed without Accelerate's wrapper."""
        key = id(optimizer)
        self._turns[key] += 1
        if left_out:
            self._left_out.add(key)
        else:
            self._left_out.discard(key)

    def shuts(self, owner: Any) -> bool | None:
        """True if a schedule advances for a skipped step; None if its optimizer has not stepped, or it has none.

        A schedule that advances once after several steps, as at the end of an epoch, is not held.
        """
        key = id(_bare(vars(owner).get("optimizer")))
        num_steps = self._turns[key]
        if not num_steps:
            return None
        # 1 for a schedule that advances after each step; more for one that advances per epoch.
        steps_since_advance = num_steps - self._moved_at.get(id(owner), 0)
        self._moved_at[id(owner)] = num_steps
        return key in self._left_out and steps_since_advance <= 1


def _bare(optimizer: Any) -> Any:
    """The optimizer without Accelerate's wrapper, which schedules do not know."""
    return optimizer.optimizer if is_a(optimizer, ACCELERATED) else optimizer
