"""Convert the arguments of a model call to plain JSON plus named tensors, and back, without pickle.

Tensors are referred to by number. Lists, tuples and dicts keep their type. For the loop's random generator, its state
at the call is kept. Any other value is left out and reported, and the call cannot be repeated without it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dit_lora.errors import DitLoraError

Node = dict[str, Any]

_PLAIN_TYPES = (type(None), bool, int, str)
_DICT_TYPES = (dict, OrderedDict)
# The dtypes that safetensors can store.
_STORABLE_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


class CallSerializer:
    """Converts the values of a model call to JSON nodes; collects their tensors and values that cannot be stored."""

    def __init__(self, generator: tuple[torch.Generator, torch.Tensor] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors by number; each tensor is stored once."""
        self.omitted_values: list[str] = []
        """Descriptions of values that are neither tensors nor plain values."""
        self._generator = generator
        self._numbers: dict[int, str] = {}

    def to_json_node(self, value: Any, path: str) -> Node:
        """Convert one value of a model call to a JSON node; `path` names it in messages."""
        kind = type(value)
        if kind in (torch.Tensor, nn.Parameter):
            # safetensors stores neither sparse nor nested tensors.
            is_dense = value.layout is torch.strided and not value.is_nested
            if not is_dense or value.dtype not in _STORABLE_DTYPES:
                return self._record_omitted_value(path, f"a tensor of {value.dtype if is_dense else value.layout}")
            # A tensor that occurs several times is stored once, under one number.
            number = self._numbers.setdefault(id(value), str(len(self._numbers)))
            self.tensors[number] = value
            return {"tensor": number}
        if kind is float:
            # JSON has no NaN or infinity.
            return {"value": value} if math.isfinite(value) else {"float": str(value)}
        if kind in _PLAIN_TYPES:
            return {"value": value}
        if kind in (list, tuple, torch.Size):
            nodes = [self.to_json_node(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"list" if kind is list else "tuple": nodes}
        if kind in _DICT_TYPES and all(type(key) in (str, int) for key in value):
            # Store pairs: as JSON keys, integers would become strings.
            pairs = [[key, self.to_json_node(item, f"{path}[{key!r}]")] for key, item in value.items()]
            return {"dict": pairs}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": value.type}
        if self._generator is not None and value is self._generator[0]:
            return {"generator": value.device.type}
        return self._record_omitted_value(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _record_omitted_value(self, path: str, description: str) -> Node:
        self.omitted_values.append(f"{path}: {description} is neither a tensor nor a plain value")
        return {"left_out": description}


class CallDeserializer:
    """Converts the JSON nodes of a stored model call back to values, with tensors on a device."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._generator = generator

    def from_json_node(self, node: Node) -> Any:
        """Convert a stored JSON node back to its value.

        Raises:
            DitLoraError: If this version does not know the node's kind.
        """
        kinds: dict[str, Callable[[Any], Any]] = {
            "tensor": lambda number: self._tensors[number].to(self._device),
            "value": lambda value: value,
            "float": float,
            "list": lambda nodes: [self.from_json_node(child) for child in nodes],
            "tuple": lambda nodes: tuple(self.from_json_node(child) for child in nodes),
            "dict": lambda pairs: {key: self.from_json_node(child) for key, child in pairs},
            "dtype": lambda name: getattr(torch, name),
            "device": lambda _: self._device,
            "generator": lambda _: self._generator,
        }
        # A node is a dict with one key, which names its kind.
        ((kind, content),) = node.items()
        if kind not in kinds:
            raise DitLoraError(f"the bundle's call has a value of an unknown kind, {kind!r}")
        return kinds[kind](content)
