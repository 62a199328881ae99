"""Decide whether the trained state of a loop is good enough for a snapshot or a save."""

from math import isfinite

import torch

from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.finite_checks import largest_magnitude
from dit_lora.guard.attach.finite_values import is_finite_any
from dit_lora.guard.attach.recovery import WEIGHTS
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.state import altered_state, has_run_away, weight_peak

_GROWN = 100.0
"""If the largest trained value grows by this factor between snapshots, single elements are checked."""


class StateChecks:
    """Checks of trained weights, optimizer state, averages and frozen weights."""

    def __init__(self, host: Host, state: LoopState, watched: WatchedModels) -> None:
        self._host = host
        self._state = state
        self._watched = watched
        self._peak = 0.0
        """Largest magnitude of the trained state when a snapshot was last due."""

    def is_suspect(self) -> bool:
        """True if this rank's trained state is not finite, or memory has altered an element. Cheap."""
        peak = largest_magnitude(self._state.checked(self._state.tensors()).values())
        previous_peak, self._peak = self._peak, peak
        if not isfinite(peak):
            return True
        # Looking at single elements is slow, so do it only after a jump.
        return peak > _GROWN * previous_peak > 0 and bool(altered_state(self._watched.together))

    def has_bad_moment(self) -> bool:
        """True if this rank's optimizer state holds a value that is not finite for an element of a weight."""
        # Moments have the shape of their weight; scalars such as step counts do not matter here.
        shapes = {parameter.shape for parameter in self._state.parameters.values()}
        return not all(
            is_finite_any(tensor)
            for tensor in self._state.checked(self._state.optimizer_tensors()).values()
            if tensor.ndim and tensor.shape in shapes
        )

    def find_wrong(self) -> str | None:
        """The kind of failure that the trained state shows on any rank; None if it is good. Collective."""
        joint = self._watched.together
        peak = weight_peak(self._state.parameters.values())
        failures = [
            not all(map(is_finite_any, self._state.checked(self._state.tensors()).values())),
            bool(altered_state(joint)),
            has_run_away(peak, joint.start_peak),
        ]
        flags = self._host.summed(torch.tensor(failures, device=self._host.device).float())
        # In the order of the flags: the first that any rank has set is reported.
        kinds = (WEIGHTS, "altered_state", "diverged_weights")
        return next((kind for kind, flag in zip(kinds, flags, strict=True) if flag), None)

    def is_frozen_damaged(self) -> bool:
        """True if a frozen weight or a buffer changed without any code writing to it, on any rank. Collective."""
        record = self._watched.record
        # If the loop has frozen or unfrozen weights since, the record is rebuilt at its next step.
        is_current = not self._watched.has_changed()
        return self._host.any_rank(record is not None and is_current and record.is_damaged())
