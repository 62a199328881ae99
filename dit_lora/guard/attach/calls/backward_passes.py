"""The losses that the gradients of now come from, and whether a backward adds to gradients or begins new ones."""

import weakref
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch
from torch import nn

from dit_lora.guard.attach.finite_values import plain_values

_MAX_LOSSES = 64


class BackwardPasses:
    """The backward passes of a loop.

    Args:
        parameters: Called for all trained parameters that are checked.
        keeps_gradients: False where an engine such as DeepSpeed's holds gradients itself, and `grad` shows nothing.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[nn.Parameter]], *, keeps_gradients: bool
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self.are_used = False
        """True once a step was taken or skipped: the next backward begins a new list of losses."""
        self.is_idle = False
        """True if no backward has come between the step under way and the one before it."""
        self.num_backwards = 0
        self._parameters = parameters
        self._keeps_gradients = keeps_gradients
        self._witness: weakref.ref[nn.Parameter] | None = None
        """A parameter that had a gradient: whether it has one tells whether gradients were dropped."""

    def begin(self, tensors: Any) -> bool:
        """Note the losses of a backward that begins; True if the loop has dropped the gradients of before."""
        if self.are_used:
            self.are_used = False
            self.losses.clear()
        are_new = self._are_new()
        if are_new:
            self.losses.clear()
        self.num_backwards += 1
        for root in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                self.losses.append(root.detach())
        if len(self.losses) > _MAX_LOSSES:
            del self.losses[:-_MAX_LOSSES]
        return are_new

    def step_begins(self) -> None:
        """Note whether the step that begins has gradients of its own."""
        self.is_idle = self.are_used

    def has_bad_loss(self) -> bool:
        return not all(map(isfinite, [abs(loss.item()) for loss in self.losses]))

    def choose_witness(self) -> None:
        """Choose a parameter whose gradient is not zero: where it is gone, the loop has dropped all of them."""
        if self._witness is not None and self._witness() is not None:
            return
        for parameter in self._parameters():
            if parameter.grad is not None and bool(plain_values(parameter.grad).any()):
                self._witness = weakref.ref(parameter)
                return

    @property
    def has_witness(self) -> bool:
        return self._witness is not None

    def _are_new(self) -> bool:
        parameter = self._witness() if self._witness is not None else None
        if parameter is not None:
            return parameter.grad is None or not bool(plain_values(parameter.grad).any())
        if not self.num_backwards:
            return True
        return self._keeps_gradients and all(p.grad is None for p in self._parameters())
