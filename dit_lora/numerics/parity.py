"""Whether a fused kernel computes what its reference does: on the user's own model, shapes and samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.gate import local
from dit_lora.numerics.switches import Switch
from dit_lora.numerics.whole import called_modules

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


Losses = Callable[[], torch.Tensor]
"""Runs the model on the same inputs at each call; losses by sample, (B,)."""


def first_difference(switch: Switch, losses: Losses, model: nn.Module) -> Difference | None:
    """Where outputs or gradients with the kernel differ from those without it; None if nowhere.

    Give losses of several different samples: OpenDiT's fused modulation used the first sample's
    scale and shift for all of them, and was right for a batch of one. Outputs of whole blocks are compared
    first, in host memory; those inside the first block that differs then say where.
    """
    found = _compare(switch, losses, model, _blocks(model))
    if found is None or found.module.startswith(_GRADIENT):
        return found
    block = found.module.partition(" ")[0]
    inside = [name for name, _ in called_modules(model) if name.startswith(f"{block}.")]
    return _compare(switch, losses, model, inside) or found


_GRADIENT = "the gradient of "
Values = dict[str, torch.Tensor]


def _compare(
    switch: Switch, losses: Losses, model: nn.Module, modules: Sequence[str]
) -> Difference | None:
    with _stirred(model):
        with switch.off():
            references = _values(losses, model, modules)
        fused = _values(losses, model, modules)
    for name, expected in references.items():  # outputs in order of execution, then gradients
        if name not in fused:
            continue  # a module that the kernel takes the place of
        error = _error(fused[name], expected)
        if not error <= _TOLERANCE.get(expected.dtype, 1e-3):  # NaN differs too
            return Difference(switch.name, name, error)
    return None


@contextmanager
def _stirred(model: nn.Module) -> Iterator[None]:
    """Within it, trained base weights that are all zero are random: exactly zero again afterwards.

    A fresh DiT's modulations are zero for every sample, so a kernel that mixes samples up would be as right
    as its reference until the weights have moved. Adapters start at zero on trained weights, which tell.
    """
    generator = torch.Generator().manual_seed(0)
    own = [
        local(parameter.detach())  # of sharded weights (FSDP2), this rank's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    ]
    zero = [values for values in own if not values.any()]
    for values in zero:
        # The embeddings that these layers see are small, and the differences must not be.
        scale = 1.0 if values.ndim > 1 else 0.1
        values.copy_(scale * torch.randn(values.shape, generator=generator))
    try:
        yield
    finally:
        for values in zero:
            values.zero_()


def _blocks(model: nn.Module) -> list[str]:
    """The repeated blocks of a transformer, and what stands beside them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    beside = [name for name, _ in model.named_children() if name not in outermost]
    inside = [
        f"{name}.{child}"
        for name in outermost
        for child, _ in model.get_submodule(name).named_children()
    ]
    return [*beside, *inside]


def _values(losses: Losses, model: nn.Module, modules: Sequence[str]) -> Values:
    """These modules' outputs in order of execution, then every trained parameter's gradient; on the CPU."""
    values: Values = {}
    with _recording(model, modules, values), torch.random.fork_rng(devices=[]):
        gradients = _gradients(losses().mean(), dict(model.named_parameters()))
    return values | {f"{_GRADIENT}{n}": grad.cpu().clone() for n, grad in gradients.items()}


def _gradients(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> Values:
    """By name; the parameters' own `grad` stays as it was."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # Past the hooks on accumulated gradients: within DDP's forward they would be its step's.
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, found, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]


@contextmanager
def _recording(model: nn.Module, modules: Sequence[str], values: Values) -> Iterator[None]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            for index, tensor in enumerate(tensors):
                key = f"{name} (output {index})" if index else name
                values.setdefault(key, tensor.detach().cpu().clone())

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over largest reference: an average over the batch would hide one bad row."""
    if not reference.numel():
        return 0.0
    difference = (value.float() - reference.float()).abs()
    scale = reference.float().abs().max().clamp(min=1e-6)
    return (difference.max() / scale).item()
