"""Name a model's outputs and gradients, measure how far two of them are apart, and say how far they may be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.numerics import tolerances
from dit_lora.numerics.adapter_tensors import is_adapter
from dit_lora.numerics.dtensors import local

Values = dict[str, torch.Tensor]
"""Outputs in order of execution, then gradients, which are named so."""

GRADIENT = "the gradient of "


class Limits(NamedTuple):
    """Limits on how far a kernel and its reference may be apart, as relative root mean squares."""

    output: float
    gradient: float
    floor: float
    """Gradients below this share of the largest are not compared: an exact zero (a key's bias) is rounding only."""

    def wider(self, error: float) -> "Limits":
        """Return the limits for what has that relative error of its own; gradients' grows in proportion."""
        grown = 1 + error / self.output
        # Where gradients nearly cancel (a query of Sana's, whose size its attention divides out), what is left of them
        # is wrong by as much as the others are.
        floor = max(self.floor, 5 * error)
        return Limits(self.output * grown, self.gradient * grown, floor)


WHOLE = {
    dtype: Limits(output, tolerances.GRADIENT[dtype], 0.05)
    for dtype, output in tolerances.OUTPUT.items()
}
BLOCK = {**WHOLE, torch.float32: Limits(tolerances.BLOCK, tolerances.BLOCK, 0.01)}
_ADDED = 0.01
"""Least share of an output that counts as added to the input: rounding is relative to the output."""
_OF_ROUNDING = 2.0
"""Times farther from fp32 than the reference that a value in half precision may be, where that is far."""
_OF_ALL = 1e-4
"""Share of a block's largest gradient against which another's error is measured at least."""


def first_apart(
    references: Values,
    fused: Values,
    limits: Limits,
    inputs: Sequence[torch.Tensor] = (),
    exact: Values | None = None,
) -> tuple[str, float] | None:
    """Return the first value that differs from its reference, with the relative error of its worst sample.

    An output of a block is measured by what it adds to the one of `inputs` that it is nearest to. What is hardly
    farther from `exact` values than the reference is does not differ: in half precision that may be far. What the
    stock model makes NaN of shows nothing.
    """
    largest = _largest_gradients(references)
    for name, expected in references.items():
        # A module that the kernel takes the place of, or that is called with its heads in another order.
        if name not in fused and _is_of_parameter(name) and expected.any():
            return name, torch.inf  # what trains would not
        if name not in fused or fused[name].shape != expected.shape:
            continue
        if not torch.isfinite(expected).all():
            continue
        measure = partial(_measured, name, limits=limits, largest=largest, inputs=inputs)
        error = measure(fused[name], expected)
        limit = limits.gradient if name.startswith(GRADIENT) else limits.output
        if error <= limit:
            continue
        exact_value = exact.get(name) if exact is not None else None
        if exact_value is not None and exact_value.shape == expected.shape:
            fused_error, stock_error = (
                measure(fused[name], exact_value),
                measure(expected, exact_value),
            )
            if fused_error <= _OF_ROUNDING * stock_error:
                continue
        return name, error  # NaN differs too
    return None


def _measured(
    name: str,
    value: torch.Tensor,
    reference: torch.Tensor,
    *,
    limits: Limits,
    largest: Mapping[str, float],
    inputs: Sequence[torch.Tensor],
) -> float:
    if not name.startswith(GRADIENT):
        return _output_error(value, reference, inputs)
    if not _is_of_parameter(name):
        floor = _OF_ALL * max(largest.values(), default=0.0)
        return _error(value, reference, max(floor, 1e-12), rows=True)
    return _error(value, reference, limits.floor * largest[_block_of(name)], rows=False)


def _is_of_parameter(name: str) -> bool:
    return name.startswith(GRADIENT) and "'s input " not in name


def apart(references: Values, others: Values) -> float:
    """Return the largest relative error of any value; 0 only if all are the same bits."""
    worst = 0.0
    for name, reference in references.items():
        other = others.get(name)
        if other is None or other.shape != reference.shape:
            return torch.inf
        if not same_bits(reference, other):
            error = _error(other, reference, 0.0, rows=False)
            # Other bits are a difference, however small it comes out.
            worst = max(worst, error if error > 0 else 1e-12) if error == error else torch.inf
    return worst


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both are equal, with NaN in the same places."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _block_of(name: str) -> str:
    """Return `transformer_blocks.3` for any parameter in it; the first part of other names."""
    parts = name.removeprefix(GRADIENT).split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])


