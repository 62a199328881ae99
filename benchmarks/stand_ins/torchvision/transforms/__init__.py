"""Stand-in for torchvision.transforms."""

from enum import Enum

from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]


class InterpolationMode(Enum):
    """The one mode that the script uses."""

    BICUBIC = "bicubic"
