"""Counts what a step gives a device to do: FLOPs of products and attention, bytes of all else, ops."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MASKS = ("attn_mask", "attn_bias")


class Work(TorchDispatchMode):
    """Within it, every op is counted, on real tensors and on those without values; a view is an op of the host alone."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        """FLOPs by dtype, convolutions among them."""
        self.attention: Counter[tuple[bool, bool]] = Counter()
        """FLOPs by whether it has a mask and whether it is the backward pass."""
        self.bytes = 0
        """Read and written by all other ops."""
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.ops += 1
        name = func.name().partition(".")[0]
        if "scaled_dot_product" in name and isinstance(output, tuple):
            self._attend(func, name, args, kwargs)
        elif func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket]
            first = next(_tensors((args, kwargs)))
            dtype = "fp8" if first.dtype in _FP8 else _DTYPES.get(first.dtype, "fp32")
            self.products[dtype] += count(*args, **kwargs, out_val=output)
        elif "empty" not in name:
            self.bytes += _traffic(func, (args, kwargs), output)
        return output

    def _attend(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """Count attention by its shapes: PyTorch's own table lacks the CPU's."""
        backward = "backward" in name
        # A backward op has the output's gradient first.
        query, key = list(_tensors(args))[backward : backward + 2]
        batch, heads, queries, width = query.shape
        flops = 4 * batch * heads * queries * key.shape[2] * width
        names = [one.name for one in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        masked = any(isinstance(values.get(one), torch.Tensor) for one in _MASKS)
        self.attention[masked, backward] += flops * 5 // 2 if backward else flops


def _traffic(func: Any, given: Any, output: Any) -> int:
    """Return the bytes that an op reads and writes; 0 for one that only looks at its input another way."""
    inputs, outputs = list(_tensors(given)), list(_tensors(output))
    places = {one.untyped_storage()._cdata for one in inputs}
    if not func._schema.is_mutable:
        outputs = [one for one in outputs if one.untyped_storage()._cdata not in places]
        if not outputs:
            return 0
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*inputs, *outputs))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
