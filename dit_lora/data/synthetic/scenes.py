"""Scenes of one moving shape with exact captions: the world of the trained demo base (`benchmarks.world`).

A scene is a shape, a colour, a motion and a background. Place, size and pattern are drawn at random. One shape, one
motion and one background are kept out of the base's training, so that a LoRA has something to teach it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dit_lora.data.media.video import write_video

NEW_SHAPE = "moon"
NEW_MOTION = "moves in a circle"
NEW_BACKGROUND = "chequered"

KNOWN_SHAPES = ("disc", "square", "triangle", "ring", "cross", "diamond")
SHAPES = (*KNOWN_SHAPES, NEW_SHAPE)
COLOURS = {
    "red": (220, 40, 40),
    "yellow": (230, 210, 40),
    "green": (40, 180, 60),
    "cyan": (40, 200, 210),
    "blue": (50, 80, 225),
    "magenta": (215, 50, 200),
}
DIRECTIONS = {
    "moves to the left": (-1.0, 0.0),
    "moves to the right": (1.0, 0.0),
    "moves up": (0.0, -1.0),
    "moves down": (0.0, 1.0),
}
"""Motions along a line, with their direction (x, y); y points down."""
MOTIONS = (*DIRECTIONS, "grows", "shrinks", NEW_MOTION)
BACKGROUNDS = ("dark", "pale", "striped", "dotted", NEW_BACKGROUND)


@dataclass(frozen=True)
class Scene:
    """What a caption says of a clip."""

    shape: str
    colour: str
    motion: str
    background: str

    @property
    def caption(self) -> str:
        """Such as "a red disc moves to the left over a dark background"."""
        return f"a {self.colour} {self.shape} {self.motion} over a {self.background} background"


def draw_scene(
    generator: torch.Generator,
    shapes: Sequence[str],
    motions: Sequence[str] = MOTIONS[:-1],
    backgrounds: Sequence[str] = BACKGROUNDS[:-1],
) -> Scene:
    """Draw each attribute uniformly."""
    options = (shapes, tuple(COLOURS), motions, backgrounds)
    return Scene(*(group[int(torch.randint(len(group), (), generator=generator))] for group in options))


def list_balanced_scenes(shape: str, count: int) -> list[Scene]:
    """List scenes of a shape, so that few clips show each known colour, motion and background about equally often."""
    colours, motions, backgrounds = tuple(COLOURS), MOTIONS[:-1], BACKGROUNDS[:-1]
    return [
        Scene(
            shape,
            colours[index % len(colours)],
            # Shifted after each round, so that a colour meets other motions and backgrounds.
            motions[(index + index // len(colours)) % len(motions)],
            backgrounds[(index + index // (len(colours) * 2)) % len(backgrounds)],
        )
        for index in range(count)
    ]


def render_scene(
    scene: Scene, generator: torch.Generator, *, frames: int = 9, height: int = 64, width: int = 64
) -> torch.Tensor:
    """Render a clip with random place, size and pattern: uint8 (frames, height, width, 3), edges antialiased."""
    size = min(height, width)
    background = _render_background(scene.background, generator, height, width)
    progress = torch.linspace(0, 1, frames)
    centres, radii = _draw_path(scene.motion, progress, generator, size)
    centres = centres * size + torch.tensor([width - size, height - size]) / 2
    # Brightness varies a little, hue does not.
    colour = torch.tensor(COLOURS[scene.colour]) * _draw_uniform(0.9, 1.1, generator)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    # (F, H, W): pixels from the shape's centre, and then the distance to its outline, negative inside.
    offsets = [(x - cx, y - cy) for cx, cy in centres.tolist()]
    distances = torch.stack(
        [
            measure_distance(scene.shape, dx, dy, radius)
            for (dx, dy), radius in zip(offsets, radii.tolist(), strict=True)
        ]
    )
    cover = (0.5 - distances).clamp(0, 1)[..., None]
    video = torch.lerp(background.expand(frames, -1, -1, -1), colour.expand(frames, height, width, 3), cover)
    return video.clamp(0, 255).round().to(torch.uint8)


def _draw_path(
    motion: str, progress: torch.Tensor, generator: torch.Generator, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres (F, 2) as shares of the picture's side, x first, and radii (F,) in pixels."""
    still = torch.ones_like(progress)
    centre = torch.stack([_draw_uniform(0.46, 0.54, generator), _draw_uniform(0.46, 0.54, generator)])
    radius = _draw_uniform(0.24, 0.27, generator) * size
    if motion in DIRECTIONS:
        direction = torch.tensor(DIRECTIONS[motion])
        reach = _draw_uniform(0.18, 0.2, generator)
        # Along the motion the path is centred, across it the centre is free.
        start = torch.where(direction != 0, 0.5 - reach * direction, centre)
        return start + 2 * reach * progress[:, None] * direction, radius * still
    if motion == NEW_MOTION:
        reach = _draw_uniform(0.16, 0.18, generator)
        angle = 2 * math.pi * (progress + _draw_uniform(0, 1, generator))
        return 0.5 + reach * torch.stack([angle.cos(), angle.sin()], 1), 0.9 * radius * still
    min_radius, max_radius = 0.14 * size, _draw_uniform(0.31, 0.33, generator) * size
    share = progress if motion == "grows" else 1 - progress
    return centre.expand(len(progress), 2), torch.lerp(torch.tensor(min_radius), max_radius, share)


