"""Kinds of adapters that PEFT trains: their configs, the names of their tensors, and the layers that they fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import nn

from dit_lora.adapters.patterns import unbounded_reason
from dit_lora.config.lora import KIND_NAMES, Kind, LoraConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.quantized_linear import NarrowLinear

# PEFT's values of `init_lora_weights` by ours of `lora.init`; of others its own default.
_INITS: dict[str, Literal["gaussian"] | bool] = {"gaussian": "gaussian"}
_BLOCK_SIZE = 32  # PEFT's own default
DROPOUTS = ("lora_dropout", "rank_dropout", "module_dropout")
"""Names of dropout in PEFT's configs: a saved one has none, so that no sample is drawn with parts left out."""
WITHOUT_DIFFUSERS: tuple[Kind, ...] = ("loha", "oft")
"""Kinds that no loader of Diffusers reads: they are kept in PEFT's format for diffusion models too."""
# PEFT computes with the weight of a layer, or with its shape, which packed codes do not have.
_UNQUANTIZED: Mapping[Kind, tuple[str, ...]] = {
    "dora": ("nf4", "int8", "fp8"),
    "lokr": ("nf4",),
    "loha": ("nf4",),
}


def config_of(lora: LoraConfig, targets: str | Sequence[str]) -> peft.PeftConfig:
    """Return PEFT's config of an adapter that starts anew."""
    own = targets if isinstance(targets, str) else list(targets)
    if lora.kind == "oft":
        size = lora.block_size or _BLOCK_SIZE
        return peft.OFTConfig(r=0, oft_block_size=size, target_modules=own)
    rank, alpha = lora.own_rank, lora.alpha or lora.own_rank
    shared: dict[str, Any] = {
        "r": rank,
        "target_modules": own,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
    }
    if lora.kind == "lokr":
        return peft.LoKrConfig(alpha=alpha, decompose_factor=lora.factor or -1, **shared)
    if lora.kind == "loha":
        return peft.LoHaConfig(alpha=alpha, **shared)
    return peft.LoraConfig(
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        init_lora_weights=_INITS.get(lora.init, True),
        use_rslora=lora.rslora,
        use_dora=lora.kind == "dora",
        **shared,
    )


def kind_of(config: peft.PeftConfig | Mapping[str, Any] | None) -> str:
    """Return the kind of an adapter by PEFT's config, or by that of a file; LoRA where nothing says another."""
    values = config.to_dict() if isinstance(config, peft.PeftConfig) else dict(config or {})
    # Diffusers' headers hold the enumeration's value, PEFT's objects the member.
    named = values.get("peft_type") or "LORA"
    kind = str(getattr(named, "value", named)).lower()
    return "dora" if kind == "lora" and values.get("use_dora") else kind


def adapter_words(made: Mapping[str, Any]) -> str:
    """Return what a result's header, or a recipe's section, says of an adapter in words: `DoRA (rank 8, alpha 16)`."""
    name = KIND_NAMES.get(made.get("kind", "lora"), str(made.get("kind")))
    if made.get("block_size"):
        return f"{name} (blocks of {made['block_size']})"
    named = [f"{key} {made[key]}" for key in ("rank", "alpha") if made.get(key)]
    return f"{name} ({', '.join(named)})" if named else name


def alpha_of(config: Mapping[str, Any]) -> float | None:
    """Return alpha by PEFT's config, under whichever name the kind has it; None of kinds without one."""
    alpha: float | None = config.get("lora_alpha", config.get("alpha"))
    return alpha


def scaling_of(alpha: float, rank: float, *, rslora: bool) -> float:
    """Return the factor of an update."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def require_adaptable(model: nn.Module, layers: Sequence[str], lora: LoraConfig) -> None:
    """Raise `DitLoraError` with every layer that this kind cannot adapt, and every pattern that matches no layer."""
    unfit = [
        f"{name}: {words}"
        for name in layers
        if (words := _unfit(model.get_submodule(name), lora.kind))
    ]
    if unfit:
        what = f"lora.kind: {lora.kind} cannot adapt these layers of {type(model).__name__}"
        raise DitLoraError(listed(what, unfit))
    unused = [
        f"lora.{option}: {pattern}"
        for option in ("rank_pattern", "alpha_pattern")
        for pattern in getattr(lora, option)
        if not any(_matches(pattern, name) for name in layers)
    ]
    if unused:
        raise DitLoraError(listed("these patterns match no adapted layer", unused))


def measure_magnitudes(model: nn.Module, adapter: str) -> None:
    """Set DoRA's magnitudes to the rows' norms in fp32, as its forward pass takes those of fp32 adapters.

    PEFT takes them in the base's dtype: over bf16 weights each row would start up to 0.4 % off its base.
    """
    for module in model.modules():
        if not isinstance(module, LoraLayer) or adapter not in module.lora_magnitude_vector:
            continue
        base: Any = module.get_base_layer()
        trained: Any = module.lora_magnitude_vector[adapter]
        if not base.weight.is_meta:
            norms = torch.linalg.vector_norm(base.weight.detach().float().flatten(1), dim=1)
            trained.weight.data.copy_(norms.reshape(trained.weight.shape))


def _unfit(layer: nn.Module, kind: Kind) -> str | None:
    """Return why a layer cannot have an adapter of this kind; None if it can."""
    if kind == "oft" and not isinstance(layer, nn.Linear):
        return "a convolution, whose windows overlap once rotated"
    if isinstance(layer, NarrowLinear) and layer.kind in _UNQUANTIZED.get(kind, ()):
        return f"quantised to {layer.kind}, and {kind} is computed from the weight itself"
    weight: Any = layer.weight
    if kind == "dora" and not weight.is_meta:
        zero = int((~weight.detach().flatten(1).any(dim=1)).sum())
        if zero:  # as a layer has that begins at zero: the first step would be 0 / 0
            return f"{zero} of its {len(weight)} rows are zero, and dora divides by their lengths"
    return None


def _matches(pattern: str, name: str) -> bool:
    reason = unbounded_reason(pattern)
    if reason:  # later, nobody could read the adapter's own config
        raise DitLoraError(f"{pattern!r} {reason}")
    # PEFT gives the name itself back where no pattern matches; a pattern may be the whole name.
    return get_pattern_key([pattern], name) == pattern
