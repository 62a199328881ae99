"""Holds what recovery changes of a run, and what a run's guard goes on from."""

from dataclasses import dataclass, field

from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.guard.policy import Policy
from dit_lora.guard.switches import Switch


@dataclass
class GuardState:
    """Changes that recovery has made to a run; they go into its checkpoints."""

    lr_scale: float = 1.0
    switched_off: list[str] = field(default_factory=list)
    passed: int | None = None
    """The step of the last comparison of kernels that found nothing, in this run or in the one that it resumes."""


@dataclass(frozen=True)
class GuardStart:
    """State from which the guard of a run goes on."""

    state: GuardState
    policy: Policy
    switches: list[Switch]
    quarantine: Quarantine
    start_peak: float
    """The largest trained weight before the run's first step."""
