"""The state of recovery, and the guard's state at the start of a run."""

from dataclasses import dataclass, field

from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.recovery_policy import Policy


@dataclass
class GuardState:
    """Changes that recovery has made to a run, saved in its checkpoints."""

    lr_scale: float = 1.0
    switched_off: list[str] = field(default_factory=list)
    passed: int | None = None
    """Step of the last comparison of kernels that found no difference, in this run or the one it resumes."""


@dataclass(frozen=True)
class GuardStart:
    """State of the guard when the process starts, restored from a checkpoint or new."""

    state: GuardState
    policy: Policy
    fallbacks: list[Fallback]
    quarantine: Quarantine
    start_peak: float
    """The largest trained weight before the run's first step."""
