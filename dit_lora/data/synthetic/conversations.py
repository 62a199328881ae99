"""Conversations about clips and images of shapes: real files for demos and tests, without a download."""

import json
from pathlib import Path
from typing import Any

from dit_lora.data.media.video import write_sample
from dit_lora.data.synthetic.clips import COLOURS, SHAPES, render
from dit_lora.files import write_whole

_WATCH = "Watch the {medium} and answer the question."


def write_conversations(
    out: Path, *, clips: int, images: int, frames: int, height: int, width: int, fps: float
) -> Path:
    """Write mp4 clips, png images and `conversations.json`, their annotations in VideoChat2's format; return its path.

    Each clip has questions about colour, shape and direction, each image about colour and shape. Every second
    image has a caption without a question instead. H and W must be even, `frames` at least 2.
    """
    out.mkdir(parents=True, exist_ok=True)
    records = [_clip(out, index, frames, height, width, fps) for index in range(clips)]
    records += [_image(out, index, height, width) for index in range(images)]
    path = out / "conversations.json"
    write_whole(path, json.dumps(records, indent=1) + "\n")
    return path


def _facts(index: int) -> tuple[str, str, bool]:
    """Colour, shape, and whether it moves right; any twelve consecutive indices cover all combinations."""
    colours, shapes = list(COLOURS), list(SHAPES)
    # After six clips, all colours and shapes have occurred, so the direction is swapped.
    per_side = len(colours) * len(shapes)
    colour, shape = colours[index % len(colours)], shapes[index // len(colours) % len(shapes)]
    return colour, shape, (index + index // per_side) % 2 == 0


def _clip(
    out: Path, index: int, frames: int, height: int, width: int, fps: float
) -> dict[str, Any]:
    colour, shape, rightwards = _facts(index)
    video = render(shape, colour, rightwards, frames, height, width)
    side = "right" if rightwards else "left"
    path = write_sample(out / "clips" / f"{index:02d}_{colour}_{shape}_{side}", video, fps)
    answers = {
        "Which way does it move?": f"To the {side}.",
        **_looks(colour, shape),
    }
    return {"video": path.relative_to(out).as_posix(), "QA": _turns("video", answers)}


def _image(out: Path, index: int, height: int, width: int) -> dict[str, Any]:
    colour, shape, at_left = _facts(index)
    picture = render(shape, colour, at_left, 1, height, width)
    side = "left" if at_left else "right"
    path = write_sample(out / "images" / f"{index:02d}_{colour}_{shape}_{side}", picture, None)
    caption = f"A {colour} {shape} at the {side} of a dark background."
    # An empty question makes the answer a caption.
    answers = {"": caption} if index % 2 else _looks(colour, shape)
    return {"image": path.relative_to(out).as_posix(), "QA": _turns("image", answers)}


def _looks(colour: str, shape: str) -> dict[str, str]:
    return {"What colour is the shape?": f"{colour.title()}.", "What shape is it?": f"A {shape}."}


def _turns(medium: str, answers: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"i": _WATCH.format(medium=medium) if question else "", "q": question, "a": answer}
        for question, answer in answers.items()
    ]
