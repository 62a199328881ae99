"""Settings that one sample is made with, and what is made."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import Sound


@dataclass(frozen=True)
class Sampling:
    """The settings that one video is sampled with."""

    shape: VideoShape
    inference_steps: int
    guidance_scale: float
    seed: int
    image: Path | None = None
    """The first frame, for families that start from an image."""
    last_image: Path | None = None
    """The last frame, for those that are given one too."""
    references: tuple[Path, ...] = ()
    """The references, for families that take some."""
    fps: float | None = None
    """Frames a second, for families that are told them."""


@dataclass(frozen=True)
class Generated:
    """One sample that a pipeline made."""

    frames: torch.Tensor
    """uint8 (frames, height, width, 3)."""
    sound: Sound | None = None
