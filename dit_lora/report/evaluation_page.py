"""The evaluation of a chat model as one self-contained page: accuracy by task, and what it got wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dit_lora.data.chat.mvbench import Question, letter
from dit_lora.report.film_strip import film_strip
from dit_lora.report.pages import PagePictures, render, write_page

CARDS = 48
"""Questions that are shown; predictions.jsonl has all."""
_FRAMES = 4  # of one card
_HEIGHT = 96  # pixels of a thumbnail
_LINES = 50  # of a list


Prediction = Mapping[str, Any]
"""A line of predictions.jsonl."""


@dataclass(frozen=True)
class WrongAnswers:
    """Wrong answers of one kind: how many, and those that are shown, each with a data URI of its frames or nothing."""

    title: str
    count: int
    shown: Sequence[tuple[Question, Prediction, str]]


def write_evaluation_page(
    path: Path,
    results: Mapping[str, Any],
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    title: str,
) -> Path:
    """Write the page in one rename; it fetches and runs nothing, and everything from the data is escaped.

    `results` is what results.json holds, and `predictions` a line of predictions.jsonl for each of `questions`. Reads
    frames of at most `CARDS` videos. Raises `DitLoraError` if the page cannot be written.
    """
    pairs = list(zip(questions, predictions, strict=True))
    page = render(
        "evaluation_page.html",
        title=title,
        setting=_setting(results["setting"]),
        total=results["all"],
        compared="base" in results["all"],
        average=results["average"],
        tasks=results["tasks"],
        groups=_groups(pairs, {one["task"]: one["accuracy"] for one in results["tasks"]}),
        failed=[(question.id, line["failed"]) for question, line in pairs if "failed" in line],
        left_out=list(results["left_out"].items()),
        lines=_LINES,
        letter=letter,
    )
    return write_page(path, page)


def _setting(setting: Mapping[str, Any]) -> list[tuple[str, str]]:
    viewing = setting.get("viewing") or {}
    size = f"{viewing['height']} x {viewing['width']}" if viewing else ""
    facts = {
        "Model": setting.get("target"),
        "Family": setting.get("family"),
        "Base": setting.get("base_model"),
        "Frames of a video": viewing.get("frames"),
        "Pixels": size,
        "Precision": str(setting.get("dtype") or "").removeprefix("torch."),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _groups(
    pairs: Sequence[tuple[Question, Prediction]], accuracy: Mapping[str, float]
) -> list[WrongAnswers]:
    """Return what was answered wrong: first what the fine-tune lost, then what names no option, then the rest."""
    wrong: dict[str, list[tuple[Question, Prediction]]] = {
        "Right only without the fine-tune": [],
        "No option named": [],
        "Wrong": [],
    }
    for question, line in pairs:
        if "failed" in line or line["right"]:
            continue
        lost = line.get("base", {}).get("right", False)
        kind = "Right only without the fine-tune" if lost else "Wrong"
        wrong[kind if lost or line["named"] else "No option named"].append((question, line))
    pictures, room, groups = PagePictures(), CARDS, []
    for left, (title, ones) in zip((3, 2, 1), wrong.items(), strict=True):
        shown = [
            (question, line, pictures.uri(_strip(question, line["seconds"])))
            for question, line in _by_turns(ones, accuracy)[: math.ceil(room / left)]
        ]
        room -= len(shown)
        if ones:
            groups.append(WrongAnswers(title, len(ones), shown))
    return groups


def _by_turns(
    ones: Sequence[tuple[Question, Prediction]], accuracy: Mapping[str, float]
) -> list[tuple[Question, Prediction]]:
    """Return one of each task and again, beginning with the task of the lowest accuracy."""
    by_task: dict[str, list[tuple[Question, Prediction]]] = {}
    for one in ones:
        by_task.setdefault(one[0].task, []).append(one)
    ordered = sorted(by_task, key=lambda task: accuracy[task])
    turns = zip_longest(*(by_task[task] for task in ordered))
    return [one for turn in turns for one in turn if one is not None]


def _strip(question: Question, seconds: Sequence[float]) -> bytes:
    """Return some of the frames that the model saw, side by side, as JPEG; empty if they can no longer be read."""
    count = min(_FRAMES, len(seconds))
    shown = [seconds[at * len(seconds) // count] for at in range(count)] or [0.0]
    return film_strip(question.media, shown, _HEIGHT)
