"""Optimizer state that is not a tensor: bitsandbytes' and Prodigy's step counts, Prodigy's estimate."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from dit_lora.config.optimizers import collect_optimizer_names


def read_group_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that an optimizer keeps in a parameter group, by name; most optimizers keep none."""
    names = collect_optimizer_names(lambda record: record.group_numbers)
    return {name: group[name] for name in names if name in group}


def convert_to_tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Convert a Python number to a 0-dim int64 or float64 tensor on the CPU; a tensor is returned unchanged."""
    if isinstance(value, torch.Tensor):
        return value
    # 64 bits: a float of Python comes back with the same bits.
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def is_scalar_tensor(tensor: torch.Tensor) -> bool:
    """True for an int64 or float64 scalar, as `convert_to_tensor` makes; optimizers' own tensors are fp32 or uint8."""
    return tensor.ndim == 0 and tensor.dtype in (torch.int64, torch.float64)


def restore_saved_scalars(container: MutableMapping[str, Any], prefix: str, state: Mapping[str, torch.Tensor]) -> None:
    """Overwrite each number in a mapping with the tensor `<prefix>/<name>` of a saved state.

    Tensors stay unchanged.
    """
    for name, value in container.items():
        # Only values of existing keys change, so iterating over the mapping meanwhile is safe.
        if not isinstance(value, torch.Tensor) and f"{prefix}/{name}" in state:
            container[name] = state[f"{prefix}/{name}"].item()
