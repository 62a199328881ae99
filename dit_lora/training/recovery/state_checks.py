"""Checks a state before it is saved: it is finite, not altered in memory, and has not diverged."""

from collections.abc import Mapping

import torch

from dit_lora.errors import format_list
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.finite_gate import BadStateError, has_nonfinite
from dit_lora.guard.state_checks import compute_weight_peak, describe_altered_state, is_unusable_magnitude
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import describe_nonfinite_tensors
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.ema import TrainedEMA


def collect_local_state(engine: Engine, ema: TrainedEMA | None) -> dict[str, torch.Tensor]:
    """All live state that training changes: weights, optimizer state and moving averages.

    Of sharded tensors, this rank's shards.
    """
    return engine.local_state_dict() | (ema.named_averages() if ema else {})


def require_finite_everywhere(state: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise `BadStateError` on every rank if any rank's weights, optimizer state or averages are not finite.

    Collective.
    """
    parts = {name: get_local_tensor(tensor.detach()) for name, tensor in state.items()}
    floats = [tensor for tensor in parts.values() if tensor.is_floating_point()]
    # One read, on the first tensor's device (the optimizer's numbers are on the CPU); names only if needed.
    is_bad = has_nonfinite(floats, floats[0].device)
    bad = gather_object(describe_nonfinite_tensors(parts.items()) if is_bad else [])
    if bad:
        message = format_list(f"step {step} is not saved: its state is not finite", bad[:20])
        raise BadStateError(message, "non_finite_weights")


def require_uncorrupted_state(diagnosis_context: DiagnosisContext, step: int, *, check_frozen: bool) -> None:
    """Raise `BadStateError` on every rank if any rank's memory altered values outside of a step. Collective.

    `check_frozen` also compares frozen weights and buffers, which reads all of them.
    """
    altered = describe_altered_state(diagnosis_context)
    # Only when a checkpoint is written: it reads the whole base.
    if check_frozen and diagnosis_context.frozen_record is not None:
        altered += diagnosis_context.frozen_record.describe_changes()
    # Every rank raises if one of them found altered values.
    altered = gather_object(altered)
    if altered:
        message = format_list(f"step {step} is not saved: memory has altered its state", altered[:20])
        raise BadStateError(message, "altered_state")


def require_not_diverged(engine: Engine, start_peak: float, step: int) -> None:
    """Raise `BadStateError`, equally on all ranks, if trained weights are finite but have diverged."""
    weights = get_trainable_parameters(engine.unwrapped_model).values()
    peak = compute_weight_peak(weights, all_ranks=engine.collective_forward)
    if is_unusable_magnitude(peak, start_peak):
        raise BadStateError(f"step {step}: trained weights reach {peak:.3g}", "diverged_weights")
