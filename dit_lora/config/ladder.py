"""The ladder of answers to a step that tripped, with their budgets; needs torch alone, as the guard does."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, get_args

from dit_lora.errors import DitLoraError

Rung = Literal["skip", "quarantine", "fallback", "rollback", "stop"]
RUNGS: tuple[Rung, ...] = get_args(Rung)
SHORTEST_WINDOW = 20
"""Steps that a median needs before anything is judged by it."""


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
        wrong = self._faults()
        if wrong:
            raise DitLoraError(f"{type(self).__name__}: " + "; ".join(wrong))

    def _faults(self) -> list[str]:
        wrong = _no_counts(self, ("max_skips", "max_rollbacks", "snapshot_every", "bundles"))
        if not 0 < self.rollback_lr < 1:
            wrong.append(f"rollback_lr={self.rollback_lr!r}: it must be between 0 and 1")
        if not 0 < self.bundle_mib < inf:
            wrong.append(f"bundle_mib={self.bundle_mib!r}: it must be above 0")
        if fault := ladder_fault(self.on_nonfinite):
            wrong.append(f"on_nonfinite={list(self.on_nonfinite)}: {fault}")
        return wrong


@dataclass(frozen=True, kw_only=True)
class LoopConfig(LadderConfig):
    """Settings of a guard in somebody else's loop. Raises `DitLoraError` as its base does.

    By default nothing ends the loop: `on_nonfinite` has no `stop`. With one, `NonFiniteError` ends it where no other
    answer fits, or `max_skips` is used up. A recipe's `guard` section has the other settings under the same names.
    """

    on_nonfinite: tuple[Rung, ...] = RUNGS[:-1]

    preflight: bool = False
    """Check base weights, gradients and attention at the first step, and switch off the attention backends that are
    wrong."""
    monitor_every: int = 0
    """Steps between statistics of every module in statistics.jsonl; 0 for none. Blocks that are compiled are compiled
    once more for them."""
    spike_threshold: float | None = None
    """Report losses and gradient norms this many MADs above their median; None for none."""
    spike_window: int = 200
    """Steps in that median."""

    @classmethod
    def for_script(cls, max_skips: int | None, **settings: Any) -> "LoopConfig":
        """Settings of the command: with a number of skips the ladder ends in a stop, without one nothing stops."""
        if max_skips is None:
            return cls(**settings)
        return cls(on_nonfinite=RUNGS, max_skips=max_skips, **settings)

    @classmethod
    def of(cls, config: LadderConfig) -> "LoopConfig":
        """Return these settings as those of a loop, with nothing more to look at where they do not say."""
        if isinstance(config, cls):
            return config
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    def _faults(self) -> list[str]:
        wrong = super()._faults() + _no_counts(self, ("monitor_every",))
        threshold, window = self.spike_threshold, self.spike_window
        if threshold is not None and not 0 < threshold < inf:
            wrong.append(f"spike_threshold={threshold!r}: it must be above 0, for instance 8")
        if type(window) is not int or window < SHORTEST_WINDOW:
            wrong.append(
                f"spike_window={window!r}: it must be a whole number of {SHORTEST_WINDOW} or more"
            )
        return wrong


def _no_counts(config: LadderConfig, names: Sequence[str]) -> list[str]:
    return [
        f"{name}={value!r}: it must be a whole number of 0 or more"
        for name in names
        if type(value := getattr(config, name)) is not int or value < 0
    ]


def ladder_fault(rungs: Sequence[str]) -> str | None:
    """Return what is wrong with a ladder, or None."""
    if any(rung not in RUNGS for rung in rungs):
        return f"the rungs are {', '.join(RUNGS)}"
    if not rungs or len(set(rungs)) != len(rungs):
        return "name each rung once, and at least one; [stop] stops at every fault"
    return None
