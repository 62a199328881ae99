"""Decide whether the trained state of a loop is good enough for a snapshot or a save."""

from math import isfinite

import torch

from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.finite_checks import compute_max_magnitude
from dit_lora.guard.attach.finite_values import is_finite_tensor
from dit_lora.guard.attach.loop_recovery import BAD_WEIGHTS
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.state_checks import compute_weight_peak, describe_altered_state, is_unusable_magnitude

_GROWTH_FACTOR = 100.0
"""If the largest trained value grows by this factor between snapshots, single elements are checked."""


class StateChecks:
    """Checks of a loop's trained weights, optimizer state, moving averages and frozen weights."""

    def __init__(self, host: LoopProcessContext, state: LoopState, watched: WatchedModels) -> None:
        self._host = host
        self._state = state
        self._watched = watched
        self._peak = 0.0
        """Largest magnitude of the trained state when a snapshot was last due."""

    def has_damaged_state(self) -> bool:
        """True if this rank's trained state is not finite, or memory has altered an element of it. Cheap."""
        peak = compute_max_magnitude(self._state.exclude_infinite_state(self._state.collect_tensors()).values())
        previous_peak, self._peak = self._peak, peak
        if not isfinite(peak):
            return True
        # Looking at single elements is slow, so do it only after a jump.
        return peak > _GROWTH_FACTOR * previous_peak > 0 and bool(describe_altered_state(self._watched.joint_context))

    def has_nonfinite_moment(self) -> bool:
        """True if this rank's optimizer state has a non-finite value in a tensor of a weight's shape, as a moment."""
        # Moments have the shape of their weight; scalars such as step counts do not matter here.
        shapes = {parameter.shape for parameter in self._state.parameters.values()}
        return not all(
            is_finite_tensor(tensor)
            for tensor in self._state.exclude_infinite_state(self._state.collect_optimizer_tensors()).values()
            if tensor.ndim and tensor.shape in shapes
        )

    def find_failure_kind(self) -> str | None:
        """The kind of failure that the trained state shows on any rank; None if it is good. Collective."""
        joint = self._watched.joint_context
        peak = compute_weight_peak(self._state.parameters.values())
        failures = [
            not all(map(is_finite_tensor, self._state.exclude_infinite_state(self._state.collect_tensors()).values())),
            bool(describe_altered_state(joint)),
            is_unusable_magnitude(peak, joint.start_peak),
        ]
        flags = self._host.sum_flags(torch.tensor(failures, device=self._host.device).float())
        # In the order of the flags: the first that any rank has set is reported.
        kinds = (BAD_WEIGHTS, "altered_state", "diverged_weights")
        return next((kind for kind, flag in zip(kinds, flags, strict=True) if flag), None)

    def has_damaged_frozen_tensor(self) -> bool:
        """True if a frozen weight or a buffer changed without any code writing to it, on any rank. Collective."""
        record = self._watched.frozen_record
        # If the loop has frozen or unfrozen weights since, the record is rebuilt at its next step.
        is_current = not self._watched.has_new_trained_parameters()
        return self._host.is_true_on_any_rank(
            record is not None and is_current and record.has_corrupted_frozen_tensor()
        )
