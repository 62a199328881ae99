"""A training step on fake tensors: every op runs with its shapes and dtypes, without memory."""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dit_lora.data.cache.cache import Spec
from dit_lora.families.base import Tensors
from dit_lora.numerics.transformer_blocks import repeated_blocks

CPU = torch.device("cpu")
# Frames between a call and the mode that it is dispatched to, besides those of other modes.
_WRAPPER_FILES = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py")
Losses = Callable[[nn.Module, Tensors], Any]


class FakeStep:
    """A training step on fake tensors: a model with fake weights in place of its real ones, and a batch.

    Floating-point tensors of the batch are fake. Integers are real, because a model may read the longest caption's
    length: they are ones, which gives the longest, or the tensors of `integer_inputs`.
    """

    def __init__(
        self, model: nn.Module, batch: Spec, integer_inputs: Tensors | None = None, device: torch.device = CPU
    ) -> None:
        if device.type == "cpu":
            # Accelerate uses cpu:0 in several processes; a fake tensor there does not equal one on cpu.
            device = CPU
        # A wrapper, because `functional_call` replaces the weights of one module call.
        self._module = _StepModule(model)
        floats = {name: spec for name, spec in batch.items() if spec[1].is_floating_point}
        self._fake_mode = _FakeMode(allow_non_fake_inputs=True)
        # Fake copies of all weights and buffers; the real ones give only shapes and dtypes.
        with self._fake_mode:
            self.weights: Tensors = {
                name: torch.empty(t.shape, dtype=t.dtype, device=device).requires_grad_(t.requires_grad)
                for name, t in [*self._module.named_parameters(), *self._module.named_buffers()]
            }
            self.batch: dict[str, torch.Tensor] = {
                name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in floats.items()
            }
        for name, (shape, dtype) in batch.items():
            if name not in floats:
                self.batch[name] = torch.ones(shape, dtype=dtype, device=device)
        self.batch |= {name: tensor.to(device) for name, tensor in (integer_inputs or {}).items()}

    def run_on_fake_weights(self, compute: Losses) -> Any:
        """Run `compute(model, batch)` with the model on the fake weights.

        Not under a fake mode: tables that a model computes and keeps, and its random numbers, must be real. Raises
        `RuntimeError` if the model depends on values, and the model's own errors for token ids that are ones.
        """
        blocks = repeated_blocks(self._module.model)
        hooks = [block.register_forward_pre_hook(self._replace_masks, with_kwargs=True) for block in blocks]
        try:
            return functional_call(self._module, self.weights, (compute, self.batch))
        finally:
            for hook in hooks:
                hook.remove()

    def _replace_masks(self, _block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace real padding masks (B, S) among a block's inputs with fake ones.

        HunyuanVideo-1.5's blocks expand theirs to (B, 1, S, S), which takes gigabytes and seconds if it is real.
        """

        def replace(value: Any) -> Any:
            is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
            if is_real and value.dtype is torch.bool and value.dim() == 2:
                with self._fake_mode:
                    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
            return value

        return tree_map(replace, (args, kwargs))

    def track_allocations(self) -> "AllocationTracker":
        """A counter of allocations other than the weights, their gradients and the batch."""
        weights = self.weights.values()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return AllocationTracker([*weights, *gradients, *self.batch.values()])


class _FakeMode(FakeTensorMode):
    """A fake mode in which a fake tensor can be indexed with a real mask.

    PyTorch's mode would count the true elements of a fake copy of the mask, which has no values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            tensor, indices = args
            plain_indices: list[torch.Tensor | None] = []
            for index in indices:
                if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
                    plain_indices.append(index)
                else:
                    # Integer indices give the result a known shape: (true elements, dims) to one per dimension.
                    plain_indices += index.nonzero().unbind(1)
            args = (tensor, plain_indices)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class _StepModule(nn.Module):
    """A computation as a module, so that `functional_call` can replace its weights, for the backward pass too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Losses, batch: Tensors) -> Any:
        return compute(self.model, batch)


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that tracks current and peak bytes of storages allocated by ops; `excluded` is not counted.

    Counts real ops as well as those on fake tensors.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.current_bytes = self.max_bytes = 0
        self._storages: dict[int, Any] = {_get_storage_id(tensor): None for tensor in excluded}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._update_max()
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and _get_storage_id(tensor) not in self._storages:
                self._add_storage(_get_storage_id(tensor), tensor.untyped_storage())
        # Autograd adds a tensor's second gradient in place if nobody else holds the first. A fake first gradient is
        # freed a moment later, before the next op, so do not count both.
        if not (func is torch.ops.aten.add.Tensor and _is_called_by_autograd()):
            self._update_max()
        return output

    def _update_max(self) -> None:
        self.max_bytes = max(self.max_bytes, self.current_bytes)

    def _add_storage(self, storage_id: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def on_freed(_reference: Any) -> None:
            del self._storages[storage_id]
            self.current_bytes -= size

        # The callback runs when the last tensor of this storage is freed.
        self._storages[storage_id] = weakref.ref(storage, on_freed)
        self.current_bytes += size


def _is_called_by_autograd() -> bool:
    """True if the autograd engine itself called the current op, rather than a Python backward function."""
    # Skip this function and the dispatch method that called it.
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(_WRAPPER_FILES)
    ):
        frame = frame.f_back
    # The Python function that starts the autograd engine: only C++ is between it and the op.
    return frame.f_code.co_name == "_engine_run_backward"


def count_tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once: tied weights count once."""
    return sum({_get_storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _get_storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
