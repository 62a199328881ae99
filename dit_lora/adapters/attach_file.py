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
    add_adapter,
    find_adaptable_layers,
    match_target_names,
    require_untied_layers,
)
from dit_lora.adapters.lora_file import LoraFile, StoredLayer
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError, format_list


def attach_lora_file(
    model: nn.Module, lora_file: LoraFile, lora: LoraConfig, default_targets: Sequence[str], *, seed: int
) -> AttachReport:
    """Attach the matrices of a LoRA file in fp32 to the layers that it has. Only the dropout comes from `lora`.

    Raises `DitLoraError` if `lora` has a rank, alpha or targets that differ from the file's, and for layers that share
    their weight with another module.
    """
    require_recipe_matches_lora(model, lora_file, lora)
    require_untied_layers(model, lora_file.layers)
    # A short target such as `to_q` is preferred to the names of all layers; the first that is exact is used.
    hints = [(lora_file.config or {}).get("target_modules"), lora.targets, tuple(default_targets)]
    targets = build_exact_targets(list(lora_file.layers), find_adaptable_layers(model), hints)
    report = add_adapter(model, build_peft_config(lora_file.layers, targets, lora.dropout), seed=seed)
    # Replaces the random initial values.
    copy_matrices(model, lora_file.layers, ADAPTER_NAME)
    return report


def require_recipe_matches_lora(model: nn.Module, lora_file: LoraFile, lora: LoraConfig) -> None:
    """Raise `DitLoraError` if a recipe gives a rank, alpha or targets that differ from those of its LoRA file."""
    where = f"{lora_file.file.name}; remove it or set it to null, because rank, alpha and targets come from the file"
    for name, option, stored_values in (
        ("rank", lora.rank, {layer.rank for layer in lora_file.layers.values()}),
        ("alpha", lora.alpha, {layer.alpha for layer in lora_file.layers.values()}),
    ):
        # None: the recipe leaves the value to the file.
        if option is not None and stored_values != {option}:
            has = " and ".join(f"{value:g}" for value in sorted(stored_values))
            raise DitLoraError(f"lora.{name}: {option} is given, and {has} is in {where}")
    if lora.targets is None:
        return
    # The layers that the recipe would adapt without a file.
    targeted = set(match_target_names(find_adaptable_layers(model), lora.targets))
    differing = [f"{name}: not in the file" for name in sorted(targeted - lora_file.layers.keys())]
    differing += [f"{name}: not in lora.targets" for name in lora_file.layers if name not in targeted]
    if differing:
        raise DitLoraError(format_list(f"lora.targets: not the layers of {where}", differing))


def build_peft_config(
    layers: Mapping[str, StoredLayer], targets: str | list[str], dropout: float = 0.0
) -> peft.LoraConfig:
    """Build PEFT's `LoraConfig` for the layers of a LoRA file, with patterns for layers of another rank or alpha."""
    # Two dictionaries by layer name.
    ranks, alphas = ({name: getattr(layer, key) for name, layer in layers.items()} for key in ("rank", "alpha"))
    rank, alpha = _find_most_common(ranks), _find_most_common(alphas)
    return peft.LoraConfig(
        r=int(rank),
        lora_alpha=alpha,  # type: ignore[arg-type]  # a float where the file's is
        lora_dropout=dropout,
        target_modules=targets,
        rank_pattern={_build_exact_pattern(name): value for name, value in ranks.items() if value != rank},
        alpha_pattern={_build_exact_pattern(name): value for name, value in alphas.items() if value != alpha},
        init_lora_weights=True,
    )


@torch.no_grad()
def copy_matrices(model: Any, layers: Mapping[str, StoredLayer], adapter: str) -> None:
    """Copy a LoRA file's matrices into an attached adapter, which must have the same layers, ranks and scales."""
    for name, stored in layers.items():
        layer = model.get_submodule(name)
        scale = stored.alpha / stored.rank
        # PEFT matches patterns by their ends, so the pattern of another layer might have applied here.
        assert layer.r[adapter] == stored.rank, name
        assert math.isclose(layer.scaling[adapter], scale), name
        layer.lora_A[adapter].weight.copy_(stored.a)
        layer.lora_B[adapter].weight.copy_(stored.b)


def build_exact_targets(
    layers: Sequence[str], all_layers: Sequence[str], hints: Sequence[Any] = ()
) -> str | list[str]:
    """Build a `target_modules` value that PEFT matches to exactly these layers among `all_layers`.

    The first of `hints` that does so is used, such as the file's own `target_modules`; else the names of all layers.
    """
    for hint in hints:
        if not hint:
            continue
        targets = hint if isinstance(hint, str) else sorted(hint)
        if set(match_target_names(all_layers, targets)) == set(layers):
            return targets
    # Each name must not also be the end of another layer's name.
    if set(match_target_names(all_layers, layers)) == set(layers):
        return list(layers)
    # A string is matched against whole names, so the expression is exact.
    return "|".join(re.escape(name) for name in layers)


def _find_most_common(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]


def _build_exact_pattern(name: str) -> str:
    """A key for PEFT's `rank_pattern` or `alpha_pattern` that matches one layer only.

    PEFT searches for these keys at the ends of names.
    """
    return f"^{re.escape(name)}"
