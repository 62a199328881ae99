"""The function of torchvision that Diffusers' Cosmos transformer calls, for machines without torchvision."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers import transformer_cosmos
from torch.nn import functional


def provide_mask_resize() -> None:
    """Give Diffusers' Cosmos transformer `transforms.functional.resize` if torchvision is not installed.

    transformer_cosmos.py imports torchvision only where it is installed, but its forward needs this function to bring
    the padding mask to the size of the latents; without it the forward ends with a NameError.
    """
    module: Any = transformer_cosmos
    if not hasattr(module, "transforms"):
        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=resize_mask), InterpolationMode=SimpleNamespace(NEAREST="nearest")
        )


def resize_mask(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    """Resize a mask (B, 1, H, W) to `size` by nearest neighbours, as `torchvision.transforms.functional.resize`."""
    return functional.interpolate(mask, size=size, mode=interpolation)
