"""A judge of clips of the world: which shape, in which colour, moves how. It shares no code with the renderer.

Pixels with a hue are the shape, because backgrounds are grey. The hue gives the colour, the outline of the largest
frame is compared with templates drawn by Pillow, and the centres and areas over time give the motion.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

HUES = {"red": 0, "yellow": 55, "green": 130, "cyan": 183, "blue": 230, "magenta": 308}
"""Colours and their hues in degrees."""
_TEMPLATE = 48  # pixels of a template's side
_MIN_CHROMA = 55  # difference between the strongest and the weakest channel of a pixel that belongs to the shape
_MIN_AREA = 20  # pixels
_MAX_SHARE = 0.5  # of the picture
_MARGINS = (0, 2, 4)
"""Pixels of a template by which a shape's outline may be outside of where it should be: up to a 12th of its size."""
_MIN_OVERLAP = 0.62  # intersection over union with a template, below which a shape is "unclear"
_MIN_MARGIN = 0.02  # by which the best template must be better than the second
_RATIOS = {"moon": 1.16, "triangle": 0.87}
"""Height over width of shapes that are not as tall as wide."""
_MAX_STRETCH = 1.4  # times as tall or as wide as the shape should be


@dataclass(frozen=True)
class Judgement:
    """What is seen in a clip; "unclear" where nothing certain can be said."""

    shape: str
    colour: str
    motion: str


def judge_clip(video: np.ndarray) -> Judgement:
    """Judge a clip, uint8 (frames, height, width, 3)."""
    pixels = video.astype(np.float32)
    chroma = pixels.max(-1) - pixels.min(-1)
    # Video compression halves the resolution of colour, which leaves a weak hue around a shape.
    strongest = np.sort(chroma.reshape(len(chroma), -1), 1)[:, -_MIN_AREA]
    limits = np.maximum(_MIN_CHROMA, strongest / 2)[:, None, None]
    masks = _find_largest_regions(chroma > limits)
    areas = masks.sum((1, 2))
    if areas.min() < _MIN_AREA or areas.max() > _MAX_SHARE * chroma[0].size:
        return Judgement("unclear", "unclear", "unclear")
    # The three largest frames vote, because a shape that grows is too small to tell at first.
    largest = np.argsort(-areas, kind="stable")[:3]
    votes = [_match_shape(masks[frame]) for frame in largest]
    shape = max(votes, key=votes.count)  # of three different votes the largest frame's
    return Judgement(shape, _name_hue(pixels[largest[0]][masks[largest[0]]]), _name_motion(masks, areas))


def _find_largest_regions(masks: np.ndarray) -> np.ndarray:
    """The largest connected part of each mask, of (frames, height, width)."""
    labels = np.where(masks, np.arange(1, masks[0].size + 1, dtype=np.int32).reshape(masks[0].shape), 0)
    while True:
        # Each pixel takes the largest label of its neighbours until nothing changes.
        padded = np.pad(labels, ((0, 0), (1, 1), (1, 1)))
        spread = labels.copy()
        for neighbour in (padded[:, :-2, 1:-1], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2], padded[:, 1:-1, 2:]):
            np.maximum(spread, neighbour, out=spread)
        spread *= masks
        if np.array_equal(spread, labels):
            break
        labels = spread
    regions = np.zeros_like(masks)
    for region, mask, frame_labels in zip(regions, masks, labels, strict=True):
        counts = np.bincount(frame_labels.ravel())
        counts[0] = 0
        region[:] = (frame_labels == counts.argmax()) & mask
    return regions


def _match_shape(mask: np.ndarray) -> str:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
    cut = Image.fromarray(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    resized = np.asarray(cut.convert("L").resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)) > 127
    overlaps = sorted(
        (max((resized & template).sum() / (resized | template).sum() for template in templates), name)
        for name, templates in draw_templates().items()
    )
    (runner_up, _), (best, name) = overlaps[-2:]
    stretch = height / width / _RATIOS.get(name, 1.0)
    is_clear = best >= _MIN_OVERLAP and best - runner_up >= _MIN_MARGIN
    return name if is_clear and 1 / _MAX_STRETCH < stretch < _MAX_STRETCH else "unclear"


