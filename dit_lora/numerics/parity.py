"""Whether a fused kernel computes what its reference does: on the user's own model, shapes and samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.replay import MicroBatch
from dit_lora.numerics.switches import Switch

# Two correct orders of the same half-precision sums differ by a few units in the last place.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Difference:
    """The first place where a kernel and its reference part."""

    switch: str
    module: str
    """In order of execution; or the parameter whose gradient differs."""
    error: float
    """Largest difference over the largest reference value, of the worst sample; NaN if one is not finite."""

    @property
    def words(self) -> str:
        return f"kernel {self.switch} differs from its reference at {self.module} (relative error {self.error:.2g})"


def first_difference(
    switch: Switch, micro_batch: MicroBatch, model: nn.Module
) -> Difference | None:
    """Where outputs or gradients with the kernel differ from those without it; None if nowhere.

    Give a micro-batch of several different samples: OpenDiT's fused modulation used the first sample's
    scale and shift for all of them, and was right for a batch of one.
    """
    fused, fused_gradients = _values(micro_batch, model)
    with switch.off():
        reference, reference_gradients = _values(micro_batch, model)
    for values, references in ((fused, reference), (fused_gradients, reference_gradients)):
        for name, expected in references.items():
            error = _error(values[name], expected)
            if not error <= _TOLERANCE.get(expected.dtype, 1e-3):  # NaN differs too
                return Difference(switch.name, name, error)
    return None


Values = dict[str, torch.Tensor]


def _values(micro_batch: MicroBatch, model: nn.Module) -> tuple[Values, Values]:
    """Every module's output in order of execution, and every trained parameter's gradient."""
    outputs: Values = {}
    parameters = dict(model.named_parameters())
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        with _recording(model, outputs), torch.random.fork_rng(devices=[]):
            micro_batch.forward().losses.mean().backward()
        gradients = {
            f"the gradient of {name}": parameter.grad.clone()
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
    finally:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]
    return outputs, gradients


@contextmanager
def _recording(model: nn.Module, outputs: Values) -> Iterator[None]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            for index, tensor in enumerate(tensors):
                key = f"{name} (output {index})" if index else name
                outputs.setdefault(key, tensor.detach().clone())

        return hook

    handles = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if n]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the worst sample where there is one a row: an average over the batch would hide one bad row."""
    if not reference.numel():
        return 0.0
    difference = (value.float() - reference.float()).abs()
    scale = reference.float().abs().max().clamp(min=1e-6)
    return (difference.max() / scale).item()
