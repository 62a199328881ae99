"""Constants of a loss that are computed from the model's own output, such as the mean in the variational bound.

Autograd takes them for constants, but they change with the weights. So the gradient is the slope of the loss only if
they keep their values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


class StopGradientValues:
    """Values of `stop_gradient` from the first evaluation of a loss, in the order of its calls."""

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._is_recorded = False
        self._num_used = 0

    @contextmanager
    def hold_values_across_evaluations(self) -> Iterator[None]:
        """Context of one evaluation: the first records the values, and all later ones use them."""
        # Each evaluation calls `stop_gradient` in the same order.
        self._num_used = 0
        token = _STOPPED_VALUES.set(self)
        try:
            yield
        finally:
            _STOPPED_VALUES.reset(token)
        # Only after an evaluation without an error.
        self._is_recorded = True

    def replace_with_recorded_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a detached `tensor` by its value in the first evaluation of the loss."""
        # The first evaluation defines the constants.
        if not self._is_recorded:
            self._values.append(tensor)
            return tensor
        # Of the first evaluation, at the weights where the gradient was computed.
        value = self._values[self._num_used]
        self._num_used += 1
        return value


_STOPPED_VALUES: ContextVar[StopGradientValues | None] = ContextVar("stopped_values", default=None)


def stop_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a constant of a loss.

    Inside `StopGradientValues.hold_values_across_evaluations`, its value in the first evaluation.
    """
    stopped_values = _STOPPED_VALUES.get()
    # Outside of a gradient check.
    if stopped_values is None:
        return tensor.detach()
    return stopped_values.replace_with_recorded_value(tensor.detach())
