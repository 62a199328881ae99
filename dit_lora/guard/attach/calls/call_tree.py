"""Turns what a model was called with into a tree of plain JSON beside named tensors, and back: no pickle, no code.

Tensors are told by a number. Lists, tuples and dicts keep their kind; of a generator that is the loop's own, the state
of then is kept. Anything else is left out, and said: without it the call cannot be made again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dit_lora.errors import DitLoraError

Node = dict[str, Any]

_PLAIN = (type(None), bool, int, str)
_DICTS = (dict, OrderedDict)
# safetensors has no name for the others.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


class CallWriter:
    """Turns values into nodes; tensors and what could not be kept gather in it."""

    def __init__(self, generator: tuple[torch.Generator, torch.Tensor] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by their number, each once."""
        self.left_out: list[str] = []
        """Values that are neither a tensor nor a plain value, in words."""
        self._generator = generator
        self._numbers: dict[int, str] = {}

    def node(self, value: Any, where: str) -> Node:
        """Return a value as plain JSON; `where` says which it is."""
        kind = type(value)
        if kind in (torch.Tensor, nn.Parameter):
            return self._tensor(value, where)
        if kind is float:
            # JSON has no NaN and no infinity.
            return {"value": value} if math.isfinite(value) else {"float": str(value)}
        if kind in _PLAIN:
            return {"value": value}
        if kind in (list, tuple, torch.Size):
            nodes = [self.node(one, f"{where}[{index}]") for index, one in enumerate(value)]
            return {"list" if kind is list else "tuple": nodes}
        if kind in _DICTS and all(type(key) in (str, int) for key in value):
            # Pairs: JSON would make a string of a number that is a key.
            pairs = [[key, self.node(one, f"{where}[{key!r}]")] for key, one in value.items()]
            return {"dict": pairs}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": value.type}
        if self._generator is not None and value is self._generator[0]:
            return {"generator": value.device.type}
        return self._without(where, f"a {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, tensor: torch.Tensor, where: str) -> Node:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if not is_dense or tensor.dtype not in _DTYPES:
            layout = str(tensor.layout) if not is_dense else str(tensor.dtype)
            return self._without(where, f"a tensor of {layout}")
        number = self._numbers.setdefault(id(tensor), str(len(self._numbers)))
        self.tensors[number] = tensor
        return {"tensor": number}

    def _without(self, where: str, what: str) -> Node:
        self.left_out.append(f"{where}: {what} is neither a tensor nor a plain value")
        return {"left_out": what}


class CallReader:
    """Turns nodes into values again, on a device."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        generator: torch.Generator | None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._generator = generator

    def value(self, node: Node) -> Any:
        """Return the value of a node. Raises `DitLoraError` for one that no bundle of this version has."""
        kinds: dict[str, Callable[[Any], Any]] = {
            "tensor": lambda number: self._tensors[number].to(self._device),
            "value": lambda value: value,
            "float": float,
            "list": lambda nodes: [self.value(one) for one in nodes],
            "tuple": lambda nodes: tuple(self.value(one) for one in nodes),
            "dict": lambda pairs: {key: self.value(one) for key, one in pairs},
            "dtype": lambda name: getattr(torch, name),
            "device": lambda _: self._device,
            "generator": lambda _: self._generator,
        }
        ((kind, content),) = node.items()
        if kind not in kinds:
            raise DitLoraError(f"the bundle's call has a value of an unknown kind, {kind!r}")
        return kinds[kind](content)
