"""The result of one optimizer step, as whoever follows a run receives it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    """The gradient norm over all groups, before clipping."""
    grad_norm_groups: dict[str, float]
    lr_groups: dict[str, float]
    losses: list[float]
    """The loss of every sample, in the order of ranks and micro-steps."""
    timesteps: list[int]
    seconds: float
    data_seconds: float
    stop_code: int
    """The exit code with which some rank was asked to stop, or 0."""
