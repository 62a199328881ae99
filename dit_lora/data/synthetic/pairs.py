"""Pairs for editing models: a shape before and after it moves, and the instruction."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from dit_lora.data.media.video import write_sample
from dit_lora.data.synthetic.clips import SHAPES
from dit_lora.files import write_atomically

SIDES = {"left": (0.0, 0.5), "right": (1.0, 0.5), "top": (0.5, 0.0), "bottom": (0.5, 1.0)}
"""Position of a shape as shares of the way from left to right and from top to bottom."""

# Number of pixels between the bands of a background.
_BAND_PIXELS = 8


def write_edit_pairs(
    out_folder: Path, *, pairs: int, height: int, width: int, frames: int = 1, fps: float = 8.0, seed: int = 0
) -> list[Path]:
    """Write `pairs` edited png files to after/, their references to before/, masks to mask/, and captions.

    A caption says where the shape goes; its colour, its kind and the background can only be seen in the
    reference. With more than one frame, mp4 clips are written in which the shape moves to that side.
    It is coloured in before/ and grey in after/. Captions are in .txt files, and in metadata.jsonl, which names
    all the files.
    """
    # A separate generator, so that equal seeds give equal pairs.
    generator = torch.Generator().manual_seed(seed)
    paths, lines = [], []
    for index in range(pairs):
        kind, side = SHAPES[index % len(SHAPES)], list(SIDES)[index // len(SHAPES) % len(SIDES)]
        colours = torch.randint(0, 128, (2, 3), generator=generator)
        colours[0] += 128
        # One weaker channel, so that the shape is not grey.
        colours[0, index % 3] //= 3
        start = torch.rand(2, generator=generator)
        # At least two positions: before and after the movement.
        progress = torch.linspace(0, 1, max(2, frames)).view(-1, 1)
        positions = torch.lerp(start, torch.tensor(SIDES[side]), progress).tolist()
        moved = _render_frames(kind, colours, positions, height, width)
        if frames == 1:
            before, after, text = moved[:1], moved[1:], f"move the shape to the {side}"
        else:
            # The mean of the three channels is a grey of the same brightness.
            colours[0] = colours[0].sum() // 3
            before, after = moved, _render_frames(kind, colours, positions, height, width)
            text = f"the shape moves to the {side}, and is grey"
        # (F, H, W, 3) to (1, H, W, 1): pixels that change in any frame.
        differs = (before != after).any(-1, keepdim=True).any(0, keepdim=True)
        folders = {"after": after, "before": before, "mask": differs.byte().mul(255).expand(-1, -1, -1, 3)}
        files = [write_sample(out_folder / name / f"{index:03d}", video, fps) for name, video in folders.items()]
        write_atomically(files[0].with_suffix(".txt"), text + "\n")
        target, reference, mask_name = (file.relative_to(out_folder).as_posix() for file in files)
        lines.append(json.dumps({"file_name": target, "references": [reference], "mask": mask_name, "text": text}))
        paths.append(files[0])
    write_atomically(out_folder / "metadata.jsonl", "\n".join(lines) + "\n")
    return paths


def _render_frames(
    kind: str, colours: torch.Tensor, positions: Sequence[Sequence[float]], height: int, width: int
) -> torch.Tensor:
    """Render the frames of a generated edit pair, uint8 (frames, height, width, 3).

    `colours` of the shape and of the banded background are (2, 3).
    """
    radius = min(height, width) / 4
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width).view(1, -1)
    # Diagonal bands, (H, W).
    bands = (rows + columns) // _BAND_PIXELS % 2 == 0
    ground = torch.where(bands[..., None], colours[1], colours[1] // 2)
    frames = []
    for across, down in positions:
        x = columns - radius - (width - 2 * radius) * across
        y = rows - radius - (height - 2 * radius) * down
        inside = x**2 + y**2 < radius**2 if kind == "disc" else (x.abs() < radius) & (y.abs() < radius)
        frames.append(torch.where(inside[..., None], colours[0], ground))
    return torch.stack(frames).to(torch.uint8)
