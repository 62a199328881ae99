"""Captioned clips and images of shapes: real H.264 and PNG files for demos and tests, no download needed."""

import json
from pathlib import Path

import torch

from dit_lora.data.media.video import write_sample, write_video

COLOURS = {"red": (220, 60, 50), "green": (60, 190, 80), "blue": (60, 90, 220)}
SHAPES = ("disc", "square")
_BACKGROUND = (24, 24, 30)
_LEVELS = {**COLOURS, "white": (235, 235, 235)}


def write_shapes(
    out: Path, *, clips: int, frames: int, height: int, width: int, fps: float
) -> list[Path]:
    """Write `clips` mp4 files and their metadata.jsonl; each clip has a colour, a shape and a direction.

    With one frame, writes png files, each with a .txt of the same name, as Sana's trainer reads them.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths, lines = [], []
    for index in range(clips):
        colour = list(COLOURS)[index % len(COLOURS)]
        shape = SHAPES[index // len(COLOURS) % len(SHAPES)]
        rightwards = index % 2 == 0
        video = render(shape, colour, rightwards, frames, height, width)
        side = "right" if rightwards else "left"
        stem = out / f"{index:02d}_{colour}_{shape}"
        if frames == 1:
            paths.append(write_sample(stem, video, None))
            # A single frame shows the place where the movement would start.
            where = "left" if rightwards else "right"
            text = f"a {colour} {shape} at the {where} of a dark background"
            stem.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
            continue
        path = stem.with_suffix(".mp4")
        write_video(path, video, fps)
        paths.append(path)
        text = f"a {colour} {shape} moves to the {side} over a dark background"
        lines.append(json.dumps({"file_name": path.name, "text": text}))
    if lines:
        (out / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def write_class_folders(
    out: Path, *, images: int, height: int, width: int, frames: int = 1, fps: float = 8.0
) -> list[Path]:
    """Write `images` png files in one folder a class, such as red_disc; a class's images differ in the shape's place.

    With more than one frame, writes mp4 clips in which the shape moves.
    """
    classes = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    paths = []
    for index in range(images):
        colour, shape = classes[index % len(classes)]
        number = index // len(classes)
        steps = frames + (images - 1) // len(classes)
        video = render(shape, colour, True, steps, height, width)[number : number + frames]
        folder = out / f"{colour}_{shape}"
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(write_sample(folder / f"{number:03d}", video, fps if frames > 1 else None))
    return paths


def write_pairs(
    out: Path, *, pairs: int, frames: int, height: int, width: int, fps: float
) -> list[Path]:
    """Write samples in `target`, what each is made from in `source`, and where they differ in `mask`, by equal names.

    In a picture a shape has moved; in a clip, a white one that moves has got a colour. The captions, which say so, are
    beside the targets and in metadata.jsonl, which names all the files.
    """
    paths, lines = [], []
    for index in range(pairs):
        colour, shape = list(COLOURS)[index % len(COLOURS)], SHAPES[index // len(COLOURS) % 2]
        # The same shape moves the other way when it comes again.
        rightwards = (index + index // 6) % 2 == 0
        side = "right" if rightwards else "left"
        target = render(shape, colour, rightwards, max(2, frames), height, width)
        if frames == 1:
            source, target = target[:1], target[1:]
            text = f"move the {colour} {shape} to the {side}"
        else:
            source = render(shape, "white", rightwards, frames, height, width)
            text = f"a {colour} {shape} moves to the {side}"
        differs = (source != target).any(-1, keepdim=True).any(0, keepdim=True)
        mask = differs.expand(-1, -1, -1, 3).byte() * 255
        stem = f"{index:02d}_{colour}_{shape}"
        written = [
            write_sample(out / folder / stem, video, fps)
            for folder, video in (("target", target), ("source", source), ("mask", mask))
        ]
        paths.append(written[0])
        written[0].with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        own, reference, masked = (f"{file.parent.name}/{file.name}" for file in written)
        row = {"file_name": own, "text": text, "references": [reference], "mask": masked}
        lines.append(json.dumps(row))
    (out / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def render(
    shape: str, colour: str, rightwards: bool, frames: int, height: int, width: int
) -> torch.Tensor:
    """Return a clip of a moving shape, uint8 (frames, height, width, 3)."""
    y = torch.arange(height).view(-1, 1) - height / 2
    radius = height / 4
    video = torch.tensor(_BACKGROUND, dtype=torch.uint8).repeat(frames, height, width, 1)
    for frame in range(frames):
        progress = frame / max(1, frames - 1)
        centre = radius + (width - 2 * radius) * (progress if rightwards else 1 - progress)
        x = torch.arange(width).view(1, -1) - centre
        inside = (
            x**2 + y**2 < radius**2 if shape == "disc" else (x.abs() < radius) & (y.abs() < radius)
        )
        video[frame, inside] = torch.tensor(_LEVELS[colour], dtype=torch.uint8)
    return video
