"""The result of one optimizer step, as passed to callbacks, the journal and trackers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step over all ranks: loss, gradient norms, learning rates and per-sample losses."""

    step: int
    loss: float
    grad_norm: float
    """The gradient norm over all groups, before clipping."""
    grad_norm_groups: dict[str, float]
    lr_groups: dict[str, float]
    losses: list[float]
    """The loss of every sample, ordered by rank, then micro-step."""
    timesteps: list[int]
    seconds: float
    data_seconds: float
    stop_code: int
    """The exit code with which some rank was asked to stop, or 0."""
