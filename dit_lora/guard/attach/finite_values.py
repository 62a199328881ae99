"""Find NaN and Inf in values of any layout, dtype and nesting, and describe where they are."""

from collections.abc import Collection
from typing import Any

import torch

from dit_lora.guard.attach.samples.tensors import iter_tensors
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import describe_bad_values, is_finite
from dit_lora.numerics.layouts import get_strided_values

SQUARE_LIMIT = 1.8e19
"""Square root of fp32's largest number: larger gradients overflow when an optimizer squares them in fp32."""


def to_strided_real(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor of any layout or dtype to a strided real tensor; for a sharded tensor, the local shard."""
    values = get_strided_values(get_local_tensor(tensor.detach()))
    if values.is_complex():
        values = torch.view_as_real(values)
    # Dtypes of one byte, such as fp8, lack most operations; bf16 holds all of their values.
    return values.to(torch.bfloat16) if values.element_size() == 1 else values


def is_finite_tensor(tensor: torch.Tensor) -> bool:
    """True if all values of a tensor of any layout are finite."""
    return tensor.device.type == "meta" or is_finite(to_strided_real(tensor))


def has_nonfinite_values(value: Any) -> bool:
    """True if any tensor or array in a nested value is not finite."""
    return not all(is_finite_tensor(tensor) for _, tensor in iter_tensors(value))


def find_bad_tensors(value: Any, tolerated_names: Collection[str], scalar_names: Collection[str]) -> list[str]:
    """Describe the non-finite tensors in an object that is about to be saved.

    Args:
        value: The object to save: a module, a state dict, a dict of these.
        tolerated_names: Names of weights and buffers that held infinity when the guard started, such as masks of -inf.
        scalar_names: Names of scalar weights and buffers. Other scalars, such as best scores, may be infinite.
    """
    bad = []
    for path, tensor in iter_tensors(value):
        # A saved path may have prefixes in front of the model's own name.
        if is_finite_tensor(tensor) or path.endswith(tuple(tolerated_names)):
            continue
        if not tensor.ndim and not bool(tensor.isnan()) and not path.endswith(tuple(scalar_names)):
            continue
        description = describe_bad_values(path or "the tensor", to_strided_real(tensor))
        if description is not None:
            bad.append(description)
    return bad


def find_infinite_tensor_names(model: torch.nn.Module) -> list[str]:
    """Names of a model's weights and buffers that hold Inf but no NaN, as masks do."""
    # NaN is never intended; Inf may be, as in attention masks.
    named = [*model.named_parameters(), *model.named_buffers()]
    bad = [(name, to_strided_real(tensor)) for name, tensor in named if not is_finite_tensor(tensor)]
    return [name for name, values in bad if not bool(values.isnan().any())]
