"""What a run's model made of the validation prompts: videos, images and answers, before and after."""

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EMBED_LIMIT_BYTES = 64 * 2**20
"""Videos beyond this many bytes of base64 stay beside the page and are linked."""


@dataclass(frozen=True)
class Sample:
    """The first and the last sample of a prompt, or the only one, each as (label, source)."""

    prompt: str
    clips: list[tuple[str, str]]


@dataclass(frozen=True)
class Answered:
    """A question and what was answered, first and last, each as (label, answer)."""

    prompt: str
    media: str
    """The file's name; empty where the question is about none."""
    answers: list[tuple[str, str]]


def find_answers(folder: Path) -> list[Answered]:
    """First and last answer to every validation prompt of a chat model's run; files that are torn are left out."""
    by_step: dict[int, list[dict[str, str | None]]] = {}
    for path in (folder / "samples").glob("step_*/answers.json"):
        match = re.fullmatch(r"step_(\d+)", path.parent.name)
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if match and isinstance(given, list):
            by_step[int(match[1])] = given
    if not by_step:
        return []
    steps = sorted({min(by_step), max(by_step)})
    found = []
    for index, one in enumerate(by_step[steps[-1]]):
        answers = [
            (_when(step), str(by_step[step][index].get("answer", "")))
            for step in steps
            if index < len(by_step[step])
        ]
        media = Path(str(one.get("media") or "")).name
        found.append(Answered(str(one.get("prompt", "")), media, answers))
    return found


def find_samples(folder: Path, prompts: Sequence[str]) -> tuple[list[Sample], int]:
    """First and last sample of every prompt, and how many are linked because the page would be too big."""
    found: dict[int, dict[int, Path]] = {}
    for path in (folder / "samples").glob("step_*/prompt_*.*"):
        name = f"{path.parent.name}/{path.name}"
        match = re.fullmatch(r"step_(\d+)/prompt_(\d+)\.(mp4|png)", name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    samples, room, linked = [], EMBED_LIMIT_BYTES, 0
    for index, by_step in sorted(found.items()):
        clips = []
        for step in sorted({min(by_step), max(by_step)}):
            source, cost = _source(by_step[step], folder, room)
            room, linked = room - cost, linked + (cost == 0)
            clips.append((_when(step), source))
        prompt = prompts[index] if index < len(prompts) else f"prompt {index}"
        samples.append(Sample(prompt, clips))
    return samples, linked


def _source(path: Path, folder: Path, room: int) -> tuple[str, int]:
    """A data URI and its bytes, or a relative link and 0 where the URI would exceed `room`."""
    encoded = 4 * math.ceil(path.stat().st_size / 3)
    if encoded > room:
        return path.relative_to(folder).as_posix(), 0
    kind = "image/png" if path.suffix == ".png" else "video/mp4"
    return f"data:{kind};base64," + base64.b64encode(path.read_bytes()).decode(), encoded


def _when(step: int) -> str:
    return f"after step {step:,}" if step else "before"
