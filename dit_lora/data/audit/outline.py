"""Outlines of pictures: which way edges run where, and which colours are where. An edit of a picture keeps one of the two.

Shapes: C cells along a side, A angles, G areas along a side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dit_lora.data.media.opened import own_jpeg

ALIKE, UNLIKE = 0.2, 0.07
"""Likeness from which on a picture is surely made from another one in place, and below which it hardly is.

Of 65 photographs, textures and drawings, 315 pairs of two had 0.01 in the middle; 96% of them were below the first and 74% below
the second. Of 1,286 pictures beside what was made of them, 4 were below the second: in other colours or light, as drawings,
edges or mosaics, with an object moved or added (docs/edit_data.md).
"""

_SIDE, _CELLS, _ANGLES, _AREAS = 48, 8, 8, 4
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
# Standard deviation of a picture's levels, below which its edges are noise.
_FAINT = 3.0
# Levels within which two areas have one colour.
_SAME = 4
# Levels of luma in a cell of a thumbnail. Of the same pictures' copies as JPEG at 85, and at half or twice the size, 182 of 195
# are found; of 260 that have an object of a twentieth of the side added, or 1.03 to 1.08 of their light, 3 are taken for copies.
_COPIED, _CELL = 4.0, 4
# Part by which the sides of small pictures of one shape may be rounded.
_ROUNDED = 0.03


@dataclass(frozen=True)
class Outline:
    """Outline of one picture."""

    edges: np.ndarray
    """Strength of the edges in each cell by angle, less its mean over the cells, int8 (C, C, A); 0 if it is faint."""
    colours: np.ndarray
    """Mean colours of the areas, uint8 (G, G, 3)."""

    @classmethod
    def of(cls, picture: np.ndarray) -> "Outline":
        """Return the outline of a picture, uint8 (H, W, 3)."""
        small = Image.fromarray(picture).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        levels, area = np.asarray(small, np.float32), _SIDE // _AREAS
        colours = levels.reshape(_AREAS, area, _AREAS, area, 3).mean((1, 3)).round()
        return cls(_edges(levels @ _LUMA), colours.astype(np.uint8))

    @property
    def text(self) -> str:
        """Hexadecimal text of the edges and the colours."""
        return (self.edges.tobytes() + self.colours.tobytes()).hex()

    @classmethod
    def parse(cls, text: str) -> "Outline":
        data, length = bytes.fromhex(text), _CELLS * _CELLS * _ANGLES
        edges = np.frombuffer(data[:length], np.int8).reshape(_CELLS, _CELLS, _ANGLES)
        return cls(edges, np.frombuffer(data[length:], np.uint8).reshape(_AREAS, _AREAS, 3))

    def likeness(self, other: "Outline") -> float | None:
        """Return the correlation of the edges, or the share of areas of one colour if that is more.

        None if one picture is faint, and no colour stayed.
        """
        difference = np.abs(self.colours.astype(int) - other.colours).max(-1)
        stayed = float((difference <= _SAME).mean())
        one, two = self.edges.astype(float).ravel(), other.edges.astype(float).ravel()
        size = np.sqrt((one @ one) * (two @ two))
        if not size:
            return stayed or None
        return max(stayed, float(one @ two / size))


def likeness(target: Sequence[str], reference: Sequence[str]) -> float | None:
    """Return how alike a sample and its reference are, from the texts of their outlines, one or those of several frames.

    It is about 0 for two pictures and 1 for equal ones; None where it cannot be told.
    """
    own, others = (
        [Outline.parse(text) for text in target],
        [Outline.parse(text) for text in reference],
    )
    if len(own) > 1 < len(others):
        found = [one.likeness(other) for one, other in zip(own, others, strict=False)]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None
    # A clip may come to its reference's picture at any time; of a video, a picture's reference is the first frame.
    return max(
        (value for one in own if (value := one.likeness(others[0])) is not None), default=None
    )


def looks_copied(picture: bytes, other: bytes) -> bool:
    """Return True if two thumbnails (JPEG) are of one picture, stored twice."""
    pictures = [own_jpeg(data) for data in (picture, other)]
    small, large = sorted(pictures, key=lambda image: image.size)
    # A thumbnail is no larger than its picture.
    if abs(large.width * small.height / (large.height * small.width) - 1) > _ROUNDED:
        return False
    one, two = np.asarray(small), np.asarray(large.resize(small.size, Image.Resampling.BOX))
    rows, columns = (length // _CELL * _CELL for length in one.shape[:2])
    difference = (one.astype(np.float32) - two)[:rows, :columns]
    cells = (difference @ _LUMA).reshape(rows // _CELL, _CELL, -1, _CELL).mean((1, 3))
    if np.abs(cells).max(initial=0) > _COPIED:
        return False
    # JPEG keeps colours coarsely, so they are compared over large areas.
    colours = [Outline.of(levels).colours.astype(int) for levels in (one, two)]
    return bool(np.abs(colours[0] - colours[1]).max() <= _COPIED / 2)


def _edges(luma: np.ndarray) -> np.ndarray:
    if luma.std() < _FAINT:
        return np.zeros((_CELLS, _CELLS, _ANGLES), np.int8)
    down, right = np.gradient(luma)
    strength = np.hypot(right, down)
    # An edge and its negative are one.
    turn = np.arctan2(down, right) % np.pi / np.pi * _ANGLES
    angle, share = np.floor(turn).astype(int), turn % 1
    row, column = np.mgrid[:_SIDE, :_SIDE] // (_SIDE // _CELLS)
    cell = (row * _CELLS + column) * _ANGLES
    found = np.zeros(_CELLS * _CELLS * _ANGLES)
    for near, weight in ((angle, 1 - share), (angle + 1, share)):
        place = (cell + near % _ANGLES).ravel()
        found += np.bincount(place, (weight * strength).ravel(), len(found))
    # Roots keep one strong edge from outweighing all others.
    cells = np.sqrt(found).reshape(_CELLS, _CELLS, _ANGLES)
    cells -= cells.mean((0, 1))
    return (cells / max(float(np.abs(cells).max()), 1e-6) * 127).round().astype(np.int8)
