"""Pairs for models that edit: a shape where it was, where it is to be, and the words for it."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from dit_lora.data.media.video import write_sample
from dit_lora.data.synthetic.clips import SHAPES
from dit_lora.files import write_whole

SIDES = {"left": (0.0, 0.5), "right": (1.0, 0.5), "top": (0.5, 0.0), "bottom": (0.5, 1.0)}
"""Place of a shape as shares of the way from left to right and from top to bottom."""


def write_edit_pairs(
    out: Path, *, pairs: int, height: int, width: int, seed: int = 0
) -> list[Path]:
    """Write `pairs` png files to after/, each one's reference to before/, captions to .txt files and metadata.jsonl.

    A caption says where the shape goes; its colour, its kind and the background are seen in the reference alone.
    """
    generator = torch.Generator().manual_seed(seed)
    paths, lines = [], []
    for index in range(pairs):
        kind, side = SHAPES[index % len(SHAPES)], list(SIDES)[index // len(SHAPES) % len(SIDES)]
        colours = torch.randint(0, 128, (2, 3), generator=generator)
        colours[0] += 128  # a bright shape on a dark background
        start = (float(x) for x in torch.rand(2, generator=generator))
        name = f"{index:03d}"
        before = write_sample(
            out / "before" / name, _drawn(kind, colours, start, height, width), None
        )
        after = write_sample(
            out / "after" / name, _drawn(kind, colours, SIDES[side], height, width), None
        )
        text = f"move the shape to the {side}"
        write_whole(after.with_suffix(".txt"), text + "\n")
        names = {"file_name": f"after/{after.name}", "references": [f"before/{before.name}"]}
        lines.append(json.dumps({**names, "text": text}))
        paths.append(after)
    write_whole(out / "metadata.jsonl", "\n".join(lines) + "\n")
    return paths


def _drawn(
    kind: str, colours: torch.Tensor, place: Iterable[float], height: int, width: int
) -> torch.Tensor:
    """Return a picture of one frame, uint8 (1, height, width, 3); `colours` are the shape's and the background's."""
    radius = min(height, width) / 4
    across, down = place
    x = torch.arange(width).view(1, -1) - radius - (width - 2 * radius) * across
    y = torch.arange(height).view(-1, 1) - radius - (height - 2 * radius) * down
    inside = x**2 + y**2 < radius**2 if kind == "disc" else (x.abs() < radius) & (y.abs() < radius)
    picture = torch.where(inside[..., None], colours[0], colours[1])
    return picture.to(torch.uint8)[None]
