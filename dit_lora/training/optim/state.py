"""An optimizer's state as tensors by name, for saving, snapshots and restoring."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from dit_lora.config.optimizers import collect_optimizer_names
from dit_lora.numerics.optimizer_numbers import (
    convert_to_tensor,
    is_scalar_tensor,
    read_group_numbers,
    restore_saved_scalars,
)

Tensors = Mapping[str, torch.Tensor]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as `<group>/<parameter>/<name>`; learning rates follow from the step.

    Python numbers are 0-dim int64 or float64 copies on the CPU, which `load_scalar_state` writes back; those of a
    group are `<group>/<name>`. Tables shared by all parameters appear once, as `<name>`.
    """
    state, shared = {}, _shared_state_names()
    holders: dict[str, Mapping[str, Any]] = {
        group["name"]: read_group_numbers(group) for group in optimizer.param_groups
    }
    for prefix, parameter in iterate_optimizer_parameters(optimizer.param_groups).items():
        # Empty for a parameter that has had no gradient yet.
        holders[prefix] = optimizer.state.get(parameter, {})
    for prefix, holder in holders.items():
        for name, value in holder.items():
            key = name if name in shared else f"{prefix}/{name}"
            state[key] = convert_to_tensor(value)
    return state


def load_scalar_state(optimizer: torch.optim.Optimizer, state: Tensors) -> None:
    """Write the optimizer's Python numbers (such as step counts) from a saved state back into it.

    The tensors of that state are live already.
    """
    for group in optimizer.param_groups:
        restore_saved_scalars(group, group["name"], state)
    for prefix, parameter in iterate_optimizer_parameters(optimizer.param_groups).items():
        if parameter in optimizer.state:
            restore_saved_scalars(optimizer.state[parameter], prefix, state)


def load_optimizer_state(optimizer: torch.optim.Optimizer, stored: Tensors) -> None:
    """Load a saved optimizer state into a new optimizer of the same kind and groups."""
    # Unwraps Accelerate's optimizer.
    inner_optimizer: Any = getattr(optimizer, "optimizer", optimizer)
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in stored.items():
        prefix, _, name = key.rpartition("/")
        by_parameter.setdefault(prefix, {})[name] = value
    # Shared tables have no prefix.
    tables = by_parameter.get("", {})
    for number, group in enumerate(inner_optimizer.param_groups):
        restore_saved_scalars(group, group["name"], stored)
        for index, (name, parameter) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            inner_optimizer.state.pop(parameter, None)
            values = by_parameter.get(f"{group['name']}/{name}")
            # The parameter had no gradient before the checkpoint.
            if values is None:
                continue
            if hasattr(inner_optimizer, "init_state"):
                # bitsandbytes allocates its buffers itself: they may be paged.
                inner_optimizer.init_state(group, parameter, number, index)
                values |= {n: tables[n] for n in _shared_state_names() if n in inner_optimizer.state[parameter]}
            _fill_optimizer_state(inner_optimizer.state[parameter], values, parameter.device)


def drop_optimizer_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Delete the optimizer state of these parameters, named as in `optimizer_state`; they start as on step 1."""
    # The name without its last part is the parameter's: `<group>/<parameter>`.
    owners = {name.rpartition("/")[0] for name in names}
    for prefix, parameter in iterate_optimizer_parameters(optimizer.param_groups).items():
        if prefix in owners:
            optimizer.state.pop(parameter, None)


def _shared_state_names() -> tuple[str, ...]:
    """Names of tensors that every parameter's state shares, such as bitsandbytes' 8-bit codes."""
    return collect_optimizer_names(lambda record: record.shared_state)


def _fill_optimizer_state(state: MutableMapping[str, Any], values: Tensors, device: torch.device) -> None:
    for name, value in values.items():
        # Into a tensor that the optimizer has allocated, else as a new tensor or a Python number.
        if isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.item() if is_scalar_tensor(value) else value.to(device, copy=True)


def iterate_optimizer_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, nn.Parameter]:
    """The parameters of an optimizer's groups as `<group>/<parameter>`, in order."""
    return {
        f"{group['name']}/{name}": parameter
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
