"""The settings of one generated sample."""

from dataclasses import dataclass
from pathlib import Path

from dit_lora.config.data import VideoShape


@dataclass(frozen=True)
class Sampling:
    """The settings of one generated video or image."""

    shape: VideoShape
    inference_steps: int
    guidance_scale: float
    seed: int
    image: Path | None = None
    """The first frame, for image-to-video families."""
    last_image: Path | None = None
    """The last frame, for families that also accept one."""
    references: tuple[Path, ...] = ()
    """The references, for families that accept them."""
    fps: float | None = None
    """Frames per second, for families that condition on it."""
