"""Makes tiny runs quick by what does not change them: memory is counted once, kernels repeat themselves less often."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from dit_lora.training import choose_checkpointing as choosing
from dit_lora.training.recovery import kernel_parity

PASSES = 4
"""Passes through blocks that ask whether a kernel repeats itself: in a tiny model all of them are two blocks', and
take a fifth of a run. Tests of kernels that are wrong only sometimes set the library's `MIN_PASSES` here."""


@contextmanager
def quick_runs() -> Iterator[None]:
    """Recipes that run in this process are quick within."""
    with (
        mock.patch.object(choosing, "measure_activations", _counted_once),
        mock.patch.object(kernel_parity, "MIN_PASSES", PASSES),
    ):
        yield


_MEASURE: Callable[..., Any] = choosing.measure_activations
_COUNTED: dict[str, Any] = {}


def _counted_once(
    model: nn.Module,
    losses: Any,
    batch: dict[str, Any],
    device: Any,
    integer_inputs: dict[str, Any] | None = None,
    forward_context: Any = None,
) -> Any:
    """`measure_activations`, which takes a third of a tiny run, but run once for equal weights and batches."""
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named_tensors]
    values = [(name, tensor.flatten().tolist()) for name, tensor in (integer_inputs or {}).items()]
    key = str((type(model), model.training, weights, batch, device, values))
    if key not in _COUNTED:
        _COUNTED[key] = _MEASURE(model, losses, batch, device, integer_inputs, forward_context)
    return _COUNTED[key]
