"""Perceptual signature of a clip: similar for clips that look the same in another codec, size or brightness.

Shapes: N pictures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRID_SIDE = 4
"""Number of areas along a side whose mean colours are compared."""

# Shares of a clip's length.
_MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Side of the picture that is hashed, in pixels.
_HASH_SIDE = 24
_NUM_BITS = 64

# Rows 0 to 7 of a DCT-II, (8, 24).
_DCT = np.cos(np.pi * np.arange(8)[:, None] * (2 * np.arange(_HASH_SIDE) + 1) / (2 * _HASH_SIDE))


@dataclass(frozen=True)
class MediaSignature:
    """Hashes and colours of five moments of a clip, or of one image, to find near duplicates."""

    hashes: np.ndarray
    """pHash of each moment, uint64 (moments,): which of the 64 lowest frequencies are above their median."""
    colours: np.ndarray
    """Mean colours of the areas, uint8 (moments, 4, 4, 3)."""

    @classmethod
    def from_pictures(cls, grey: np.ndarray, colours: np.ndarray, times: Sequence[float]) -> "MediaSignature":
        """Compute the hashes and colours from N frames: `grey` is uint8 (N, 24, 24), `colours` uint8 (N, 4, 4, 3).

        `times` are the starts of the N frames and the end of the clip, in seconds.
        """
        # Time of each picture's beginning; the last element of `times` is the end of the clip.
        starts = np.asarray(times[:-1])
        target_times = times[-1] * np.array(_MOMENTS) if len(grey) > 1 else np.zeros(1)
        # The last picture that began at or before each moment.
        chosen = np.clip(np.searchsorted(starts, target_times, side="right") - 1, 0, len(grey) - 1)
        return cls(np.array([_compute_phash(grey[k]) for k in chosen], np.uint64), colours[chosen])

    @property
    def text(self) -> str:
        """A clip's hashes and colours as hexadecimal text, separated by a colon."""
        # Always big-endian, since a memo may be read on another machine.
        return f"{self.hashes.astype('>u8').tobytes().hex()}:{self.colours.tobytes().hex()}"

    @classmethod
    def from_text(cls, text: str) -> "MediaSignature":
        """Read a clip's hashes and colours from the hexadecimal text that `text` gives."""
        hashes, colours = (bytes.fromhex(part) for part in text.split(":"))
        return cls(
            np.frombuffer(hashes, ">u8").astype(np.uint64),
            np.frombuffer(colours, np.uint8).reshape(-1, GRID_SIDE, GRID_SIDE, 3),
        )


def _compute_phash(grey: np.ndarray) -> int:
    """The pHash of one grey picture, (24, 24), as an integer of 64 bits."""
    # A two-dimensional DCT, (24, 24) to (8, 8), flattened to (64,).
    frequencies = (_DCT @ grey.astype(np.float64) @ _DCT.T).ravel()
    # The lowest frequency is the brightness, in which copies may differ.
    frequencies[0] = 0.0
    bits = frequencies > np.median(frequencies)
    return int(sum(1 << bit for bit in range(_NUM_BITS) if bits[bit]))
