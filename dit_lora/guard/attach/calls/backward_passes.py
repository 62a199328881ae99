"""Track the losses behind the current gradients, and whether a backward accumulates or starts new gradients."""

import weakref
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch
from torch import nn

from dit_lora.guard.attach.finite_values import to_strided_real

_MAX_LOSSES = 64


class BackwardPasses:
    """Tracks the backward passes of a loop, to tell which of them add to the same gradients.

    Args:
        parameters: Returns all trained parameters that are checked.
        keeps_gradients: False if an engine such as DeepSpeed holds the gradients, so that `grad` is None.
    """

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]], *, keeps_gradients: bool) -> None:
        self.losses: list[torch.Tensor] = []
        self.has_stepped = False
        """True once a step was taken or skipped: the next backward starts a new list of losses."""
        self.is_idle = False
        """True if no backward ran between the previous step and the current one."""
        self.num_backwards = 0
        self._parameters = parameters
        self._keeps_gradients = keeps_gradients
        self._tracked_parameter: weakref.ref[nn.Parameter] | None = None
        """A parameter that had a gradient. If it has none now, the loop has cleared its gradients."""

    def record_backward_start(self, tensors: Any) -> bool:
        """Record the losses of a backward pass that begins.

        Returns True if the loop has cleared the earlier gradients.
        """
        if self.has_stepped:
            self.has_stepped = False
            self.losses.clear()
        parameter = self._tracked_parameter() if self._tracked_parameter is not None else None
        if parameter is not None:
            # Loops clear gradients by setting them to None or to zero.
            are_new = parameter.grad is None or not bool(to_strided_real(parameter.grad).any())
        elif not self.num_backwards:  # the first backward has no earlier gradients to add to
            are_new = True
        else:
            are_new = self._keeps_gradients and all(p.grad is None for p in self._parameters())
        if are_new:
            self.losses.clear()
        self.num_backwards += 1
        for root in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            # Roots with several elements come with gradients of their own and are not losses.
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                self.losses.append(root.detach())
        if len(self.losses) > _MAX_LOSSES:
            del self.losses[:-_MAX_LOSSES]
        return are_new

    def has_bad_loss(self) -> bool:
        return not all(map(isfinite, [abs(loss.item()) for loss in self.losses]))

    def track_parameter(self) -> None:
        """Choose a parameter with a nonzero gradient to watch.

        Once that gradient is gone, the loop has cleared all gradients.
        """
        if self._tracked_parameter is not None and self._tracked_parameter() is not None:
            return
        for parameter in self._parameters():
            if parameter.grad is not None and bool(to_strided_real(parameter.grad).any()):
                self._tracked_parameter = weakref.ref(parameter)
                return

    @property
    def is_tracking(self) -> bool:
        return self._tracked_parameter is not None
