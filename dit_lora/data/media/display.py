"""Orientation in which a video's frames are shown, from the display matrix."""

import math
from typing import Any, NamedTuple

import av
import numpy as np


class Orientation(NamedTuple):
    """How to turn a stored picture upright: mirror it left to right first, then rotate it counter-clockwise."""

    is_mirrored: bool = False
    quarter_turns: int = 0
    """Number of counter-clockwise quarter turns, 0 to 3."""

    @classmethod
    def from_frame(cls, frame: av.VideoFrame) -> "Orientation":
        """Read a frame's display matrix, which may come from the container or the codec.

        Its rows (a, b, .), (c, d, .) map a pixel (x, y) to (a x + c y, b x + d y), with y downwards (ISO 14496-12,
        8.3.2; FFmpeg's `libavutil/display.h`). Angles between quarter turns are rounded, as players do.
        """
        # PyAV's stub does not know this kind of side data.
        side_data: Any = frame.side_data
        data = side_data.get("DISPLAYMATRIX")
        if data is None:
            return cls()
        a, b, _, c, d, *_ = np.frombuffer(data, np.int32).tolist()
        is_mirrored = a * d - b * c < 0
        # In a mirrored matrix, the image of the x axis is reversed.
        across, down = (-a, -b) if is_mirrored else (a, b)
        return cls(is_mirrored, round(math.atan2(-down, across) / (math.pi / 2)) % 4)

    @property
    def swaps_height_and_width(self) -> bool:
        """True if turning a stored picture upright swaps its height and width."""
        return self.quarter_turns % 2 == 1

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """Turn a stored picture, (H, W, ...), upright. The result is contiguous."""
        if self.is_mirrored:
            # Mirroring comes before the rotation, since the two do not commute.
            picture = picture[:, ::-1]
        return np.ascontiguousarray(np.rot90(picture, self.quarter_turns))
