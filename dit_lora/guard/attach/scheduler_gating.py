"""Which optimizers were to step, and whether their schedules move for it."""

from collections import Counter
from typing import Any

from dit_lora.guard.gate import ACCELERATED
from dit_lora.patching import is_a


class Turns:
    """Counts each optimizer's turns, be they taken or left out."""

    def __init__(self) -> None:
        self._turns: Counter[int] = Counter()
        """Times that an optimizer, by its id, was to step."""
        self._left_out: set[int] = set()
        """Optimizers whose last step was left out."""
        self._moved_at: dict[int, int] = {}
        """Turns of its optimizer when a schedule last moved, by the schedule's id."""

    def count(self, optimizer: Any, *, left_out: bool) -> None:
        """Count a turn of the optimizer, which is without Accelerate's wrapper."""
        key = id(optimizer)
        self._turns[key] += 1
        if left_out:
            self._left_out.add(key)
        else:
            self._left_out.discard(key)

    def shuts(self, owner: Any) -> bool | None:
        """Return True if a schedule moves for a step that was left out; None if it is of no optimizer that had a turn.

        One that moves after several steps moves for all of them, as at the end of an epoch.
        """
        key = id(_bare(vars(owner).get("optimizer")))
        turns = self._turns[key]
        if not turns:
            return None
        since = turns - self._moved_at.get(id(owner), 0)
        self._moved_at[id(owner)] = turns
        return key in self._left_out and since <= 1


def _bare(optimizer: Any) -> Any:
    """Return the optimizer without Accelerate's wrapper, which schedules do not know."""
    return optimizer.optimizer if is_a(optimizer, ACCELERATED) else optimizer
