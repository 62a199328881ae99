"""The op `fp8`: computes the frozen matrix products of LoRA layers in fp8, inside `lora_linear`.

Off by default, because it rounds more coarsely than any other kernel (docs/kernels.md). A layer's weight is rounded
once, and again if it was written to or replaced. The fp8 copy is stored on the layer and never saved.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.fuse.patches import FusedModelState, get_class_name, get_fusion
from dit_lora.guard.fallbacks import Fallback
from dit_lora.numerics.tolerances import FP8_TOLERANCE
from dit_lora_kernels.fp8 import Fp8Weight, can_multiply_in_fp8, quantize_weight

OP = "fp8"
REQUIRED_OP = "lora_linear"
"""The op whose matrix products it computes."""
# Stored in the layer's `__dict__`, where state dicts and `.to()` do not look.
_CACHE_ATTRIBUTE = "_dit_lora_fp8"
_LINEAR_CLASS = "torch.nn.modules.linear.Linear"


class _CachedWeight(NamedTuple):
    """A layer's weight in fp8, and the cache key of the tensor that it was made from."""

    key: tuple[object, ...]
    weight: Fp8Weight


def find_fp8_problem(layer: Any) -> str | None:
    """Reason why a LoRA layer's base weight stays in its dtype; None if it can be in fp8."""
    base = layer.base_layer
    # Subclasses may hold other tensors than a plain weight.
    if get_class_name(base) != _LINEAR_CLASS:
        return f"its base is a {type(base).__name__}, quantised already"
    if base.weight.requires_grad:
        return "its base is trained"
    if not can_multiply_in_fp8(base.weight):
        shape = " x ".join(map(str, base.weight.shape))
        return f"its base weight is {base.weight.dtype}, {shape}; bfloat16 and multiples of 16 are taken"
    return None


def record_fp8_layers(model: nn.Module, fusion: FusedModelState) -> None:
    """Record in `fusion` which LoRA layers multiply in fp8, and why the rest do not."""
    for name in [name for op, name in fusion.patched_modules if op == REQUIRED_OP]:
        reason = find_fp8_problem(model.get_submodule(name))
        if reason is None:
            fusion.patched_modules.append((OP, name))
        else:
            fusion.skipped_modules.append((OP, name, reason))


def get_fp8_weight(layer: nn.Module, base: Any, dtype: torch.dtype) -> Fp8Weight | None:
    """The base weight of a LoRA layer in fp8; None if the op is off or the layer does not compute in bf16."""
    fusion = get_fusion(layer)
    if fusion is None or not fusion.is_on(OP) or dtype is not torch.bfloat16:
        return None
    # Compiled: the copy that the model's pre-hook stored here is an input of the graph.
    if torch.compiler.is_compiling():
        cached = layer.__dict__.get(_CACHE_ATTRIBUTE)
        return None if cached is None else cached.weight
    return _get_or_quantize_weight(layer, base.weight)


def _get_or_quantize_weight(layer: nn.Module, weight: Tensor) -> Fp8Weight | None:
    """The fp8 copy of a layer's weight, created if it is missing or out of date.

    None if the weight cannot be in fp8.
    """
    if not can_multiply_in_fp8(weight) or isinstance(weight, FakeTensor) or weight.is_meta:
        return None
    # The address changes with a new tensor, the version with a write in place.
    key = (weight.data_ptr(), weight._version, weight.device, weight.shape)
    cached: _CachedWeight | None = layer.__dict__.get(_CACHE_ATTRIBUTE)
    if cached is None or cached.key != key:
        # A tensor made in inference mode could not be used in a later training step.
        with torch.inference_mode(False), torch.no_grad():
            cached = _CachedWeight(key, quantize_weight(weight))
        layer.__dict__[_CACHE_ATTRIBUTE] = cached
    return cached.weight


def count_fp8_bytes(model: nn.Module) -> int:
    """Bytes of a fused model's fp8 weight copies.

    They consist of codes for both products (forward and backward) and scales.
    """
    fusion = get_fusion(model)
    names = [] if fusion is None else [name for op, name in fusion.patched_modules if op == OP]
    layers: list[Any] = [model.get_submodule(name) for name in names]
    shapes = [layer.base_layer.weight.shape for layer in layers]
    # One byte per element for each of two layouts, and fp32 scales per row and per column.
    return sum(2 * shape.numel() + 4 * sum(shape) for shape in shapes)


def enable_fp8(model: nn.Module, fusion: FusedModelState, *, required: bool) -> Fallback:
    """Keep the weights of the recorded layers in fp8 from the next forward on.

    Returns the guard's fallback that turns fp8 off.
    """
    weights = Fp8Weights(model, fusion)
    fusion.hooks.append(weights)

    def disable_fp8() -> None:
        fusion.op_states[OP] = False
        weights.drop()

    disabled = partial(fusion.disable_op, OP)
    # Not part of `kernels`: those must agree to the last bits of fp32, which fp8 cannot.
    return Fallback(
        OP, "kernel", disabled, disable_fp8, "the weights' own dtype", required=required, rounding_error=FP8_TOLERANCE
    )


class Fp8Weights:
    """Forward pre-hook of a fused model that rounds new or changed weights to fp8 before the blocks run."""

    def __init__(self, model: nn.Module, fusion: FusedModelState) -> None:
        self._layers: list[Any] = [model.get_submodule(name) for op, name in fusion.patched_modules if op == OP]
        self._handle = model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, _args: Any) -> None:
        fusion = get_fusion(model)
        if torch.compiler.is_compiling() or fusion is None or not fusion.is_on(OP):
            return
        for layer in self._layers:
            _get_or_quantize_weight(layer, layer.base_layer.weight)

    def drop(self) -> None:
        """Free the fp8 copies of the model's weights."""
        for layer in self._layers:
            layer.__dict__.pop(_CACHE_ATTRIBUTE, None)

    def remove(self) -> None:
        """Free the fp8 copies of the model's weights and remove the forward pre-hook that makes them."""
        self.drop()
        self._handle.remove()
