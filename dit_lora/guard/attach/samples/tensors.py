"""Find tensors inside the nested values that loops pass around: batches, model arguments, objects to save."""

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

_MAX_DEPTH = 8
_LEAF_TYPES = frozenset((int, float, bool, str, bytes, type(None), torch.dtype, torch.device))
_MAX_TENSORS = 100_000


def iter_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value with their paths: `batch['x']`, `0.weight`.

    Searches mappings, sequences, modules' state dicts, dataclasses and plain objects such as a graph batch.
    """
    return islice(_walk_nested_tensors(value, name, 0, set()), _MAX_TENSORS)


def _walk_nested_tensors(value: Any, name: str, depth: int, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        # Only floating-point and complex arrays can hold NaN.
        if value.dtype.kind in "fc" and value.dtype.isnative:
            yield name, torch.from_numpy(value)
        return
    if depth > _MAX_DEPTH or isinstance(value, (str, bytes, int, float, type(None), type)):
        return
    if id(value) in visited:  # an object that refers to itself
        return
    visited.add(id(value))
    for key, child in _iter_children(value):
        yield from _walk_nested_tensors(child, f"{name}{key}" if name else key.lstrip("."), depth + 1, visited)


def _iter_children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        yield from ((f".{key}", tensor) for key, tensor in named)
    elif isinstance(value, (Mapping, UserDict)):
        for key, child in value.items():
            # Parameter names read better as `.0.weight` than as a quoted key.
            is_path = isinstance(key, str) and key.replace(".", "").replace("_", "").isalnum()
            yield (f".{key}" if is_path else f"[{key!r}]"), child
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", child) for number, child in enumerate(value))
    elif is_dataclass(value) or type(value).__module__.split(".")[0] not in ("builtins", "numpy"):
        attributes = getattr(value, "__dict__", {})
        if isinstance(attributes, dict):
            yield from ((f".{key}", child) for key, child in attributes.items())


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Copy a value with the function applied to each tensor. Values that are no containers stay the same objects."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return function(value)
    if kind is tuple:
        return tuple([map_tensors(function, child) for child in value])
    if kind is dict:
        return {key: map_tensors(function, child) for key, child in value.items()}
    if kind is list:
        return [map_tensors(function, child) for child in value]
    if isinstance(value, UserDict):  # a BatchEncoding or BatchFeature of Transformers
        # Skip the constructor, whose arguments are not known.
        copy = object.__new__(kind)
        copy.__dict__.update(vars(value))
        copy.data = {key: map_tensors(function, child) for key, child in value.data.items()}
        return copy
    if kind in _LEAF_TYPES:
        return value
    # Named tuples, ordered dicts and container types that libraries have registered with torch's pytree.
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def has_batch_size(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
