"""Track which optimizers skipped their last step, so that their learning rate schedules skip it too."""

from collections import Counter
from typing import Any

from dit_lora.guard.attach.accelerator_adapter import unwrap_optimizer


class OptimizerStepCounter:
    """Counts each optimizer's steps, and remembers which optimizers were skipped last."""

    def __init__(self) -> None:
        self._num_steps: Counter[int] = Counter()
        """Number of steps due so far, taken or skipped, by the optimizer's id."""
        self._skipped_ids: set[int] = set()
        """Ids of optimizers whose last step was skipped."""
        self._steps_at_advance: dict[int, int] = {}
        """The optimizer's step count when a schedule last advanced, by the schedule's id."""

    def count_optimizer_step(self, optimizer: Any, *, skipped: bool) -> None:
        """Count a step of an optimizer, which is passed without Accelerate's wrapper."""
        key = id(optimizer)
        self._num_steps[key] += 1
        if skipped:
            self._skipped_ids.add(key)
        else:
            self._skipped_ids.discard(key)

    def should_skip_schedule_step(self, owner: Any) -> bool | None:
        """True if a learning rate schedule is about to advance for a skipped step.

        None if its optimizer has not stepped, or if it has none. A schedule that advances once after several steps, as
        at the end of an epoch, is not held.
        """
        # Schedules do not know Accelerate's wrapper.
        key = id(unwrap_optimizer(vars(owner).get("optimizer")))
        num_steps = self._num_steps[key]
        if not num_steps:
            return None
        # 1 for a schedule that advances after each step; more for one that advances per epoch.
        steps_since_advance = num_steps - self._steps_at_advance.get(id(owner), 0)
        self._steps_at_advance[id(owner)] = num_steps
        return key in self._skipped_ids and steps_since_advance <= 1
