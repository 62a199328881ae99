"""Attach the LoRA of a file to a frozen model, to train it on: rank, alpha and layers are the file's."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import peft
import torch
from torch import nn

from dit_lora.adapters.attach import (
    ADAPTER_NAME,
    AttachReport,
    adaptable_layers,
    add_adapter,
    matched,
    require_untied,
)
from dit_lora.adapters.lora_file import LoraFile, StoredLayer
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError, listed


def attach_lora_file(
    model: nn.Module,
    stored: LoraFile,
    lora: LoraConfig,
    default_targets: Sequence[str],
    *,
    seed: int,
) -> AttachReport:
    """Add the file's fp32 matrices to the layers that it has; `lora` gives the dropout.

    Raises `DitLoraError` where `lora` has a rank, alpha or targets that are not the file's, and for layers whose
    weight another module shares.
    """
    require_consistent(model, stored, lora)
    require_untied(model, stored.layers)
    hints = [(stored.config or {}).get("target_modules"), lora.targets, tuple(default_targets)]
    targets = exact_targets(list(stored.layers), adaptable_layers(model), hints)
    report = add_adapter(model, peft_config(stored.layers, targets, lora.dropout), seed=seed)
    put_matrices(model, stored.layers, ADAPTER_NAME)
    return report


def require_consistent(model: nn.Module, stored: LoraFile, lora: LoraConfig) -> None:
    """Raise `DitLoraError` if a recipe gives rank, alpha or targets beside a file, and the file has others."""
    where = (
        f"{stored.file.name}; leave it out, or give null: rank, alpha and targets are the file's"
    )
    for name, given, found in (
        ("rank", lora.rank, {layer.rank for layer in stored.layers.values()}),
        ("alpha", lora.alpha, {layer.alpha for layer in stored.layers.values()}),
    ):
        if given is not None and found != {given}:
            has = " and ".join(f"{one:g}" for one in sorted(found))
            raise DitLoraError(f"lora.{name}: {given} is given, and {has} is in {where}")
    if lora.targets is None:
        return
    asked = set(matched(adaptable_layers(model), lora.targets))
    differing = [f"{name}: not in the file" for name in sorted(asked - stored.layers.keys())]
    differing += [f"{name}: not in lora.targets" for name in stored.layers if name not in asked]
    if differing:
        raise DitLoraError(listed(f"lora.targets: not the layers of {where}", differing))


def peft_config(
    layers: Mapping[str, StoredLayer], targets: str | list[str], dropout: float = 0.0
) -> peft.LoraConfig:
    """Return PEFT's config of these layers: the usual rank and alpha, and by name those of layers that differ."""
    ranks, alphas = (
        {name: getattr(layer, key) for name, layer in layers.items()} for key in ("rank", "alpha")
    )
    rank, alpha = _usual(ranks), _usual(alphas)
    return peft.LoraConfig(
        r=int(rank),
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float where the file's is
        lora_dropout=dropout,
        target_modules=targets,
        rank_pattern={_exactly(name): one for name, one in ranks.items() if one != rank},
        alpha_pattern={_exactly(name): one for name, one in alphas.items() if one != alpha},
        init_lora_weights=True,
    )


@torch.no_grad()
def put_matrices(model: Any, layers: Mapping[str, StoredLayer], adapter: str) -> None:
    """Copy a file's matrices into an attached adapter, which must have these layers, ranks and scales."""
    for name, stored in layers.items():
        layer = model.get_submodule(name)
        scale = stored.alpha / stored.rank
        # PEFT matches patterns by their ends: another layer's would be seen here.
        assert layer.r[adapter] == stored.rank, name
        assert math.isclose(layer.scaling[adapter], scale), name
        layer.lora_A[adapter].weight.copy_(stored.a)
        layer.lora_B[adapter].weight.copy_(stored.b)


def exact_targets(
    layers: Sequence[str], every: Sequence[str], hints: Sequence[Any] = ()
) -> str | list[str]:
    """Return what PEFT matches exactly these layers by, of `every`: a hint's own words if they do, else all names."""
    for hint in hints:
        if not hint:
            continue
        words = hint if isinstance(hint, str) else sorted(hint)
        if set(matched(every, words)) == set(layers):
            return words
    if set(matched(every, layers)) == set(layers):
        return list(layers)
    return "|".join(re.escape(name) for name in layers)


def _usual(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]


def _exactly(name: str) -> str:
    """Return the pattern of one layer alone, for PEFT, which looks for its keys at the ends of names."""
    return f"^{re.escape(name)}"
