"""Compares pictures by edge directions and colours, area by area. An edited picture keeps at least one of them.

Shapes: C cells along a side, A angles, G areas along a side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dit_lora.data.audit.measure import LUMA_WEIGHTS
from dit_lora.data.media.opened import decode_jpeg

ALIKE, UNLIKE = 0.2, 0.07
"""Likeness from which on a picture is certainly an edit of another, and below which it hardly is.

315 pairs of unrelated pictures, from 65 photographs, textures and drawings, had a median of 0.01; 96% of them were
below the first limit and 74% below the second. Of 1,286 edited pictures compared with their originals, 4 were below
the second: edits of colours or light, drawings, edges, mosaics, an object moved or added (docs/edit_data.md).
"""

_SIDE, _CELLS, _ANGLES, _AREAS = 48, 8, 8, 4
# Standard deviation of a picture's levels below which its edges are only noise.
_MIN_CONTRAST = 3.0
# Maximum difference, in levels, of two areas of the same colour.
_MAX_COLOUR_DIFFERENCE = 4
# Maximum luma difference of a copy in any cell of a thumbnail, and the cell's side in pixels. Of copies as JPEG at 85,
# at half or twice the size, 182 of 195 are found. Of 260 pictures with an object of a twentieth of the side added, or
# at 1.03 to 1.08 of their brightness, 3 are taken for copies.
_COPIED, _CELL = 4.0, 4
# Relative difference of aspect ratios that rounding may cause in small pictures.
_ASPECT_TOLERANCE = 0.03


@dataclass(frozen=True)
class PictureOutline:
    """Coarse description of one picture's edges and colours, for comparing pictures."""

    edges: np.ndarray
    """Edge strength by cell and angle, minus the mean over the cells, int8 (C, C, A); 0 for a faint picture."""
    colours: np.ndarray
    """Mean colours of the areas, uint8 (G, G, 3)."""

    @classmethod
    def from_picture(cls, picture: np.ndarray) -> "PictureOutline":
        """Compute the edges and colours of a picture, uint8 (H, W, 3)."""
        small = Image.fromarray(picture).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        levels, area = np.asarray(small, np.float32), _SIDE // _AREAS
        # (48, 48, 3) to the mean of 4 x 4 areas, (4, 4, 3).
        colours = levels.reshape(_AREAS, area, _AREAS, area, 3).mean((1, 3)).round()
        return cls(_compute_edges(levels @ LUMA_WEIGHTS), colours.astype(np.uint8))

    @property
    def text(self) -> str:
        """A picture's edges and colours as hexadecimal text."""
        return (self.edges.tobytes() + self.colours.tobytes()).hex()

    @classmethod
    def from_text(cls, text: str) -> "PictureOutline":
        """Read a picture's edges and colours from the hexadecimal text that `text` gives."""
        # The edges come first, one byte for each cell and angle; the colours follow.
        data, length = bytes.fromhex(text), _CELLS * _CELLS * _ANGLES
        edges = np.frombuffer(data[:length], np.int8).reshape(_CELLS, _CELLS, _ANGLES)
        return cls(edges, np.frombuffer(data[length:], np.uint8).reshape(_AREAS, _AREAS, 3))

    def compute_picture_similarity(self, reference: "PictureOutline") -> float | None:
        """Likeness of two pictures: correlation of edges, or the share of areas with equal colour if that is larger.

        None if a picture is faint and no area has the same colour.
        """
        difference = np.abs(self.colours.astype(int) - reference.colours).max(-1)
        # Share of areas whose colour is nearly the same, for edits that redraw the edges.
        stayed = float((difference <= _MAX_COLOUR_DIFFERENCE).mean())
        edges, other_edges = self.edges.astype(float).ravel(), reference.edges.astype(float).ravel()
        # 0 if a picture is faint: then only its colours can be compared.
        size = np.sqrt((edges @ edges) * (other_edges @ other_edges))
        if not size:
            return stayed or None
        return max(stayed, float(edges @ other_edges / size))


