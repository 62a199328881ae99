"""Describe what is wrong with a tensor's values: NaN, Inf, and the room left in its dtype."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.layouts import strided_values

HALVES = (torch.bfloat16, torch.float16)


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if NaN and Inf are possible in the tensor and it holds anything."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.numel() > 0 and tensor.device.type != "meta"


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if every value is finite, as integers always are; reads the device."""
    return not has_values(tensor) or bool(torch.isfinite(_readable(tensor)).all())


def has_nan(values: Any) -> bool:
    """Return True if any tensor among values, however they are nested, has a NaN; reads the devices."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return any(bool(_readable(one).isnan().any()) for one in tensors if has_values(one))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values, strided; 8-bit floats as bf16, which holds all of their values.

    PyTorch cannot ask 8-bit floats and some sparse layouts whether they are infinite.
    """
    tensor = strided_values(tensor)
    return tensor.to(torch.bfloat16) if tensor.element_size() == 1 else tensor


def abs_max(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, fp32 scalar on the device; NaN if any value is NaN."""
    # fp32 comes last: a copy of the whole tensor in it would be as large again, or twice.
    return _readable(tensor.detach()).abs().max().float()


def magnitudes(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return each tensor's largest magnitude, fp32 (N,) on the device; NaN if it has a NaN. No tensor may be empty."""
    if not tensors:
        return torch.zeros(1, device=device)
    # The maximum norm: squares of finite values may not be finite.
    norms = torch._foreach_norm(tensors, float("inf"))
    try:
        return torch.stack(norms).float()  # one cast, not one a tensor
    except (
        RuntimeError
    ):  # of several devices: to ask each tensor for its own costs more than all else
        return torch.stack([norm.to(device) for norm in norms]).float()


def read_scalars(scalars: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return scalars of one dtype as numbers, by one read of each device and not one of each: a model has hundreds."""
    numbers: dict[str, Any] = {}
    for device in {scalar.device for scalar in scalars.values()}:
        there = {name: scalar for name, scalar in scalars.items() if scalar.device == device}
        numbers |= zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    return {name: numbers[name] for name in scalars}


def headroom(peak: float, dtype: torch.dtype) -> float:
    """Return how many times the largest magnitude fits into the dtype's range: 1 is the edge, below 1 is beyond."""
    return torch.finfo(dtype).max / peak if peak else float("inf")


def describe_bad(name: str, tensor: torch.Tensor, limit: float | None = None) -> str | None:
    """Return `name has 2 NaN and 1 Inf among 96 values`, or that it reaches beyond `limit`; None if neither."""
    if not has_values(tensor):
        return None
    tensor = _readable(tensor)
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    counts = [f"{count} {kind}" for count, kind in ((nan, "NaN"), (inf, "Inf")) if count]
    if counts:
        return f"{name} has {' and '.join(counts)} among {tensor.numel()} values"
    if limit is not None and (peak := abs_max(tensor).item()) > limit:
        return f"{name} reaches {peak:.3g}, beyond {limit:g}"
    return None


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a description of every tensor with a value that is not finite."""
    return [description for name, tensor in tensors if (description := describe_bad(name, tensor))]


def describe_all(tensors: Mapping[str, torch.Tensor], limit: float | None = None) -> str | None:
    """Return `describe_bad` of each, joined; None if nothing is wrong."""
    descriptions = (describe_bad(name, tensor, limit) for name, tensor in tensors.items())
    return "; ".join(text for text in descriptions if text) or None
