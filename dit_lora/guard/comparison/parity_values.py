"""Name a model's outputs and gradients, measure how much two sets of them differ, and define the tolerances."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.numerics import tolerances
from dit_lora.numerics.adapter_tensors import is_adapter_tensor
from dit_lora.numerics.dtensors import get_local_tensor

Values = dict[str, torch.Tensor]
"""Outputs by module name in order of execution, then gradients, whose names start with `GRADIENT`."""

GRADIENT_PREFIX = "the gradient of "


class RelativeErrorLimits(NamedTuple):
    """Limits on the difference between a kernel and its reference, as relative root mean squares."""

    output: float
    gradient: float
    min_gradient_share: float
    """Gradients below this share of the largest are not compared: an exact zero (a key's bias) is rounding only."""

    def add_rounding_error(self, error: float) -> "RelativeErrorLimits":
        """Raise the limits for a kernel whose rounding adds this relative error.

        The gradient limit grows in proportion.
        """
        # Gradients get the same relative widening as outputs.
        grown = 1 + error / self.output
        # Where gradients nearly cancel (Sana's query, whose magnitude its attention divides out), the small remainder
        # has an error as large as that of other gradients.
        floor = max(self.min_gradient_share, 5 * error)
        return RelativeErrorLimits(self.output * grown, self.gradient * grown, floor)


MODEL_LIMITS = {
    dtype: RelativeErrorLimits(output, tolerances.GRADIENT_TOLERANCE[dtype], 0.05)
    for dtype, output in tolerances.OUTPUT_TOLERANCE.items()
}
BLOCK_LIMITS = {
    **MODEL_LIMITS,
    torch.float32: RelativeErrorLimits(tolerances.BLOCK_TOLERANCE, tolerances.BLOCK_TOLERANCE, 0.01),
}
_MIN_ADDED_SHARE = 0.01
"""Minimum fraction of an output that counts as added to the input: rounding is relative to the output."""
_MAX_ROUNDING_RATIO = 2.0
"""A half-precision value may be this many times farther from fp32 than the reference is."""
_MIN_GRADIENT_SHARE = 1e-4
"""Gradient errors are measured against at least this fraction of the block's largest gradient."""


def find_first_mismatch(
    references: Values,
    fused: Values,
    limits: RelativeErrorLimits,
    inputs: Sequence[torch.Tensor] = (),
    exact_values: Values | None = None,
) -> tuple[str, float] | None:
    """Find the first value that differs from its reference, with the relative error of its worst sample, or None.

    A block's output is measured relative to the change that it adds to the nearest of `inputs`. A value that is hardly
    farther from its `exact_values` value than the reference is does not differ, although in half precision both may be
    far. Values that are not finite in the reference are ignored.
    """
    # Gradients that are tiny within their block are rounding, and are not compared.
    largest: dict[str, float] = {}
    for name, value in references.items():
        if name.startswith(GRADIENT_PREFIX) and value.numel():
            block = _get_block_name(name)
            largest[block] = max(_compute_rms(value).item(), largest.get(block, 0.0))
    for name, expected in references.items():
        # Except for parameters, values may be missing or reshaped: a kernel may replace a module or permute its heads.
        if name not in fused and _is_parameter_gradient(name) and expected.any():
            return name, torch.inf  # a trained parameter would get no gradient
        if name not in fused or fused[name].shape != expected.shape or not torch.isfinite(expected).all():
            continue
        measure = partial(_measure_error, name, limits=limits, largest=largest, inputs=inputs)
        error = measure(fused[name], expected)
        limit = limits.gradient if name.startswith(GRADIENT_PREFIX) else limits.output
        if error <= limit:
            continue
        exact_value = exact_values.get(name) if exact_values is not None else None
        if exact_value is not None and exact_value.shape == expected.shape:
            reference_error = measure(expected, exact_value)
            if measure(fused[name], exact_value) <= _MAX_ROUNDING_RATIO * reference_error:
                continue
        return name, error  # NaN differs too
    return None


def _measure_error(
    name: str,
    value: torch.Tensor,
    reference: torch.Tensor,
    *,
    limits: RelativeErrorLimits,
    largest: Mapping[str, float],
    inputs: Sequence[torch.Tensor],
) -> float:
    if not name.startswith(GRADIENT_PREFIX):
        return _measure_output_error(value, reference, inputs)
    if not _is_parameter_gradient(name):
        # Inputs of a block are not parameters of one, so measure against the largest gradient of all.
        min_size = _MIN_GRADIENT_SHARE * max(largest.values(), default=0.0)
        return _measure_relative_error(value, reference, max(min_size, 1e-12), is_per_row=True)
    min_size = limits.min_gradient_share * largest[_get_block_name(name)]
    return _measure_relative_error(value, reference, min_size, is_per_row=False)


def _is_parameter_gradient(name: str) -> bool:
    return name.startswith(GRADIENT_PREFIX) and "'s input " not in name


def compute_max_error(references: Values, other_values: Values) -> float:
    """The largest relative error of any value compared with its reference; 0 only if all are bitwise equal.

    It is infinite if a value is missing, NaN, or of another shape.
    """
    worst = 0.0
    for name, reference in references.items():
        value = other_values.get(name)
        if value is None or value.shape != reference.shape:
            return torch.inf
        if not is_bitwise_equal(reference, value):
            error = _measure_relative_error(value, reference, 0.0, is_per_row=False)
            # Different bits are a difference, even if the computed error is zero.
            worst = max(worst, error if error > 0 else 1e-12) if error == error else torch.inf
    return worst


def is_bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if both tensors are equal, with NaN in the same places."""
    # Only NaN differs from itself.
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _get_block_name(name: str) -> str:
    """Block that a parameter's name belongs to, such as `transformer_blocks.3`; the first component of other names."""
    # `transformer_blocks.3.attn.to_q.weight` gives `transformer_blocks.3`.
    parts = name.removeprefix(GRADIENT_PREFIX).split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])


