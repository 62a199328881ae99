"""Orientation in which a video's frames are to be shown, read from the display matrix."""

import math
from typing import Any, NamedTuple

import av
import numpy as np


class Orientation(NamedTuple):
    """Mirror left to right first, then turn counter-clockwise."""

    is_mirrored: bool = False
    quarter_turns: int = 0
    """Quarter turns counter-clockwise, 0 to 3."""

    @classmethod
    def from_frame(cls, frame: av.VideoFrame) -> "Orientation":
        """Read a frame's display matrix, which the container or the codec may give.

        Its rows (a, b, .), (c, d, .) map a pixel (x, y) to (a x + c y, b x + d y), y downwards (ISO 14496-12, 8.3.2; FFmpeg's
        `libavutil/display.h`). Angles between quarter turns are rounded, as players do.
        """
        side_data: Any = frame.side_data  # PyAV's stub does not know this kind
        data = side_data.get("DISPLAYMATRIX")
        if data is None:
            return cls()
        a, b, _, c, d, *_ = np.frombuffer(data, np.int32).tolist()
        is_mirrored = a * d - b * c < 0
        # The first column of a mirrored matrix is that of the turned x axis, reversed.
        across, down = (-a, -b) if is_mirrored else (a, b)
        return cls(is_mirrored, round(math.atan2(-down, across) / (math.pi / 2)) % 4)

    @property
    def is_on_its_side(self) -> bool:
        """True if height and width change places."""
        return self.quarter_turns % 2 == 1

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """Turn a stored picture, (H, W, ...), as it is to be shown. The result is contiguous."""
        if self.is_mirrored:
            picture = picture[:, ::-1]
        return np.ascontiguousarray(np.rot90(picture, self.quarter_turns))
