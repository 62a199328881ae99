"""Captioned clips and images of shapes: real H.264 and PNG files for demos and tests, without a download."""

import json
from pathlib import Path

import torch

from dit_lora.data.media.video import write_sample, write_video
from dit_lora.data.synthetic.tones import make_tone

COLOURS = {"red": (220, 60, 50), "green": (60, 190, 80), "blue": (60, 90, 220)}
SHAPES = ("disc", "square")
_BACKGROUND = (24, 24, 30)


def write_shapes(
    out_folder: Path, *, clips: int, frames: int, height: int, width: int, fps: float, sound: bool = False
) -> list[Path]:
    """Generate a data set of `clips` mp4 files with metadata.jsonl; each clip has a colour, a shape and a direction.

    With `sound`, each also has a tone. With one frame, png files are written instead, each with a .txt of the
    same name, as Sana's trainer reads them.
    """
    out_folder.mkdir(parents=True, exist_ok=True)
    paths, lines = [], []
    for index in range(clips):
        colour = list(COLOURS)[index % len(COLOURS)]
        shape = SHAPES[index // len(COLOURS) % len(SHAPES)]
        rightwards = index % 2 == 0
        video = render_clip(shape, colour, rightwards, frames, height, width)
        side = "right" if rightwards else "left"
        stem = out_folder / f"{index:02d}_{colour}_{shape}"
        if frames == 1:
            paths.append(write_sample(stem, video, None))
            # A single frame shows the position where the movement would start.
            position = "left" if rightwards else "right"
            text = f"a {colour} {shape} at the {position} of a dark background"
            stem.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
            continue
        path = stem.with_suffix(".mp4")
        write_video(path, video, fps, make_tone(shape, rightwards, frames / fps) if sound else None)
        paths.append(path)
        text = f"a {colour} {shape} moves to the {side} over a dark background"
        if sound:
            text += f", a tone {'rises' if rightwards else 'falls'}"
        lines.append(json.dumps({"file_name": path.name, "text": text}))
    if lines:
        (out_folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def write_class_folders(
    out_folder: Path, *, images: int, height: int, width: int, frames: int = 1, fps: float = 8.0
) -> list[Path]:
    """Generate a data set of `images` png files in one folder per class, such as red_disc.

    A class's images differ in the position. With more than one frame, mp4 clips in which the shape moves are written
    instead.
    """
    classes = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    paths = []
    for index in range(images):
        colour, shape = classes[index % len(classes)]
        number = index // len(classes)
        # One long movement for each class; every sample is cut from it at another position.
        steps = frames + (images - 1) // len(classes)
        video = render_clip(shape, colour, True, steps, height, width)[number : number + frames]
        folder = out_folder / f"{colour}_{shape}"
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(write_sample(folder / f"{number:03d}", video, fps if frames > 1 else None))
    return paths


def render_clip(shape: str, colour: str, moves_right: bool, frames: int, height: int, width: int) -> torch.Tensor:
    """A clip of a moving shape, uint8 (frames, height, width, 3)."""
    # Coordinates relative to the shape's centre: y is (H, 1) and x is (1, W), which broadcast to (H, W).
    y = torch.arange(height).view(-1, 1) - height / 2
    radius = height / 4
    video = torch.tensor(_BACKGROUND, dtype=torch.uint8).repeat(frames, height, width, 1)
    for frame in range(frames):
        progress = frame / max(1, frames - 1)
        # The shape stays inside the picture: its centre keeps one radius of distance from both sides.
        centre = radius + (width - 2 * radius) * (progress if moves_right else 1 - progress)
        x = torch.arange(width).view(1, -1) - centre
        inside = x**2 + y**2 < radius**2 if shape == "disc" else (x.abs() < radius) & (y.abs() < radius)
        video[frame, inside] = torch.tensor(COLOURS[colour], dtype=torch.uint8)
    return video