def _largest_gradients(values: Values) -> dict[str, float]:
    """Return the root mean square of the largest gradient of each block."""
    largest: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith(GRADIENT) and value.numel():
            size = value.float().square().mean().sqrt().item()
            largest[_block_of(name)] = max(size, largest.get(_block_of(name), 0.0))
    return largest


def _output_error(
    value: torch.Tensor, reference: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> float:
    alike = [x for x in inputs if (x.shape, x.device) == (reference.shape, reference.device)]
    if not alike or not reference.numel():
        return _error(value, reference, 0.0, rows=True)
    # A block's output is mostly its input: an error is measured against what the block adds to it.
    sizes = [_rows(reference), *(_rows(reference - x) for x in alike)]
    added = torch.stack(sizes).amin(0).clamp(min=_ADDED * sizes[0]).clamp(min=1e-6)
    return (_rows(value.float() - reference.float()) / added).max().item()


def _error(value: torch.Tensor, reference: torch.Tensor, floor: float, *, rows: bool) -> float:
    """Return the error of the worst row; rows are samples, and a mean over the batch would hide a bad sample."""
    if not reference.numel():
        return 0.0
    measure = _rows if rows else _all
    size = measure(reference).clamp(min=max(floor, 1e-6 if floor == 0.0 else 0.0))
    return (measure(value.float() - reference.float()) / size).max().item()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.float().flatten(1 if x.ndim > 1 else 0).square().mean(-1).sqrt()


def _all(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean().sqrt()


@contextmanager
def recording(model: nn.Module, modules: Sequence[str], values: Values) -> Iterator[None]:
    """Keep what these modules return within, on the CPU; of each its first call."""

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for key, tensor in named_outputs(name, output).items():
                values.setdefault(key, tensor.detach().cpu().clone())

        return hook

    with ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(keep(name)))
        yield


def named_outputs(name: str, output: Any) -> Values:
    """Return the tensors that a module returned; complex ones, such as rotations, as pairs of real numbers."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    tensors = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return {f"{name} (output {i})" if i else name: tensor for i, tensor in enumerate(tensors)}


def gradients(values: Mapping[str, torch.Tensor | None]) -> Values:
    """Return gradients by their names among values, without those that are None."""
    return {f"{GRADIENT}{name}": value for name, value in values.items() if value is not None}


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off within: a mask depends on the dtype that it is drawn for, which is a kernel's own choice."""
    # Those that drop nothing stay: a compiled block would be compiled anew for another mode.
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.training and m.p]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


@contextmanager
def stirred(model: nn.Module) -> Iterator[None]:
    """Make trained weights that are all zero random within; afterwards they are the same bits again.

    A fresh DiT's modulations are zero for every sample, so a kernel that mixes samples up would be as right
    as its reference until the weights have moved; a fresh adapter's zeros hide its other factor, and what
    comes back through it.
    """
    generator = torch.Generator().manual_seed(0)
    trained = [
        (local(parameter.detach()), is_adapter(name))  # of sharded weights (FSDP2), this rank's
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    zero = [(values, values.clone(), own) for values, own in trained if not values.any()]
    for values, _, of_adapter in zero:
        # The embeddings that these layers see are small, and the differences must not be; an adapter's update is.
        scale = 0.02 if of_adapter else 1.0 if values.ndim > 1 else 0.1
        values.copy_(scale * torch.randn(values.shape, generator=generator))
    try:
        yield
    finally:
        for values, before, _ in zero:
            values.copy_(before)
