"""An optimizer's tensors by name: what is saved, snapshotted and put back."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors as `<group>/<parameter>/<name>`; learning rates follow from the step."""
    return {
        f"{prefix}/{name}": value
        for prefix, parameter in _named(optimizer).items()
        for name, value in optimizer.state[parameter].items()
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.Tensor]
) -> None:
    for prefix, parameter in _named(optimizer).items():
        names = [key.rpartition("/")[2] for key in stored if key.rpartition("/")[0] == prefix]
        optimizer.state[parameter] = {
            name: stored[f"{prefix}/{name}"].to(parameter.device) for name in names
        }


def drop_optimizer_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Forget tensors, named as `optimizer_state` names them: a parameter starts as on its first step."""
    for prefix, parameter in _named(optimizer).items():
        for name in list(optimizer.state.get(parameter, {})):
            if f"{prefix}/{name}" in names:
                del optimizer.state[parameter][name]
        if not optimizer.state.get(parameter, True):
            del optimizer.state[parameter]


def _named(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {
        f"{group['name']}/{name}": parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
