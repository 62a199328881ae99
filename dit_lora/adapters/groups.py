"""Parameter groups with their own learning rates: adapter, adapter_b, connector, backbone."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import is_frozen_adapter, is_lora_b
from dit_lora.config.optim import GroupConfig, GroupsConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.adapter_tensors import is_adapter_tensor

GroupPatterns = Mapping[str, Sequence[str]]


def parameter_groups(
    model: nn.Module,
    *,
    adapter: float | GroupConfig | None = None,
    adapter_b: float | GroupConfig | None = None,
    connector: float | GroupConfig | None = None,
    backbone: float | GroupConfig | None = None,
    patterns: GroupPatterns | None = None,
) -> list[dict[str, Any]]:
    """Build parameter groups for a torch optimizer: one per name given, with `params`, `param_names`, `name`, `lr`.

    A group is a learning rate or a `GroupConfig`. `adapter` holds the adapter's parameters (without LoRA's B if
    `adapter_b` is given). `connector` and `backbone` hold base weights, which are made trainable and fp32 here. Their
    patterns are `GroupConfig.modules` or come from `patterns` (`{"connector": ["patch_embed.*"]}`). Without either,
    `backbone` is every base weight that is not in the connector.

    Raises `DitLoraError` if a group matches nothing or if a trainable parameter is in no group.
    """
    configs = {
        name: group if isinstance(group, GroupConfig) else GroupConfig(lr=group)
        for name, group in (
            ("adapter", adapter),
            ("adapter_b", adapter_b),
            ("connector", connector),
            ("backbone", backbone),
        )
        if group is not None
    }
    if not configs:
        raise DitLoraError("parameter_groups: give at least one group, for instance adapter=1e-4")
    members = _assign_to_groups(model, configs, patterns or {})
    # All parameters, for the check of patterns and for the message.
    all_names = [name for name, _ in model.named_parameters()]
    empty = [name for name, names in members.items() if not names]
    # A pattern that matches nothing is most likely a typing error.
    empty += [
        f"{name} ({pattern})"
        for name, group in configs.items()
        for pattern in group.modules or ()
        if members[name] and not fnmatch.filter(all_names, pattern)
    ]
    if empty:
        message = f"these parameter groups match nothing: {', '.join(empty)}; the parameters are below"
        raise DitLoraError(format_list(message, sorted({f"{name.partition('.')[0]}.*" for name in all_names})))
    # Shared parameters occur once, under their first name.
    parameters = dict(model.named_parameters())
    # Before the check, which looks at all trainable parameters.
    for name in (*members.get("connector", ()), *members.get("backbone", ())):
        parameter = parameters[name]
        # AdamW loses small updates of weights in half precision.
        parameter.data = parameter.data.to(torch.float32)
        parameter.requires_grad_(True)
    # The optimizer would never update a parameter outside of all groups.
    grouped = {name for names in members.values() for name in names}
    left_out = [name for name, p in parameters.items() if p.requires_grad and name not in grouped]
    if left_out:
        raise DitLoraError(format_list("these trainable parameters are not in any parameter group", left_out))
    return [
        {
            "name": group,
            "params": [parameters[name] for name in names],
            "param_names": names,
            # A group without its own weight decay uses the optimizer's default.
            **configs[group].model_dump(include={"lr", "weight_decay"}, exclude_none=True),
        }
        for group, names in members.items()
    ]


def build_recipe_groups(
    model: nn.Module, groups: GroupsConfig, patterns: GroupPatterns, mode: str = "lora"
) -> list[dict[str, Any]]:
    """The `parameter_groups` of a recipe. In mode `full`, `backbone` is all weights that are not in the connector."""
    # Only groups that the recipe sets.
    configs: dict[str, Any] = groups.get_configured_groups()
    if mode == "lora":
        return parameter_groups(model, **configs, patterns=patterns)
    # `groups.adapter` is set by default, but mode `full` has no adapter.
    configs.pop("adapter", None)
    connector_patterns = {"connector": patterns["connector"]} if groups.connector else {}
    return parameter_groups(model, **configs, patterns=connector_patterns)


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of trainable parameters, to append to the line of a run's log that says what trains."""
    counts = {group["name"]: sum(parameter.numel() for parameter in group["params"]) for group in groups}
    if len(counts) == 1:
        return f", {sum(counts.values()):,} trainable parameters in fp32"
    return f"; trained parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}"


def find_base_members(model: nn.Module, groups: GroupsConfig, patterns: GroupPatterns) -> set[str]:
    """Names of the base weights that a recipe's groups `connector` and `backbone` would train."""
    members = _assign_to_groups(model, groups.get_configured_groups(), patterns)
    return {*members.get("connector", ()), *members.get("backbone", ())}


def get_base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of the base model, by their names in a model without adapters."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_adapter_tensor(name)
    }


def _assign_to_groups(
    model: nn.Module, configs: Mapping[str, GroupConfig], patterns: GroupPatterns
) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {name: [] for name in configs}
    for name, parameter in model.named_parameters():
        # Frozen adapters of `lora.under` are in no group.
        if is_frozen_adapter(name):
            continue
        # B belongs to `adapter` unless the recipe gives it a separate group.
        if is_lora_b(name):
            group = "adapter_b" if "adapter_b" in configs else "adapter"
        elif is_adapter_tensor(name):
            group = "adapter"
        else:
            group = _find_group_of_base_weight(name, parameter, configs, patterns) or ""
        if group in members:
            members[group].append(name)
    return members


def _find_group_of_base_weight(
    name: str, parameter: nn.Parameter, configs: Mapping[str, GroupConfig], patterns: GroupPatterns
) -> str | None:
    # A quantized weight cannot be trained.
    if not parameter.dtype.is_floating_point:
        return None
    for group in ("connector", "backbone"):
        # The connector comes first, because a backbone without patterns takes all remaining weights.
        modules = configs[group].modules if group in configs else None
        group_patterns = modules or patterns.get(group)
        # All base weights that are not in the connector.
        if group_patterns is None and group == "backbone" and group in configs:
            return group
        if group_patterns and any(fnmatch.fnmatchcase(name, pattern) for pattern in group_patterns):
            return group
    return None
