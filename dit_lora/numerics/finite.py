"""Find and describe NaN and Inf in tensors, and measure how close values are to their dtype's limit."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.layouts import get_strided_values

# The dtypes that count as half precision.
HALF_DTYPES = (torch.bfloat16, torch.float16)


def can_hold_nonfinite(tensor: torch.Tensor) -> bool:
    """True if the tensor is not empty, not on `meta`, and of a dtype that can hold NaN and Inf."""
    # Integers and booleans have neither NaN nor Inf; tensors on `meta` have no values to test.
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.numel() > 0 and tensor.device.type != "meta"


def is_finite(tensor: torch.Tensor) -> bool:
    """True if every value of a tensor is finite, which integers always are. Synchronizes with the device."""
    return not can_hold_nonfinite(tensor) or bool(torch.isfinite(_to_checkable_tensor(tensor)).all())


def has_nan(values: Any) -> bool:
    """True if any tensor in a nested structure has a NaN. Synchronizes with the devices."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return any(bool(_to_checkable_tensor(tensor).isnan().any()) for tensor in tensors if can_hold_nonfinite(tensor))


def _to_checkable_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's stored values as a strided tensor, so that they can be checked for NaN and Inf.

    8-bit floats are cast to bf16, which represents them exactly. PyTorch has no `isfinite` for 8-bit floats and for
    some sparse layouts.
    """
    # Sparse and nested layouts first: casts and element sizes are those of the stored values.
    tensor = get_strided_values(tensor)
    return tensor.to(torch.bfloat16) if tensor.element_size() == 1 else tensor


def abs_max(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in a tensor: an fp32 scalar on its device, NaN if any value is NaN."""
    # Cast to fp32 last: a cast of the whole tensor would need up to twice its memory.
    return _to_checkable_tensor(tensor.detach()).abs().max().float()


def compute_magnitudes(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Largest magnitude of each of N tensors: fp32 (N,) on the device, NaN for a tensor with a NaN.

    No tensor may be empty. Without tensors the result is one zero.
    """
    if not tensors:
        return torch.zeros(1, device=device)
    # The maximum norm: squares of finite values may not be finite.
    norms = torch._foreach_norm(tensors, float("inf"))
    try:
        return torch.stack(norms).float()  # one cast instead of one per tensor
    # The tensors are on several devices. Checking for that first would cost more.
    except RuntimeError:
        return torch.stack([norm.to(device) for norm in norms]).float()


def read_scalars(scalars: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Read scalars of one dtype as Python numbers, with one transfer per device instead of one per scalar."""
    numbers: dict[str, Any] = {}
    # Each `tolist` waits for its device once.
    for device in {scalar.device for scalar in scalars.values()}:
        on_device = {name: scalar for name, scalar in scalars.items() if scalar.device == device}
        numbers |= zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True)
    # In the order of the argument, not by device.
    return {name: numbers[name] for name in scalars}


def compute_headroom(peak: float, dtype: torch.dtype) -> float:
    """The dtype's maximum divided by `peak`: 1 is the edge of the range, below 1 is an overflow."""
    return torch.finfo(dtype).max / peak if peak else float("inf")


def describe_bad_values(name: str, tensor: torch.Tensor, limit: float | None = None) -> str | None:
    """A description such as `name has 2 NaN and 1 Inf among 96 values`, or that a value exceeds `limit`.

    None if all values are finite and within the limit.
    """
    if not can_hold_nonfinite(tensor):
        return None
    tensor = _to_checkable_tensor(tensor)
    # Two passes over the tensor, each with a synchronization.
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (inf, "Inf")) if count]
    if counts:
        return f"{name} has {' and '.join(counts)} among {tensor.numel()} values"
    if limit is not None and (peak := abs_max(tensor).item()) > limit:
        return f"{name} reaches {peak:.3g}, beyond {limit:g}"
    return None


def describe_nonfinite_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One message for each tensor that has a NaN or Inf."""
    return [description for name, tensor in tensors if (description := describe_bad_values(name, tensor))]


def describe_bad_tensors(tensors: Mapping[str, torch.Tensor], limit: float | None = None) -> str | None:
    """Messages of `describe_bad_values` for all tensors, joined with semicolons; None if no tensor has a bad value."""
    descriptions = (describe_bad_values(name, tensor, limit) for name, tensor in tensors.items())
    return "; ".join(text for text in descriptions if text) or None
