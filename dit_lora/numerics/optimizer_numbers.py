"""An optimizer's state that is no tensor: bitsandbytes' and Prodigy's step counts, Prodigy's estimate."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from dit_lora.config.optimizers import of_all


def group_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that an optimizer keeps in a parameter group; most keep none."""
    names = of_all(lambda record: record.group_numbers)
    return {name: group[name] for name in names if name in group}


def as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    """A number as a 0-dim int64 or float64 tensor on the CPU; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def is_number(tensor: torch.Tensor) -> bool:
    """Return true for a dtype that `as_tensor` makes; optimizers keep fp32 or uint8 tensors, as weights are fp32."""
    return tensor.ndim == 0 and tensor.dtype in (torch.int64, torch.float64)


def put_back(
    holder: MutableMapping[str, Any], prefix: str, state: Mapping[str, torch.Tensor]
) -> None:
    """Write `<prefix>/<name>` of the state over each number of the holder; its tensors are left alone."""
    for name, value in holder.items():
        if not isinstance(value, torch.Tensor) and f"{prefix}/{name}" in state:
            holder[name] = state[f"{prefix}/{name}"].item()
