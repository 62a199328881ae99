"""Checks a state before it is saved: it is finite, not altered in memory, and has not diverged."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from dit_lora.errors import listed
from dit_lora.guard.gate import PoisonedStateError, any_not_finite
from dit_lora.guard.state import altered_state, has_run_away, weight_peak
from dit_lora.guard.suspects import Suspects
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import not_finite
from dit_lora.numerics.parameters import trainable_state
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.ema import TrainedEMA


def own_state(engine: Engine, ema: TrainedEMA | None) -> dict[str, torch.Tensor]:
    """All live state that training changes: weights, optimizer state and averages; this rank's part of sharded
    tensors.
    """
    return engine.own_state() | (ema.tensors() if ema else {})


def require_finite_everywhere(
    accelerator: Accelerator, state: Mapping[str, torch.Tensor], step: int
) -> None:
    """Raise `PoisonedStateError` on every rank if any rank's state is not finite. Collective."""
    parts = {name: local(tensor.detach()) for name, tensor in state.items()}
    floats = [tensor for tensor in parts.values() if tensor.is_floating_point()]
    # On the first tensor's device: the optimizer's numbers are on the CPU. One read; names are looked up only if
    # needed.
    is_bad = any_not_finite(floats, floats[0].device)
    bad = gather_object(not_finite(parts.items()) if is_bad else [])
    if bad:
        message = listed(f"step {step} is not saved: it is not finite", bad[:20])
        raise PoisonedStateError(message, "non_finite_weights")


def require_unaltered(
    accelerator: Accelerator, suspects: Suspects, step: int, *, frozen: bool
) -> None:
    """Raise `PoisonedStateError` on every rank if any rank's memory altered values outside of a step. Collective.

    `frozen` also compares frozen weights and buffers, which reads all of them.
    """
    altered = altered_state(suspects)
    # Only when a checkpoint is written: it reads the whole base.
    if frozen and suspects.frozen is not None:
        altered += suspects.frozen.changed()
    # Every rank raises if one of them found altered values.
    altered = gather_object(altered)
    if altered:
        message = listed(f"step {step} is not saved: it was altered", altered[:20])
        raise PoisonedStateError(message, "altered_state")


def require_not_lost(engine: Engine, start: float, step: int) -> None:
    """Raise `PoisonedStateError`, equally on all ranks, if trained weights are finite but have diverged."""
    peak = weight_peak(trainable_state(engine.bare).values(), together=engine.lockstep)
    if has_run_away(peak, start):
        raise PoisonedStateError(
            f"step {step}: trained weights reach {peak:.3g}", "diverged_weights"
        )