def _render_background(name: str, generator: torch.Generator, height: int, width: int) -> torch.Tensor:
    """A grey picture (H, W, 3) in 0 to 255."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    period = min(height, width) / 4
    shift_x, shift_y = (_draw_uniform(0, period, generator) for _ in range(2))
    dark, pale = _draw_uniform(25, 50, generator), _draw_uniform(185, 215, generator)
    # Triangle waves of the period, 0 at a stripe's middle and 1 between two stripes.
    wave_x, wave_y = (
        (((position + shift) / period) % 1 - 0.5).abs() * 2 for position, shift in ((x, shift_x), (y, shift_y))
    )
    # Pixels from an edge to antialiased shares of the second tone.
    if name == "dark":
        share = torch.zeros_like(x)
    elif name == "pale":
        share = torch.ones_like(x)
    elif name == "striped":
        share = ((wave_y - 0.5) * period / 2 + 0.5).clamp(0, 1)
    elif name == "dotted":
        share = (0.5 + 0.27 * period - torch.hypot(wave_x, wave_y) * period / 2).clamp(0, 1)
    else:
        share = ((((wave_x - 0.5) * (wave_y - 0.5)).sign()) + 1) / 2
    if name in ("striped", "dotted", NEW_BACKGROUND):
        dark, pale = dark + 45, pale - 55
    return torch.lerp(dark, pale, share)[..., None].expand(-1, -1, 3)


def measure_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: float) -> torch.Tensor:
    """Distance in pixels to the outline of a shape of this radius at the origin, negative inside. `x`, `y`: (H, W)."""
    from_centre = torch.hypot(x, y)
    if shape == "disc":
        return from_centre - 0.95 * radius
    if shape == "ring":
        return (from_centre - 0.72 * radius).abs() - 0.26 * radius
    if shape == NEW_SHAPE:
        # A disc without a smaller one, moved to the left so that the middle of the crescent is at the origin.
        disc = torch.hypot(x - 0.16 * radius, y) - 1.08 * radius
        cut = torch.hypot(x - 0.71 * radius, y) - 0.8 * radius
        return torch.maximum(disc, -cut)
    return _measure_polygon(_CORNERS[shape], x / radius, y / radius) * radius


def _measure_polygon(corners: Sequence[tuple[float, float]], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance to a polygon (https://iquilezles.org/articles/distfunctions2d/)."""
    nearest = torch.full_like(x, math.inf)
    sign = torch.ones_like(x)
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        edge_x, edge_y, to_x, to_y = bx - ax, by - ay, x - ax, y - ay
        along = ((to_x * edge_x + to_y * edge_y) / (edge_x**2 + edge_y**2)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(to_x - along * edge_x, to_y - along * edge_y))
        # A point is inside if a ray to the right crosses an odd number of edges.
        crosses = ((ay > y) != (by > y)) & (x < ax + (y - ay) * edge_x / (edge_y or math.inf))
        sign = torch.where(crosses, -sign, sign)
    return nearest * sign


def _compute_corner_positions(radii: Sequence[float], turn: float) -> tuple[tuple[float, float], ...]:
    """Corners at equal angles, the first at `turn` (a share of a whole turn) clockwise from the right."""
    angles = [2 * math.pi * (index / len(radii) + turn) for index in range(len(radii))]
    return tuple((r * math.cos(angle), r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True))


_ARM = 0.33  # half the width of the cross's arms
_CORNERS = {
    "square": _compute_corner_positions([1.2] * 4, 1 / 8),
    "diamond": _compute_corner_positions([1.1] * 4, 0),
    "triangle": _compute_corner_positions([1.15] * 3, 1 / 12 + 2 / 3),
    "cross": (
        (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM), (_ARM, 1),
        (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM), (-_ARM, -1),
    ),
}  # fmt: skip


def _draw_uniform(low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand((), generator=generator)


def write_scenes(folder: Path, scenes: Sequence[Scene], generator: torch.Generator, *, fps: float = 8.0) -> list[Path]:
    """Write one mp4 clip per scene, 9 frames of 64x64, and metadata.jsonl with the captions."""
    paths, lines = [], []
    for index, scene in enumerate(scenes):
        path = folder / f"{index:05d}_{scene.colour}_{scene.shape}.mp4"
        write_video(path, render_scene(scene, generator), fps)
        paths.append(path)
        lines.append(json.dumps({"file_name": path.name, "text": scene.caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths
