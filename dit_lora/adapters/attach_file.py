"""Attach the LoRA of a file to a frozen model to continue training it, with the file's rank, alpha and layers."""

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
    """Attach the file's matrices in fp32 to the layers that the file has. `lora` gives the dropout.

    Raises `DitLoraError` if `lora` has a rank, alpha or targets that differ from the file's, and for layers that share
    their weight with another module.
    """
    require_consistent(model, stored, lora)
    require_untied(model, stored.layers)
    # A short target such as `to_q` is preferred to the names of all layers; the first that is exact is used.
    hints = [(stored.config or {}).get("target_modules"), lora.targets, tuple(default_targets)]
    targets = exact_targets(list(stored.layers), adaptable_layers(model), hints)
    report = add_adapter(model, peft_config(stored.layers, targets, lora.dropout), seed=seed)
    # Replaces the random initial values.
    put_matrices(model, stored.layers, ADAPTER_NAME)
    return report


def require_consistent(model: nn.Module, stored: LoraFile, lora: LoraConfig) -> None:
    """Raise `DitLoraError` if a recipe gives a rank, alpha or targets that differ from those of its LoRA file."""
    where = (
        f"{stored.file.name}; leave it out, or give null: rank, alpha and targets are the file's"
    )
    for name, option, stored_values in (
        ("rank", lora.rank, {layer.rank for layer in stored.layers.values()}),
        ("alpha", lora.alpha, {layer.alpha for layer in stored.layers.values()}),
    ):
        # None: the recipe leaves the value to the file.
        if option is not None and stored_values != {option}:
            has = " and ".join(f"{value:g}" for value in sorted(stored_values))
            raise DitLoraError(f"lora.{name}: {option} is given, and {has} is in {where}")
    if lora.targets is None:
        return
    # The layers that the recipe would adapt without a file.
    targeted = set(matched(adaptable_layers(model), lora.targets))
    differing = [f"{name}: not in the file" for name in sorted(targeted - stored.layers.keys())]
    differing += [f"{name}: not in lora.targets" for name in stored.layers if name not in targeted]
    if differing:
        raise DitLoraError(listed(f"lora.targets: not the layers of {where}", differing))


def peft_config(
    layers: Mapping[str, StoredLayer], targets: str | list[str], dropout: float = 0.0
) -> peft.LoraConfig:
    """Build PEFT's config for these layers: the most common rank and alpha, and patterns for layers that differ."""
    # Two dictionaries by layer name.
    ranks, alphas = (
        {name: getattr(layer, key) for name, layer in layers.items()} for key in ("rank", "alpha")
    )
    rank, alpha = _usual(ranks), _usual(alphas)
    return peft.LoraConfig(
        r=int(rank),
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float where the file's is
        lora_dropout=dropout,
        target_modules=targets,
        rank_pattern={_exactly(name): value for name, value in ranks.items() if value != rank},
        alpha_pattern={_exactly(name): value for name, value in alphas.items() if value != alpha},
        init_lora_weights=True,
    )


@torch.no_grad()
def put_matrices(model: Any, layers: Mapping[str, StoredLayer], adapter: str) -> None:
    """Copy a file's matrices into an attached adapter, which must have these layers, ranks and scales."""
    for name, stored in layers.items():
        layer = model.get_submodule(name)
        scale = stored.alpha / stored.rank
        # PEFT matches patterns by their ends, so the pattern of another layer might have applied here.
        assert layer.r[adapter] == stored.rank, name
        assert math.isclose(layer.scaling[adapter], scale), name
        layer.lora_A[adapter].weight.copy_(stored.a)
        layer.lora_B[adapter].weight.copy_(stored.b)


def exact_targets(
    layers: Sequence[str], every: Sequence[str], hints: Sequence[Any] = ()
) -> str | list[str]:
    """Targets that PEFT matches to exactly these layers among `every`.

    The first of `hints` that does so is used, such as the file's own `target_modules`; else the names of all layers.
    """
    for hint in hints:
        if not hint:
            continue
        targets = hint if isinstance(hint, str) else sorted(hint)
        if set(matched(every, targets)) == set(layers):
            return targets
    # Each name must not also be the end of another layer's name.
    if set(matched(every, layers)) == set(layers):
        return list(layers)
    # A string is matched against whole names, so the expression is exact.
    return "|".join(re.escape(name) for name in layers)


def _usual(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]


def _exactly(name: str) -> str:
    """A pattern that matches this layer only. PEFT searches for its keys at the ends of names."""
    return f"^{re.escape(name)}"