@cache
def draw_templates() -> dict[str, list[np.ndarray]]:
    """Each shape stretched to its bounding box, with its outline where it is and moved outwards: bool (48, 48).

    A soft edge makes a shape larger by about a pixel. That changes little of a square, and much of a cross.
    """
    end = _TEMPLATE - 1
    third = end / 3
    outlines: dict[str, list[tuple[float, float]]] = {
        "square": [(0, 0), (end, 0), (end, end), (0, end)],
        "diamond": [(end / 2, 0), (end, end / 2), (end / 2, end), (0, end / 2)],
        "triangle": [(end / 2, 0), (end, end), (0, end)],
    }
    templates = {}
    for name in ("disc", "ring", "cross", "moon", *outlines):
        image = Image.new("L", (_TEMPLATE, _TEMPLATE))
        draw = ImageDraw.Draw(image)
        if name in ("disc", "ring"):
            draw.ellipse((0, 0, end, end), fill=255)
        if name == "moon":  # its box ends at the tips, at 0.86 of the disc's width
            draw.ellipse((0, 0, 1.16 * end, end), fill=255)
            draw.ellipse((0.45 * end, 0.13 * end, 1.31 * end, 0.87 * end), fill=0)
        if name == "ring":
            draw.ellipse((0.27 * end, 0.27 * end, 0.73 * end, 0.73 * end), fill=0)
        if name == "cross":
            draw.rectangle((third, 0, 2 * third, end), fill=255)
            draw.rectangle((0, third, end, 2 * third), fill=255)
        if name in outlines:
            draw.polygon(outlines[name], fill=255)
        templates[name] = [_thicken(image, margin) for margin in _MARGINS]
    return templates


def _thicken(image: Image.Image, margin: int) -> np.ndarray:
    """Move a template's outline outwards by `margin` pixels, and fit the result to the template's size."""
    wide = Image.new("L", (_TEMPLATE + 2 * margin, _TEMPLATE + 2 * margin))
    wide.paste(image, (margin, margin))
    # (x, y) offsets of a disc: the outline moves equally far in each direction.
    offsets = [
        (x, y)
        for x in range(-margin, margin + 1)
        for y in range(-margin, margin + 1)
        if x * x + y * y <= margin * margin
    ]
    pixels = np.asarray(wide) > 127
    thick = np.any([np.roll(pixels, offset, (1, 0)) for offset in offsets], axis=0)
    resized = Image.fromarray(thick).convert("L").resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR)
    return np.asarray(resized) > 127


def _name_hue(pixels: np.ndarray) -> str:
    """The colour whose hue is nearest to the pixels' (n, 3), each counted by its chroma."""
    red, green, blue = pixels.mean(0)
    hue = np.degrees(np.arctan2(np.sqrt(3) * (green - blue), 2 * red - green - blue)) % 360
    return min(HUES, key=lambda name: abs((hue - HUES[name] + 180) % 360 - 180))


def _name_motion(masks: np.ndarray, areas: np.ndarray) -> str:
    side = min(masks.shape[1:])
    rows, columns = np.indices(masks.shape[1:])
    centres = np.stack([[columns[mask].mean(), rows[mask].mean()] for mask in masks]) / side
    # (x, y) as shares of the picture's side; first and last frames averaged in pairs against noise.
    moved = centres[-2:].mean(0) - centres[:2].mean(0)
    length = np.linalg.norm(np.diff(centres, axis=0), axis=1).sum()
    growth = areas[-2:].mean() / areas[:2].mean()
    distance = np.abs(moved).max()
    if length > 0.7 and distance < 0.35 * length:
        return "moves in a circle"
    if distance > 0.15:
        if np.abs(moved).min() > 0.4 * distance:
            return "unclear"
        if abs(moved[0]) > abs(moved[1]):
            return "moves to the left" if moved[0] < 0 else "moves to the right"
        return "moves up" if moved[1] < 0 else "moves down"
    if growth > 1.8:
        return "grows"
    return "shrinks" if growth < 1 / 1.8 else "unclear"
