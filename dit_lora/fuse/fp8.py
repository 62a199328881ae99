"""The switch `fp8`: frozen products of adapted linear layers in fp8, inside of `lora_linear`.

Off unless it is asked for: it rounds as no other kernel does (docs/kernels.md). A layer's weight is rounded once, and
again if it was written to or replaced; what is made of it lies beside the layer's parameters and is saved nowhere.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.fuse.patches import Fusion, class_name, fusion_of
from dit_lora.guard.switches import Switch
from dit_lora.numerics.tolerances import FP8
from dit_lora_kernels.fp8 import Fp8Weight, fits, quantize_weight

OP = "fp8"
NEEDS = "lora_linear"
"""The op whose products it computes."""
_KEPT = "_dit_lora_fp8"
_LINEAR = "torch.nn.modules.linear.Linear"


class _Kept(NamedTuple):
    """A weight in fp8, and what it was made of."""

    key: tuple[object, ...]
    weight: Fp8Weight


def why_not(layer: Any) -> str | None:
    """Return why this LoRA layer's base keeps its own dtype, in a few words; None if it can be in fp8."""
    base = layer.base_layer
    if class_name(base) != _LINEAR:
        return f"its base is a {type(base).__name__}, quantised already"
    if base.weight.requires_grad:
        return "its base is trained"
    if not fits(base.weight):
        shape = " x ".join(map(str, base.weight.shape))
        return f"its base weight is {base.weight.dtype}, {shape}; bfloat16 and multiples of 16 are taken"
    return None


def note(model: nn.Module, fusion: Fusion) -> None:
    """Note in `fusion` which layers' products are in fp8, and why others are not."""
    for name in [name for op, name in fusion.replaced if op == NEEDS]:
        reason = why_not(model.get_submodule(name))
        if reason is None:
            fusion.replaced.append((OP, name))
        else:
            fusion.kept.append((OP, name, reason))


def weight_of(layer: nn.Module, base: Any, dtype: torch.dtype) -> Fp8Weight | None:
    """Return the base's weight in fp8 if its products are to be; None if not: the op is off, or they are not in bf16."""
    fusion = fusion_of(layer)
    if fusion is None or not fusion.is_on(OP) or dtype is not torch.bfloat16:
        return None
    # Compiled, what the model's forward left here is an input of the graph.
    if torch.compiler.is_compiling():
        kept = layer.__dict__.get(_KEPT)
        return None if kept is None else kept.weight
    return _ready(layer, base.weight)


def _ready(layer: nn.Module, weight: Tensor) -> Fp8Weight | None:
    if not fits(weight) or isinstance(weight, FakeTensor) or weight.is_meta:
        return None
    key = (weight.data_ptr(), weight._version, weight.device, weight.shape)
    kept: _Kept | None = layer.__dict__.get(_KEPT)
    if kept is None or kept.key != key:
        with torch.inference_mode(False), torch.no_grad():
            kept = _Kept(key, quantize_weight(weight))
        layer.__dict__[_KEPT] = kept
    return kept.weight


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes that a fused model keeps beside its weights for products in fp8: codes for both ways, and scales."""
    fusion = fusion_of(model)
    names = [] if fusion is None else [name for op, name in fusion.replaced if op == OP]
    layers: list[Any] = [model.get_submodule(name) for name in names]
    shapes = [layer.base_layer.weight.shape for layer in layers]
    return sum(2 * shape.numel() + 4 * sum(shape) for shape in shapes)


def start(model: nn.Module, fusion: Fusion, *, insisted: bool) -> Switch:
    """Keep the noted layers' weights in fp8 from the model's next forward on, and return the switch of it."""
    weights = Fp8Weights(model, fusion)
    fusion.hooks.append(weights)

    def turn_off() -> None:
        fusion.on[OP] = False
        weights.drop()

    off = partial(fusion.without, OP)
    # No part of `kernels`: those are compared to the last bits of fp32, which this is not.
    return Switch(
        OP, "kernel", off, turn_off, "the weights' own dtype", insisted=insisted, error=FP8
    )


class Fp8Weights:
    """A forward pre-hook of a fused model: a weight that is not in fp8 yet, or was changed, is rounded before blocks run."""

    def __init__(self, model: nn.Module, fusion: Fusion) -> None:
        self._layers: list[Any] = [
            model.get_submodule(name) for op, name in fusion.replaced if op == OP
        ]
        self._handle = model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, _args: Any) -> None:
        fusion = fusion_of(model)
        if torch.compiler.is_compiling() or fusion is None or not fusion.is_on(OP):
            return
        for layer in self._layers:
            _ready(layer, layer.base_layer.weight)

    def drop(self) -> None:
        """Free what was made of the weights."""
        for layer in self._layers:
            layer.__dict__.pop(_KEPT, None)

    def remove(self) -> None:
        """Leave the model as if it had never been in fp8."""
        self.drop()
        self._handle.remove()
