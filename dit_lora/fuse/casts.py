"""Copies of LoRA A and B in the compute dtype: made once per training step, for all layers together."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.fuse.patches import get_fusion
from dit_lora_kernels.lora_linear import cast_all_lora_factors, cast_lora_factors


@dataclass
class _CachedCast:
    """Cached LoRA factors A and s*B of a layer in the compute dtype, and the parameters they were computed from."""

    key: tuple[Any, ...]
    factors: tuple[Tensor, Tensor]
    a: Tensor
    b: Tensor
    scaling: float
    dtype: torch.dtype
    adapter_name: str
    is_used: bool = True
    """True if a forward used it since it was made."""


# Weak keys, so that the casts do not keep a model alive.
CAST_CACHE: WeakKeyDictionary[nn.Module, _CachedCast] = WeakKeyDictionary()


def refresh_lora_casts(model: nn.Module) -> None:
    """Recompute the low-precision copies of LoRA A and B that this model's last forward used.

    Copies of all other models are dropped.

    Call it before each forward: a write to `.data` does not change a tensor's version. Layers whose parameters were
    replaced or moved meanwhile make their own casts, as in a first forward.
    """
    fusion, groups = get_fusion(model), defaultdict(list)
    # A copy of the items, because entries are deleted in the loop.
    for layer, cast in list(CAST_CACHE.items()):
        # Unused casts belong to layers that did not run, such as an adapter that was switched off.
        if not (cast.is_used and get_fusion(layer) is fusion and _is_cast_current(layer, cast)):
            del CAST_CACHE[layer]
            continue
        cast.is_used = False
        # Casts with equal device and dtypes are computed together, in a few launches.
        groups[cast.a.device, cast.a.dtype, cast.b.dtype, cast.dtype].append(cast)
    for (*_, dtype), casts in groups.items():
        lowered = cast_all_lora_factors([(cast.a, cast.b, cast.scaling) for cast in casts], dtype)
        for cast, pair in zip(casts, lowered, strict=True):
            cast.key, cast.factors = _get_cast_cache_key(cast.a, cast.b, cast.scaling, dtype), pair


def _is_cast_current(layer: nn.Module, cast: _CachedCast) -> bool:
    """True if a cached cast is current: the layer has the same LoRA A and B, unsharded and on the same device."""
    # FSDP replaces them with shards and frees their memory; ZeRO-3 leaves them empty; offload moves them.
    pairs = (("lora_A", cast.a, cast.factors[0]), ("lora_B", cast.b, cast.factors[1]))
    for part, tensor, low in pairs:
        # `_modules` is read directly: `nn.Module.__getattr__` is slow.
        holders: Any = layer._modules[part]
        holder = holders._modules.get(cast.adapter_name)
        if holder is None or holder._parameters.get("weight") is not tensor:
            return False
        if tensor.shape != low.shape or tensor.device != low.device:
            return False
    return True


def cast_adapter(
    layer: nn.Module, adapter_name: str, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """LoRA factors A (R, I) and s*B (O, R) of a layer in `dtype`, cached until one of the parameters changes.

    The calls of one step, and their recomputation in its backward pass, share the result.
    """
    # A traced graph makes its own casts, and fake tensors have no values to cache.
    if torch.compiler.is_compiling() or isinstance(a, FakeTensor):
        return cast_lora_factors(a, b, scaling, dtype)
    key = _get_cast_cache_key(a, b, scaling, dtype)
    cast = CAST_CACHE.get(layer)
    if cast is None or cast.key != key:
        lowered = cast_lora_factors(a, b, scaling, dtype)
        cast = CAST_CACHE[layer] = _CachedCast(key, lowered, a, b, scaling, dtype, adapter_name)
    cast.is_used = True
    return cast.factors


def _get_cast_cache_key(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> tuple[object, ...]:
    """Cache key of LoRA factors in the compute dtype: versions and addresses of the parameters, scale and dtype."""
    # The version counts in-place writes, such as an optimizer's; the address changes if a parameter is replaced.
    # Tensors made in inference mode cannot be saved for a backward pass.
    inference = torch.is_inference_mode_enabled()
    return (a._version, b._version, a.data_ptr(), b.data_ptr(), scaling, dtype, inference)
