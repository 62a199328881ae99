"""The gate: keep losses and gradients that are not finite from reaching a weight, on any rank.

Flags stay on the device. A fused optimizer reads them there and leaves weights and moments unchanged; the host reads
them with the step's metrics, so a healthy step needs no extra synchronization.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import compute_magnitudes
from dit_lora.patching import is_instance_of

if TYPE_CHECKING:  # the guard needs only torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


ACCELERATED = "accelerate.optimizer:AcceleratedOptimizer"


class NonFiniteError(DitLoraError):
    """Raised on every rank when the guard stops a run.

    Its message names the step whose weights the run now has, or says that they must not be used.
    """

    exit_code = 3
    collective = True

    def __init__(self, message: str, event: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.event = dict(event)
        """The line for events.jsonl."""


class BadStateError(DitLoraError):
    """Raised on every rank if state that is about to be stored is not finite, or lost; the loop recovers from it."""

    exit_code = 3
    collective = True

    def __init__(self, message: str, kind: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        """The `kind` of the `RunFailure` that this error leads to."""
        self.diagnosis = diagnosis
        """The diagnosis if it is already known, equal on all ranks; else None."""


@dataclass(frozen=True)
class StepFailure:
    """A failed optimizer step: it was not taken, or its weight update must be undone.

    `RunFailure` (training/recovery/run_recovery.py) and `LoopFailure` (guard/attach/loop_recovery.py) add what a
    diagnosis in their kind of loop needs.
    """

    step: int
    kind: str
    """`non_finite_loss`, `bad_data`, `non_finite_gradient`, `zero_gradient`, `non_finite_weights`,
    `diverged_weights`, `diverged_averages` or `ranks_differ`; other loops have more."""


@dataclass
class Gate:
    """Flags that tell whether one optimizer step is finite. Every rank calls the same methods in the same order.

    Each flag is computed once: `reduce_flags` gates the optimizer with it on the device, and `local_flags` go to the
    host with the step's metrics, which name the failure. So device and host cannot disagree.
    """

    accelerator: "Accelerator"
    _loss_flags: list[torch.Tensor] = field(default_factory=list)
    _gradient_flags: list[torch.Tensor] = field(default_factory=list)
    _has_bad_data: bool = False

    def record_losses(self, losses: torch.Tensor, *, bad_data: bool = False) -> None:
        """Record whether losses (B,) are finite, before their backward, and whether reading found bad data."""
        # Keep the flag on the device: reading it here would make the host wait in every micro-step.
        self._loss_flags.append(~torch.isfinite(losses.detach()).all())
        # Not among the device's flags: the loop sends it to the other ranks' hosts in a column of the metrics.
        self._has_bad_data |= bad_data

    def record_gradient_norms(self, norms: Mapping[str, torch.Tensor]) -> None:
        """Record the norm of each group's gradient, after the last micro-step and before clipping spreads one NaN.

        A norm is finite only if every element is. A step in which every norm is zero trains nothing and still decays
        moments and weights, so it counts as bad too.
        """
        # (number of parameter groups,)
        stacked = torch.stack(list(norms.values()))
        self._gradient_flags = [~torch.isfinite(stacked).all(), (stacked == 0).all()]

    @cached_property
    def local_flags(self) -> torch.Tensor:
        """This rank's flags of one optimizer step, once all are recorded: (micro-steps + 2,) bool on the device.

        True where a micro-step has a loss that is not finite; then if a gradient norm is not finite; if all are zero.
        """
        return torch.stack([*self._loss_flags, *self._gradient_flags])

    def reduce_flags(self) -> torch.Tensor:
        """1.0 if any rank recorded a problem in this step, else 0.0, fp32 scalar on the device. One all-reduce."""
        # All micro-batches of this step together decide about it.
        flag = (self.local_flags.any() | self._has_bad_data).float()
        if self.accelerator.num_processes > 1:
            # Accelerate can reduce by sum or mean, but not by maximum.
            flag = self.accelerator.reduce(flag, reduction="sum").clamp(max=1.0)
        return flag


def take_step_unless_bad(optimizer: "torch.optim.Optimizer | AcceleratedOptimizer", is_bad: torch.Tensor) -> None:
    """Take the optimizer's step unless `is_bad`; else weights, moments and step counts stay unchanged bit for bit.

    Fused optimizers decide on the device, through the `found_inf` of GradScaler. Others, and sharded parameters, need
    one read by the host.
    """
    # `found_inf` belongs on torch's optimizer, not on Accelerate's wrapper.
    inner: Any = optimizer
    if is_instance_of(optimizer, ACCELERATED):
        inner = inner.optimizer
    if not can_skip_on_device(inner):
        # This is the host's one read: it waits for the device here.
        if not is_bad:
            optimizer.step()
        return
    inner.found_inf = is_bad
    try:
        optimizer.step()
    finally:
        # Remove the flag, which would otherwise apply to the next step too.
        del inner.found_inf


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer can skip a step by a flag on the device: torch's fused Adam and AdamW.

    Fused SGD can too, but if its first step is skipped, its momentum is uninitialized memory.
    """
    # Subclasses inherit the ability, so compare the names of all base classes.
    classes = {f"{cls.__module__}:{cls.__qualname__}" for cls in type(optimizer).__mro__}
    # Sharded parameters, and optimizers that are not fused, need the host to decide.
    is_supported = any(record.found_inf_class in classes for record in OPTIMIZERS.values())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_supported and is_fused and not any(isinstance(parameter, DTensor) for parameter in parameters)


def has_nonfinite_weights(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """True (bool scalar on the device) if a trained weight is not finite after the optimizer's step.

    Detects errors that no gradient shows: a moment damaged in memory, an update that overflowed. An optimizer that
    takes only the sign of its update, such as Lion, hides both.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return has_nonfinite(weights, weights[0].device)


def has_nonfinite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """True (bool scalar on the device) if this rank's part of any tensor has a value that is not finite."""
    parts = [get_local_tensor(tensor.detach()) for tensor in tensors]
    # With FSDP2, some ranks hold nothing of a weight with fewer rows than there are ranks.
    return ~torch.isfinite(compute_magnitudes([part for part in parts if part.numel()], device)).all()