def _measure_output_error(value: torch.Tensor, reference: torch.Tensor, inputs: Sequence[torch.Tensor]) -> float:
    same_shape = [x for x in inputs if (x.shape, x.device) == (reference.shape, reference.device)]
    if not same_shape or not reference.numel():
        return _measure_relative_error(value, reference, 0.0, is_per_row=True)
    # A block's output is mostly its input, so errors are measured relative to the change that the block adds.
    # Each (B,): the size of the output, and of its change from each input of the same shape.
    sizes = [_compute_row_rms(reference), *(_compute_row_rms(reference - x) for x in same_shape)]
    # (B,): the change from the nearest input, at least a small share of the output.
    added = torch.stack(sizes).amin(0).clamp(min=_MIN_ADDED_SHARE * sizes[0]).clamp(min=1e-6)
    return (_compute_row_rms(value.float() - reference.float()) / added).max().item()


def _measure_relative_error(
    value: torch.Tensor, reference: torch.Tensor, min_size: float, *, is_per_row: bool
) -> float:
    """Relative error of a tensor compared with its reference, for the worst row. Rows are samples.

    A mean over the batch would hide a bad sample.
    """
    if not reference.numel():
        return 0.0
    measure = _compute_row_rms if is_per_row else _compute_rms
    # Avoid a division by zero where the reference is zero.
    size = measure(reference).clamp(min=max(min_size, 1e-6 if min_size == 0.0 else 0.0))
    return (measure(value.float() - reference.float()) / size).max().item()


def _compute_row_rms(x: torch.Tensor) -> torch.Tensor:
    # (B, ...) -> (B,): the root mean square of each sample. A vector gives one value.
    return x.float().flatten(1 if x.ndim > 1 else 0).square().mean(-1).sqrt()


def _compute_rms(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean().sqrt()


@contextmanager
def record_outputs(model: nn.Module, modules: Sequence[str], values: Values) -> Iterator[None]:
    """Store the outputs of these modules' first calls inside the context, on the CPU."""

    def record(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for key, tensor in map_output_names_to_tensors(name, output).items():
            values.setdefault(key, tensor.detach().cpu().clone())

    with ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(record, name)))
        yield


def map_output_names_to_tensors(name: str, output: Any) -> Values:
    """The tensors that a module returned, by name; complex ones, such as rotations, as pairs of real numbers."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    tensors = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return {f"{name} (output {i})" if i else name: tensor for i, tensor in enumerate(tensors)}


def collect_named_gradients(values: Mapping[str, torch.Tensor | None]) -> Values:
    """Name the gradients that are not None, as in `Values`."""
    return {f"{GRADIENT_PREFIX}{name}": value for name, value in values.items() if value is not None}


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context: a mask depends on the dtype that it is drawn in, which kernels choose."""
    # Leave modules with p=0 in training mode: changing the mode would recompile a compiled block.
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.training and m.p]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


@contextmanager
def randomize_zero_weights(model: nn.Module) -> Iterator[None]:
    """Make trained weights that are all zero random inside the context; they are restored bit for bit on exit.

    A fresh DiT's modulations are zero for every sample, so a kernel that mixes up samples would look correct until the
    weights have moved. A fresh adapter's zeros hide its other factor, and the gradients that pass through it.
    """
    generator = torch.Generator().manual_seed(0)
    # For sharded weights (FSDP2), this rank's shard.
    trained = {n: get_local_tensor(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    zeros = {name: values for name, values in trained.items() if not values.any()}
    saved = {name: values.clone() for name, values in zeros.items()}
    for name, values in zeros.items():
        # Modulation layers get small embeddings, so large weights show differences. Adapter updates stay small.
        scale = 0.02 if is_adapter_tensor(name) else 1.0 if values.ndim > 1 else 0.1
        values.copy_(scale * torch.randn(values.shape, generator=generator))
    try:
        yield
    finally:
        for name, values in zeros.items():
            values.copy_(saved[name])
