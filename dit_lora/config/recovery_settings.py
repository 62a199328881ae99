"""Settings for failed steps: the recovery actions and their limits. Imports only torch, like the guard."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, get_args

from dit_lora.errors import DitLoraError

RecoveryAction = Literal["skip", "quarantine", "fallback", "rollback", "stop"]
# The default order. `stop` comes last, because no action after it is reached.
RECOVERY_ACTIONS: tuple[RecoveryAction, ...] = get_args(RecoveryAction)
GRADIENT_CHECK_INTERVAL = 500
"""Steps between the gradient checks that `dit-lora guard --gradient-check` makes."""
MIN_SPIKE_WINDOW = 20
"""Steps that a median needs before values are compared with it."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Recovery actions for failed steps, and how often each may be used. Raises `DitLoraError` for invalid values.

    The `guard` section of a recipe has the same settings with the same defaults.
    """

    on_nonfinite: tuple[RecoveryAction, ...] = RECOVERY_ACTIONS
    """Recovery actions in order of preference: the first that fits the cause of a failed step and is below its limit.
    Without one, the run stops. `[stop]` stops at every failed step."""
    max_skips: int = 10
    """Maximum number of failed steps that a run may retry, skip or take without a quarantined sample."""
    max_rollbacks: int = 2
    rollback_lr: float = 0.5
    """Factor of all learning rates after a rollback, if an earlier rollback did not help or the diagnosis is that they
    are too high."""
    snapshot_every: int = 50
    """Steps between snapshots in host memory; the first is taken at the start. 0 takes none, in a loop of your own:
    bad weights can then not be restored."""
    bundles: int = 5
    """Maximum number of bundles for `dit-lora replay` that each process writes. In a run, those that its folder has at
    the start count too."""
    bundle_mib: float = 512
    """Maximum size of a bundle in MiB. A part that does not fit is left out and listed in bundle.json."""

    def __post_init__(self) -> None:
        # Accept a list too, as in a recipe.
        object.__setattr__(self, "on_nonfinite", tuple(self.on_nonfinite))
        messages = self._find_problems()
        if messages:
            raise DitLoraError(f"{type(self).__name__}: " + "; ".join(messages))

    def _find_problems(self) -> list[str]:
        # All problems are reported together.
        messages = _find_invalid_counts(self, ("max_skips", "max_rollbacks", "snapshot_every", "bundles"))
        # Written with `not`, so that NaN is refused too.
        if not 0 < self.rollback_lr < 1:
            messages.append(f"rollback_lr={self.rollback_lr!r}: it must be between 0 and 1")
        if not 0 < self.bundle_mib < inf:
            messages.append(f"bundle_mib={self.bundle_mib!r}: it must be above 0")
        if fault := find_actions_problem(self.on_nonfinite):
            messages.append(f"on_nonfinite={list(self.on_nonfinite)}: {fault}")
        return messages


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RecoveryConfig):
    """Settings of a guard in your own training loop. Raises `DitLoraError` for invalid values.

    By default nothing stops the loop: `on_nonfinite` has no `stop`. With `stop`, the guard raises `NonFiniteError` if
    no other action fits, or if `max_skips` is used up. The `guard` section of a recipe has the other settings under
    the same names.
    """

    on_nonfinite: tuple[RecoveryAction, ...] = RECOVERY_ACTIONS[:-1]

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
    gradient_every: int = 0
    """Steps between comparisons of the models' backward passes with the slopes of their outputs, which start in the
    first step; 0 for none."""

    @classmethod
    def from_script_options(cls, max_skips: int | None, **settings: Any) -> "LoopConfig":
        """Settings of `dit-lora guard`. Only with `max_skips` is the last recovery action stop."""
        if max_skips is None:
            return cls(**settings)
        return cls(on_nonfinite=RECOVERY_ACTIONS, max_skips=max_skips, **settings)

    @classmethod
    def from_recovery_config(cls, config: RecoveryConfig) -> "LoopConfig":
        """Convert recovery settings to those of a guard in a training loop.

        Settings that `config` does not have keep their defaults.
        """
        if isinstance(config, cls):
            return config
        # A config of the base class has fewer fields; the others keep their defaults.
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    def _find_problems(self) -> list[str]:
        messages = super()._find_problems() + _find_invalid_counts(self, ("monitor_every", "gradient_every"))
        threshold, window = self.spike_threshold, self.spike_window
        if threshold is not None and not 0 < threshold < inf:
            messages.append(f"spike_threshold={threshold!r}: it must be above 0, for instance 8")
        if type(window) is not int or window < MIN_SPIKE_WINDOW:
            messages.append(f"spike_window={window!r}: it must be a whole number of {MIN_SPIKE_WINDOW} or more")
        return messages


def _find_invalid_counts(config: RecoveryConfig, names: Sequence[str]) -> list[str]:
    return [
        f"{name}={value!r}: it must be a whole number of 0 or more"
        for name in names
        # `type`, not isinstance: True is an int too.
        if type(value := getattr(config, name)) is not int or value < 0
    ]


def find_actions_problem(actions: Sequence[str]) -> str | None:
    """Message about an invalid list of recovery actions; None if it is valid."""
    if any(action not in RECOVERY_ACTIONS for action in actions):
        return f"choose from {', '.join(RECOVERY_ACTIONS)}"
    if not actions or len(set(actions)) != len(actions):
        return "give at least one action and none twice; [stop] stops at every failed step"
    return None
