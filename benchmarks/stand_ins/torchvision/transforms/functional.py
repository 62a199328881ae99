"""Stand-in for torchvision.transforms.functional, for clips that have the wanted size."""

from collections.abc import Sequence
from typing import Any

import torch


def resize(frames: torch.Tensor, size: Sequence[int], interpolation: Any) -> torch.Tensor:
    """Leave `frames`, (F, 3, H, W), as they are. Raises `ValueError` if `size` is another height and width."""
    if list(frames.shape[-2:]) != list(size):
        raise ValueError(f"this stand-in does not resize from {list(frames.shape[-2:])} to {list(size)}")
    return frames


def crop(frames: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """Cut out a part, (F, 3, height, width)."""
    return frames[..., top : top + height, left : left + width]
