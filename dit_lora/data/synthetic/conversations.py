"""Conversations about clips and images of shapes: real files for demos and tests, without a download."""

import json
from pathlib import Path

from dit_lora.data.media.video import write_sample
from dit_lora.data.synthetic.clips import COLOURS, SHAPES, render_clip
from dit_lora.files import write_atomically

_INSTRUCTION = "Watch the {medium} and answer the question."


def write_conversations(
    out_folder: Path, *, clips: int, images: int, frames: int, height: int, width: int, fps: float
) -> Path:
    """Write mp4 clips, png images and `conversations.json`, their annotations in VideoChat2's format; return its path.

    Each clip has questions about colour, shape and direction, each image about colour and shape. Every second
    image has a caption without a question instead. H and W must be even, `frames` at least 2.
    """
    out_folder.mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(clips):
        colour, shape, rightwards = _choose_attributes(index)
        video = render_clip(shape, colour, rightwards, frames, height, width)
        side = "right" if rightwards else "left"
        path = write_sample(out_folder / "clips" / f"{index:02d}_{colour}_{shape}_{side}", video, fps)
        answers = {"Which way does it move?": f"To the {side}.", **_describe_looks(colour, shape)}
        records.append({"video": path.relative_to(out_folder).as_posix(), "QA": _make_turns("video", answers)})
    for index in range(images):
        colour, shape, at_left = _choose_attributes(index)
        picture = render_clip(shape, colour, at_left, 1, height, width)
        side = "left" if at_left else "right"
        path = write_sample(out_folder / "images" / f"{index:02d}_{colour}_{shape}_{side}", picture, None)
        caption = f"A {colour} {shape} at the {side} of a dark background."
        # An empty question makes the answer a caption.
        answers = {"": caption} if index % 2 else _describe_looks(colour, shape)
        records.append({"image": path.relative_to(out_folder).as_posix(), "QA": _make_turns("image", answers)})
    path = out_folder / "conversations.json"
    write_atomically(path, json.dumps(records, indent=1) + "\n")
    return path


def _choose_attributes(index: int) -> tuple[str, str, bool]:
    """Colour and shape of a synthetic clip, and True if the shape moves to the right.

    Any twelve consecutive indices cover all combinations.
    """
    colours, shapes = list(COLOURS), list(SHAPES)
    # After six clips, all colours and shapes have occurred, so the direction is swapped.
    per_side = len(colours) * len(shapes)
    colour, shape = colours[index % len(colours)], shapes[index // len(colours) % len(shapes)]
    return colour, shape, (index + index // per_side) % 2 == 0


def _describe_looks(colour: str, shape: str) -> dict[str, str]:
    return {"What colour is the shape?": f"{colour.title()}.", "What shape is it?": f"A {shape}."}


def _make_turns(medium: str, answers: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"i": _INSTRUCTION.format(medium=medium) if question else "", "q": question, "a": answer}
        for question, answer in answers.items()
    ]
