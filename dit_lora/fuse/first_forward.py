"""Compare a fused model with the stock one, once for each shape that it trains on."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from dit_lora.errors import DitLoraError
from dit_lora.fuse.casts import renew_casts
from dit_lora.fuse.patches import ATTENTION, fusion_of
from dit_lora.guard.comparison.block_parity import How
from dit_lora.guard.comparison.parity import Difference, differences, first_difference
from dit_lora.guard.replay import cuda_devices
from dit_lora.guard.switches import Switch, model_switches

Shapes = tuple[tuple[int, ...], ...]


class FirstForwards:
    """A forward pre-hook of the model: drops casts of adapters and full masks, checks kernels at new shapes.

    A mask that masks nothing becomes none, where the model takes none: with a mask, attention has fewer and
    slower backends. To see that it masks nothing costs one read of the device.

    The check runs forward and backward of the same inputs with and without each kernel, block by block, and leaves
    gradients and random state as they were. Of one sample each block is given a second one, made of the first. A kernel
    that differs is switched off with a warning, or refused if it was asked for by name.
    """

    def __init__(self, check: bool) -> None:
        self.check = check
        self._seen: set[Shapes] = set()
        self._busy = False

    def __call__(
        self, model: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        # Traced or without values there is nothing to compare, and no mask to read.
        if torch.compiler.is_compiling() or _is_fake(next(model.parameters(), None)):
            return None
        renew_casts(model)  # a write to an adapter's `.data` since the last forward left no trace
        fusion = fusion_of(model)
        if fusion is not None and fusion.is_on(ATTENTION):
            full = [name for name, value in kwargs.items() if _is_full_mask(model, name, value)]
            kwargs = kwargs | dict.fromkeys(full)
        if self.check and not self._busy and torch.is_grad_enabled():
            self._compare_once(model, args, kwargs)
        return args, kwargs

    def _compare_once(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Compare at the shapes of these inputs if they are new and nothing is being compared already."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes in self._seen:
            return
        self._busy = True  # the comparison calls the model, and so this hook
        try:
            if self._compare(model, args, kwargs):
                self._seen.add(shapes)
        finally:
            self._busy = False

    def _compare(self, model: nn.Module, args: Any, kwargs: Any) -> bool:
        """Switch off, or refuse, what differs; return whether these inputs could tell.

        They cannot if the stock model makes NaN or Inf of them.
        """

        def losses() -> torch.Tensor:
            outputs = [x for x in tree_leaves(model(*args, **kwargs)) if _is_float(x)]
            return torch.stack([_weighed(output) for output in outputs]).sum(0)

        fusion = fusion_of(model)
        assert fusion is not None
        # In a fork of the random state: this forward is one more than the training step has.
        with torch.no_grad(), fusion.all_stock(), torch.random.fork_rng(cuda_devices(model)):
            if not torch.isfinite(losses()).all():
                return False
        # Kernels alone: compilation is a switch too, and not this check's subject.
        kernels = [switch for switch in model_switches(model) if switch.name != "compile"]
        how = How(widen=_has_one_row(model, args, kwargs))

        def compare(switch: Switch, others: Sequence[Switch]) -> Difference | None:
            return first_difference(switch, losses, model, others=others, how=how)

        for switch, difference in differences(kernels, compare):
            if switch.insisted:
                raise DitLoraError(refusal(switch, difference.words))
            switch.turn_off()
            warnings.warn(f"{difference.words}; switched off: {switch.remedy}", stacklevel=2)
        return True


def _has_one_row(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a forward of these inputs is of one sample, by its first input of two dimensions or more."""
    # In the signature's order, whatever order keyword arguments came in.
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    for value in arguments.values():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        wide = [tensor for tensor in tensors if tensor.ndim > 1]
        if wide:  # a list has a tensor a sample
            return len(value if isinstance(value, list) else wide[0]) == 1
    return False


def _is_full_mask(model: nn.Module, name: str, value: object) -> bool:
    """Return whether this argument is a mask of keys that masks none, of a model that takes None in its place."""
    if name not in ("attention_mask", "encoder_attention_mask") or _is_fake(value):
        return False
    # (B, K) of ones and zeros; others are added to scores.
    if not isinstance(value, torch.Tensor) or value.ndim != 2:
        return False
    parameter = inspect.signature(type(model).forward).parameters.get(name)
    return parameter is not None and parameter.default is None and bool((value == 1).all())


def _is_fake(value: object) -> bool:
    """Return whether this is a tensor without values."""
    return isinstance(value, FakeTensor) or getattr(value, "is_meta", False)


def refusal(switch: Switch, words: str) -> str:
    """Return why a kernel that a user asked for by name cannot be used."""
    return f"{words}; it was asked for by name: set it to auto or off to train without it"


def _is_float(value: object) -> bool:
    """Return whether this is a tensor of floating-point values."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _weighed(output: torch.Tensor) -> torch.Tensor:
    """Return one number a sample (B,) in which every element has a weight of its own, so that each is checked."""
    # A plain mean would give all elements one gradient, and errors that cancel in a sum would not be seen.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape[1:], generator=generator).to(output.device)
    return (output.float() * weights).reshape(len(output), -1).mean(1)
