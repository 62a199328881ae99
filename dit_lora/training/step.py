"""What a step gives to whoever follows a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping, over all groups."""
    grad_norm_groups: dict[str, float]
    lr_groups: dict[str, float]
    losses: list[float]
    """Every sample's loss."""
    timesteps: list[int]
    seconds: float
    data_seconds: float
    stop_code: int
    """The exit code with which some rank was asked to stop, or 0."""
