"""Kinds of adapters: PEFT's config for each, and which layers it can adapt."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import nn

from dit_lora.adapters.patterns import find_unbounded_regex_reason
from dit_lora.config.lora import ADAPTER_KIND_NAMES, AdapterKind, LoraConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.quantized_linear import QuantizedLinear

# PEFT's `init_lora_weights` for our `lora.init`; other values use PEFT's default.
_PEFT_INITS: dict[str, Literal["gaussian"] | bool] = {"gaussian": "gaussian"}
_DEFAULT_BLOCK_SIZE = 32  # PEFT's own default
DROPOUT_OPTIONS = ("lora_dropout", "rank_dropout", "module_dropout")
"""Dropout options in PEFT's configs. A saved config has them at 0, so that samples are made without dropout."""
# Quantizations that a kind cannot adapt: PEFT uses the layer's weight or its shape, which packed codes do not have.
_UNSUPPORTED_QUANTIZATIONS: Mapping[AdapterKind, tuple[str, ...]] = {
    "dora": ("nf4", "int8", "fp8"),
    "lokr": ("nf4",),
    "loha": ("nf4",),
}


def create_peft_config(lora: LoraConfig, targets: str | Sequence[str]) -> peft.PeftConfig:
    """PEFT's config object for a new adapter of the kind in `lora`, with these target layers."""
    target_modules = targets if isinstance(targets, str) else list(targets)
    if lora.kind == "oft":
        size = lora.block_size or _DEFAULT_BLOCK_SIZE
        # r=0: PEFT computes the number of blocks from their size.
        return peft.OFTConfig(r=0, oft_block_size=size, target_modules=target_modules)
    # Without alpha the scale is 1.
    rank, alpha = lora.new_adapter_rank, lora.alpha or lora.new_adapter_rank
    # Arguments that the configs of LoRA, LoKr and LoHa have in common.
    shared: dict[str, Any] = {
        "r": rank,
        "target_modules": target_modules,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
    }
    if lora.kind == "lokr":
        # -1: PEFT makes both factors about equally large.
        return peft.LoKrConfig(alpha=alpha, decompose_factor=lora.factor or -1, **shared)
    if lora.kind == "loha":
        return peft.LoHaConfig(alpha=alpha, **shared)
    return peft.LoraConfig(
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        init_lora_weights=_PEFT_INITS.get(lora.init, True),
        use_rslora=lora.rslora,
        use_dora=lora.kind == "dora",
        **shared,
    )


def get_adapter_kind(config: peft.PeftConfig | Mapping[str, Any] | None) -> str:
    """Kind of an adapter (such as `lora` or `dora`), from PEFT's config; `lora` if the config does not say."""
    values = config.to_dict() if isinstance(config, peft.PeftConfig) else dict(config or {})
    # Diffusers' headers hold the enumeration's value, PEFT's objects the member.
    named = values.get("peft_type") or "LORA"
    kind = str(getattr(named, "value", named)).lower()
    # For PEFT, DoRA is an option of LoRA.
    return "dora" if kind == "lora" and values.get("use_dora") else kind


def describe_adapter(metadata: Mapping[str, Any]) -> str:
    """Short description of an adapter from a file's header or a recipe's section: `DoRA (rank 8, alpha 16)`."""
    name = ADAPTER_KIND_NAMES.get(metadata.get("kind", "lora"), str(metadata.get("kind")))
    if metadata.get("block_size"):
        return f"{name} (blocks of {metadata['block_size']})"
    named = [f"{key} {metadata[key]}" for key in ("rank", "alpha") if metadata.get(key)]
    return f"{name} ({', '.join(named)})" if named else name


def get_alpha(config: Mapping[str, Any]) -> float | None:
    """Alpha of an adapter, from PEFT's config, whose key depends on the kind; None for kinds without alpha."""
    return config.get("lora_alpha", config.get("alpha"))


def compute_scaling(alpha: float, rank: float, *, rslora: bool) -> float:
    """The LoRA scale that multiplies the update."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def require_adaptable(model: nn.Module, layers: Sequence[str], lora: LoraConfig) -> None:
    """Raise `DitLoraError` that lists all layers an adapter kind cannot adapt, and patterns that match no layer."""
    unfit = [
        f"{name}: {reason}"
        for name in layers
        if (reason := _find_unsupported_reason(model.get_submodule(name), lora.kind))
    ]
    if unfit:
        message = f"lora.kind: {lora.kind} cannot adapt these layers of {type(model).__name__}"
        raise DitLoraError(format_list(message, unfit))
    unused = []
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, option):
            reason = find_unbounded_regex_reason(pattern)
            if reason:  # the saved adapter's config would be refused when it is read
                raise DitLoraError(f"{pattern!r} {reason}")
            # PEFT returns the name itself if no pattern matches; but a pattern may be equal to the name.
            if not any(get_pattern_key([pattern], name) == pattern for name in layers):
                unused.append(f"lora.{option}: {pattern}")
    if unused:
        raise DitLoraError(format_list("these patterns match no adapted layer", unused))


def set_dora_magnitudes(model: nn.Module, adapter: str) -> None:
    """Set DoRA's magnitudes to the norms of the weight's rows in fp32.

    With fp32 adapters the forward pass computes these norms in fp32. PEFT initializes the magnitudes in the dtype of
    the base: with bf16 weights each row would start up to 0.4 % off its base.
    """
    for module in model.modules():
        if not isinstance(module, LoraLayer) or adapter not in module.lora_magnitude_vector:
            continue
        # The layer without its adapters.
        base: Any = module.get_base_layer()
        trained: Any = module.lora_magnitude_vector[adapter]
        if not base.weight.is_meta:
            # (outputs,): the norm of each row.
            norms = torch.linalg.vector_norm(base.weight.detach().float().flatten(1), dim=1)
            trained.weight.data.copy_(norms.reshape(trained.weight.shape))


def _find_unsupported_reason(layer: nn.Module, kind: AdapterKind) -> str | None:
    """Why a layer cannot have an adapter of this kind; None if it can."""
    if kind == "oft" and not isinstance(layer, nn.Linear):
        return "a convolution, whose windows overlap once rotated"
    # Kinds without an entry need neither the layer's weight nor its shape.
    if isinstance(layer, QuantizedLinear) and layer.kind in _UNSUPPORTED_QUANTIZATIONS.get(kind, ()):
        return f"quantised to {layer.kind}, and {kind} is computed from the weight itself"
    weight: Any = layer.weight
    if kind == "dora" and not weight.is_meta:
        zero = int((~weight.detach().flatten(1).any(dim=1)).sum())
        if zero:  # a layer that is initialized with zeros: the first step would divide 0 by 0
            return f"{zero} of its {len(weight)} rows are zero, and dora divides by their lengths"
    return None
