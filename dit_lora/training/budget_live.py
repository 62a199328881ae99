"""What a computation takes: bytes that live at once, floating point operations, bytes moved.

By a dispatch mode, so of a real step as of one on fake tensors.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten: Any = torch.ops.aten


@dataclass
class Work:
    """Of the ops so far."""

    flops: int = 0
    """Of matrix products, convolutions and attention; a product and a sum are two."""
    moved: int = 0
    """Bytes that the ops read and wrote, each op on its own: nothing stays in a cache."""


class Live(TorchDispatchMode):
    """Bytes of the storages that ops made while it was on, now and at most; those of `without` are left out."""

    def __init__(self, without: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self.work = Work()
        self._known: dict[int, Any] = {_number(tensor): None for tensor in without}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = _tensors(output)
        given = {_number(tensor) for tensor in _tensors((args, kwargs))}
        if any(_number(tensor) not in given for tensor in made) or func._schema.is_mutable:
            self._note_work(func, args, kwargs, output, made)
        for tensor in made:
            if _number(tensor) not in self._known:
                self._count(_number(tensor), tensor.untyped_storage())
        return output

    def _note_work(
        self, func: Any, args: Any, kwargs: Any, output: Any, made: list[torch.Tensor]
    ) -> None:
        touched = [*_tensors((args, kwargs)), *made]
        self.work.moved += sum({_number(t): t.numel() * t.element_size() for t in touched}.values())
        counts = _FLOPS.get(func._overloadpacket)
        if counts is None:
            return
        self.work.flops += int(counts(*args, **kwargs, out_val=output))

    def _count(self, number: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def gone(_reference: Any) -> None:
            del self._known[number]
            self.now -= size

        self._known[number] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once: a tied weight is one."""
    return sum({_number(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _number(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    # The CPU's, which PyTorch's table leaves out.
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
