"""A and B of adapted layers in the compute dtype: made once for all calls of a step, together for all layers."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.fuse.patches import fusion_of
from dit_lora_kernels.lora_linear import lower, lower_all


@dataclass
class _Cast:
    """A and s*B of a layer in the compute dtype, and what they were made of."""

    key: tuple[Any, ...]
    lowered: tuple[Tensor, Tensor]
    a: Tensor
    b: Tensor
    scaling: float
    dtype: torch.dtype
    name: str
    """The adapter's."""
    is_used: bool = True
    """True if a call took it since it was made."""


# Weak, so that no model is kept by its casts.
CASTS: WeakKeyDictionary[nn.Module, _Cast] = WeakKeyDictionary()


def renew_casts(model: nn.Module) -> None:
    """Make the casts of A and B anew that this model's last forward took, together; drop all others, of every model.

    Due before each forward: writing to `.data` leaves no trace. Layers of which something else has changed meanwhile
    make their own casts, as in a first forward.
    """
    fusion, groups = fusion_of(model), defaultdict(list)
    for layer, cast in list(CASTS.items()):
        if not (cast.is_used and fusion_of(layer) is fusion and _has_its_own(layer, cast)):
            del CASTS[layer]
            continue
        cast.is_used = False
        groups[cast.a.device, cast.a.dtype, cast.b.dtype, cast.dtype].append(cast)
    for (*_, dtype), casts in groups.items():
        lowered = lower_all([(cast.a, cast.b, cast.scaling) for cast in casts], dtype)
        for cast, pair in zip(casts, lowered, strict=True):
            cast.key, cast.lowered = _cast_key(cast.a, cast.b, cast.scaling, dtype), pair


def _has_its_own(layer: nn.Module, cast: _Cast) -> bool:
    """Return whether a cast's A and B are still the layer's, whole and in their place."""
    # FSDP puts shards in their place, and frees the memory of these; ZeRO-3 leaves these, empty; offload moves them.
    pairs = (("lora_A", cast.a, cast.lowered[0]), ("lora_B", cast.b, cast.lowered[1]))
    for part, tensor, low in pairs:
        holders: Any = layer._modules[part]
        holder = holders._modules.get(cast.name)
        if holder is None or holder._parameters.get("weight") is not tensor:
            return False
        if tensor.shape != low.shape or tensor.device != low.device:
            return False
    return True


def cast_adapter(
    layer: nn.Module, name: str, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `lower(...)` of a layer's adapter, A (R, I) and s*B (O, R) in `dtype`, kept until a parameter changes.

    Calls of one step, and their recomputation in its backward pass, share it.
    """
    # A traced graph makes its own casts, and a tensor without values has none to keep.
    if torch.compiler.is_compiling() or isinstance(a, FakeTensor):
        return lower(a, b, scaling, dtype)
    key = _cast_key(a, b, scaling, dtype)
    kept = CASTS.get(layer)
    if kept is None or kept.key != key:
        lowered = lower(a, b, scaling, dtype)
        kept = CASTS[layer] = _Cast(key, lowered, a, b, scaling, dtype, name)
    kept.is_used = True
    return kept.lowered


def _cast_key(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> tuple[object, ...]:
    """Return what a cast is made of."""
    # The version counts writes in place, which an optimizer makes; the address tells of a parameter that was replaced.
    # Nothing made in inference mode can be saved for a backward pass.
    inference = torch.is_inference_mode_enabled()
    return (a._version, b._version, a.data_ptr(), b.data_ptr(), scaling, dtype, inference)
