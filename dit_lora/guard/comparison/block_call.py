"""Repeats one call of a block on the same inputs, as it is or in fp32, with gradients of a randomly weighted sum."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dit_lora.guard.comparison.parity_values import Values, gradients, named_outputs, recording
from dit_lora.guard.replay import cuda_devices
from dit_lora.numerics.finite import HALVES
from dit_lora.numerics.opaque import ONLY_COUNTS, called_modules

_COLLECTOR = "output_collector"


class BlockCall:
    """One call of a block, that can be made again.

    `learning` says which of its floating inputs have a gradient; all, if it has another length. With `inside_of`,
    the model, what the block's modules return is among the values. With `widen` inputs of one row get a second.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        learning: tuple[bool, ...],
        *,
        inside_of: nn.Module | None = None,
        widen: bool = False,
    ) -> None:
        self.name, self.module, self.widened = name, module, widen
        self._inside_of = inside_of
        self._leaves, self._spec = tree_flatten((args, kwargs))
        if widen:
            self._leaves = [_two_rows(leaf) for leaf in self._leaves]
        float_inputs = floats(self._leaves)
        self._learning = (
            learning if len(learning) == len(float_inputs) else (True,) * len(float_inputs)
        )
        tensors = [*module.parameters(), *float_inputs]
        halves = {x.dtype for x in tensors if x.dtype in HALVES}
        self.is_half = bool(halves)
        self.dtype = torch.bfloat16 if torch.bfloat16 in halves else torch.float16
        self.device = next((x.device for x in tensors), torch.device("cpu"))
        self.inputs = [x.detach() for x in float_inputs]

    def values(self, *, wide: bool) -> Values:
        """Return outputs, and the gradients of a drawn sum of them, as the switches are now."""
        leaves, learning = self._fresh(wide=wide)
        args, kwargs = tree_unflatten(leaves, self._spec)
        inside: Values = {}
        # A block may draw random numbers; the run's own generators must stay where they are.
        with (
            torch.enable_grad(),
            torch.random.fork_rng(cuda_devices(self.module)),
            _unrounded(),
            saved_tensors_hooks(_kept, lambda x: x),  # not those of a checkpoint around the block
            self._recorded(inside),
        ):
            made = _uncaptured(lambda: self.module(*args, **kwargs))
            outputs = named_outputs(self.name, made)
            grads = self._gradients(outputs, learning)
        return {**inside, **{n: x.detach() for n, x in outputs.items()}, **grads}

    def _recorded(self, inside: Values) -> AbstractContextManager[None]:
        if self._inside_of is None:
            return nullcontext()
        names = [name for name, _ in called_modules(self.module) if name]
        full = [f"{self.name}.{name}" if self.name else name for name in names]
        return recording(self._inside_of, full, inside)

    def _fresh(self, *, wide: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        flags, leaves, learning = iter(self._learning), [], {}
        for index, leaf in enumerate(self._leaves):
            if not is_float(leaf):
                # Some blocks are told the dtype to compute in.
                is_half = wide and isinstance(leaf, torch.dtype) and leaf in HALVES
                leaves.append(torch.float32 if is_half else leaf)
                continue
            dtype = torch.float32 if wide and leaf.dtype in HALVES else leaf.dtype
            fresh = leaf.detach().to(dtype, copy=True).requires_grad_(next(flags))
            leaves.append(fresh)
            if fresh.requires_grad:
                learning[f"{self.name}'s input {index}"] = fresh
        return leaves, learning

    def _gradients(self, outputs: Values, inputs: dict[str, torch.Tensor]) -> Values:
        ends = [x for x in outputs.values() if x.requires_grad]
        path = f"{self.name}." if self.name else ""
        trained = {f"{path}{n}": p for n, p in self.module.named_parameters() if p.requires_grad}
        starts = {**trained, **inputs}
        if not ends or not starts:
            return {}
        # Stock code and kernel are asked for the gradients of the same sum.
        draws = torch.Generator(self.device).manual_seed(0)
        pulls = [torch.randn(x.shape, generator=draws, device=x.device).to(x.dtype) for x in ends]
        # Past the hooks on accumulated gradients, which are a step's.
        grads = torch.autograd.grad(ends, [*starts.values()], pulls, allow_unused=True)
        return gradients(dict(zip(starts, grads, strict=True)))


def _uncaptured(call: Callable[[], Any]) -> Any:
    """Call it unseen by Transformers, which in a pass collects what layers return (`utils/output_capturing.py`)."""
    # In a copy of the context: what is set there is gone after the call.
    context = copy_context()

    def alone() -> Any:
        for variable in context:
            if variable.name == _COLLECTOR:
                variable.set(None)
        return call()

    return context.run(alone)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


setattr(_kept, ONLY_COUNTS, True)


def is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def floats(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if is_float(leaf)]


def _two_rows(leaf: Any) -> Any:
    """Return a tensor of one row with a second, other one; integers and masks get the same row again."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2 or len(leaf) != 1:
        return leaf
    # Flipped along the last dimension: as large as the first row, and other.
    return torch.cat([leaf, leaf.flip(-1) if leaf.is_floating_point() else leaf])


@contextmanager
def _unrounded() -> Iterator[None]:
    """Compute fp32 as fp32 within, and not as TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
