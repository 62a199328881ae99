"""The ladder of answers to a step that tripped, with their budgets; needs torch alone, as the guard does."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from dit_lora.errors import DitLoraError

Rung = Literal["skip", "quarantine", "fallback", "rollback", "stop"]
RUNGS: tuple[Rung, ...] = get_args(Rung)


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """Says how a step that tripped is answered, and how often. Raises `DitLoraError` for a value out of its bounds.

    A recipe's `guard` section has these settings too, with the same defaults.
    """

    on_nonfinite: tuple[Rung, ...] = RUNGS
    """Answers in order of preference; the first that fits the cause and has budget left is taken, and the run stops
    where none does. `[stop]` never goes on."""
    max_skips: int = 10
    """Tripped steps that skip and quarantine may answer in one run; then it stops."""
    max_rollbacks: int = 2
    rollback_lr: float = 0.5
    """Learning rates are multiplied by this when a rollback did not help the first time, or when the verdict is that
    they are too high."""
    snapshot_every: int = 50
    """Steps between snapshots in host memory; the first is of the start. 0 takes none, in loops that are not ours:
    what only a rollback can mend then stops them, with nothing to go back to."""
    bundles: int = 5
    """Events of which a bundle for `dit-lora replay` is kept, per process."""
    bundle_mib: float = 512
    """Largest size of one bundle; what does not fit is left out, and said."""

    def __post_init__(self) -> None:
        # A list is as good as a tuple, as in a recipe.
        object.__setattr__(self, "on_nonfinite", tuple(self.on_nonfinite))
        wrong = [
            f"{name}={value!r}: it must be a whole number of 0 or more"
            for name in ("max_skips", "max_rollbacks", "snapshot_every", "bundles")
            if type(value := getattr(self, name)) is not int or value < 0
        ]
        if not 0 < self.rollback_lr < 1:
            wrong.append(f"rollback_lr={self.rollback_lr!r}: it must be between 0 and 1")
        if not 0 < self.bundle_mib < inf:
            wrong.append(f"bundle_mib={self.bundle_mib!r}: it must be above 0")
        if fault := ladder_fault(self.on_nonfinite):
            wrong.append(f"on_nonfinite={list(self.on_nonfinite)}: {fault}")
        if wrong:
            raise DitLoraError("LadderConfig: " + "; ".join(wrong))


def ladder_fault(rungs: Sequence[str]) -> str | None:
    """Return what is wrong with a ladder, or None."""
    if any(rung not in RUNGS for rung in rungs):
        return f"the rungs are {', '.join(RUNGS)}"
    if not rungs or len(set(rungs)) != len(rungs):
        return "name each rung once, and at least one; [stop] stops at every fault"
    return None