def compare_outlines(target_texts: Sequence[str], reference_texts: Sequence[str]) -> float | None:
    """Likeness of a sample and its reference, from the texts of their outlines; videos have several outlines.

    About 0 for unrelated pictures and 1 for equal ones; None if it cannot be determined.
    """
    targets = [PictureOutline.from_text(text) for text in target_texts]
    references = [PictureOutline.from_text(text) for text in reference_texts]
    if len(targets) > 1 < len(references):
        values = [a.compute_picture_similarity(b) for a, b in zip(targets, references, strict=False)]
        comparable = [value for value in values if value is not None]
        return sum(comparable) / len(comparable) if comparable else None
    # A clip may show its reference picture at any time, so the best frame counts. A picture is compared with the first
    # frame of a reference video.
    return max(
        (value for outline in targets if (value := outline.compute_picture_similarity(references[0])) is not None),
        default=None,
    )


def is_same_picture(thumbnail: bytes, other_thumbnail: bytes) -> bool:
    """True if two JPEG thumbnails show the same picture, stored twice."""
    pictures = [decode_jpeg(data) for data in (thumbnail, other_thumbnail)]
    small, large = sorted(pictures, key=lambda image: image.size)
    # Thumbnails are never enlarged, so the smaller one may come from a smaller picture: compare at its size.
    if abs(large.width * small.height / (large.height * small.width) - 1) > _ASPECT_TOLERANCE:
        return False
    small_pixels, large_pixels = np.asarray(small), np.asarray(large.resize(small.size, Image.Resampling.BOX))
    rows, columns = (length // _CELL * _CELL for length in small_pixels.shape[:2])
    difference = (small_pixels.astype(np.float32) - large_pixels)[:rows, :columns]
    # (rows, columns, 3) to the mean luma difference of each 4 x 4 cell.
    cells = (difference @ LUMA_WEIGHTS).reshape(rows // _CELL, _CELL, -1, _CELL).mean((1, 3))
    if np.abs(cells).max(initial=0) > _COPIED:
        return False
    # JPEG stores colours at low resolution, so they are compared over large areas.
    colours = [PictureOutline.from_picture(levels).colours.astype(int) for levels in (small_pixels, large_pixels)]
    return bool(np.abs(colours[0] - colours[1]).max() <= _COPIED / 2)


def _compute_edges(luma: np.ndarray) -> np.ndarray:
    """Histogram of edge angles in each cell, int8 (C, C, A); 0 for a faint picture."""
    if luma.std() < _MIN_CONTRAST:
        return np.zeros((_CELLS, _CELLS, _ANGLES), np.int8)
    down, right = np.gradient(luma)
    strength = np.hypot(right, down)
    # An edge and its negative have the same angle, so angles are taken modulo 180 degrees.
    turn = np.arctan2(down, right) % np.pi / np.pi * _ANGLES
    # Each pixel's strength is shared between the two nearest angles.
    angle, share = np.floor(turn).astype(int), turn % 1
    # Row and column of each pixel's cell, (48, 48).
    row, column = np.mgrid[:_SIDE, :_SIDE] // (_SIDE // _CELLS)
    cell = (row * _CELLS + column) * _ANGLES
    histogram = np.zeros(_CELLS * _CELLS * _ANGLES)
    for nearest_angle, weight in ((angle, 1 - share), (angle + 1, share)):
        # The angle after the last one is the first one again.
        bin_index = (cell + nearest_angle % _ANGLES).ravel()
        histogram += np.bincount(bin_index, (weight * strength).ravel(), len(histogram))
    # The square root keeps one strong edge from dominating all others.
    cells = np.sqrt(histogram).reshape(_CELLS, _CELLS, _ANGLES)
    # Subtract the mean over the cells, so that only differences between parts of the picture count.
    cells -= cells.mean((0, 1))
    return (cells / max(float(np.abs(cells).max()), 1e-6) * 127).round().astype(np.int8)
