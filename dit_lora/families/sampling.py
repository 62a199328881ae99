"""The settings that one sample is made with."""

from dataclasses import dataclass
from pathlib import Path

from dit_lora.config.data import VideoShape


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
