"""What every fused model's test asks of it: the stock model's values and gradients, and no trace when it is undone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import OPS

Call = Callable[[nn.Module], Any]
Values = dict[str, torch.Tensor]
IMPLEMENTATIONS = ("kernel", "reference")


def adapted(model: nn.Module, targets: list[str], seed: int = 0) -> nn.Module:
    """The model with fp32 LoRA whose B is not zero, and norms, tables and modulations that are not neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=0.1 if parameter.ndim < 2 else 0.02)
    model.requires_grad_(False)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model.train()


def values(model: nn.Module, call: Call, inputs: Mapping[str, torch.Tensor]) -> Values:
    """Outputs, and gradients of what trains and of the inputs that have one, by name.

    Every element of every output has a weight of its own in what is differentiated.
    """
    generator = torch.Generator().manual_seed(1)
    outputs = [x for x in tree_leaves(call(model)) if isinstance(x, torch.Tensor)]
    weighed = sum(
        (output.double() * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum()
        for output in outputs
    )
    leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
    leaves |= {f"input {n}": x for n, x in inputs.items() if x.requires_grad}
    gradients = torch.autograd.grad(weighed, [*leaves.values()], allow_unused=True)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    pairs = zip(leaves, gradients, strict=True)
    return results | {name: grad for name, grad in pairs if grad is not None}


def assert_equal(found: Values, expected: Values, tolerance: float = 2e-5) -> None:
    """Within the tolerance, relative to each tensor's largest value; the same names, shapes and dtypes."""
    assert found.keys() == expected.keys()
    too_far = {}
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, (name, found[name].dtype, value.dtype)
        scale = value.abs().max().clamp(min=1e-12)
        error = ((found[name].double() - value.double()).abs().max() / scale).item()
        if not error <= tolerance:
            too_far[name] = error
    assert not too_far, too_far


def worst_error(found: Values, exact: Values) -> dict[str, float]:
    """Root mean square error of each value, over that of the exact value."""
    return {
        name: (
            (found[name].double() - value.double()).square().mean().sqrt()
            / value.double().square().mean().sqrt().clamp(min=1e-30)
        ).item()
        for name, value in exact.items()
    }


def assert_no_worse(fused: Values, stock: Values, exact: Values, unit: float = 2**-7) -> None:
    """No further from the exact values than 1.25 times the stock model, and one rounding."""
    ours, theirs = worst_error(fused, exact), worst_error(stock, exact)
    worse = {n: (ours[n], theirs[n]) for n in ours if not ours[n] <= 1.25 * theirs[n] + unit}
    assert not worse, worse


def fuse_all(model: nn.Module, *left_out: str) -> nn.Module:
    """Everything that the model takes is on, whatever the machine; no check of its own."""
    from dit_lora.errors import DitLoraError

    for op in OPS:
        try:
            fuse(model, {name: "on" if name == op else "off" for name in OPS}, check=False)
        except DitLoraError:
            left_out = (*left_out, op)
    fuse(model, {op: "off" if op in left_out else "on" for op in OPS}, check=False)
    return model


@contextmanager
def by(implementation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, ops run their Triton kernels, or on a CPU their references."""
    import dit_lora_kernels

    with monkeypatch.context() as patch:
        if implementation == "reference":
            for module in _op_modules(dit_lora_kernels.__path__[0]):
                if hasattr(module, "launches"):
                    patch.setattr(module, "launches", lambda _tensor: False)
        yield


def _op_modules(folder: str) -> Iterator[Any]:
    import importlib
    import pkgutil

    for info in pkgutil.iter_modules([folder]):
        yield importlib.import_module(f"dit_lora_kernels.{info.name}")
