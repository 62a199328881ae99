"""The evaluation of a chat model as one self-contained page: accuracy by task, and what it got wrong."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dit_lora.data.chat.mvbench import Question, letter, read_facts, read_frames_at
from dit_lora.data.media.video import ClipError
from dit_lora.report.pages import Pictures, clipped, render, write_page

CARDS = 48
"""Questions that are shown; predictions.jsonl has all."""
_FRAMES = 4  # of one card
_HEIGHT = 96  # pixels of a thumbnail
_LINES = 50  # of a list


@dataclass(frozen=True)
class Bar:
    """One task's accuracies, percent; those of the base are None where it was not asked."""

    name: str
    tuned: float
    base: float | None
    chance: float
    questions: int
    only_tuned: int
    only_base: int
    unnamed: int
    failed: int


@dataclass(frozen=True)
class Option:
    """One candidate, and who chose it."""

    letter: str
    words: str
    right: bool
    chosen: bool
    by_base: bool

    @property
    def notes(self) -> str:
        said = {
            "right": self.right,
            "chosen": self.chosen,
            "chosen without the fine-tune": self.by_base,
        }
        return " · ".join(words for words, holds in said.items() if holds)


@dataclass(frozen=True)
class Card:
    """One question that was answered wrong; `picture` is a data URI or nothing."""

    task: str
    id: str
    part: str
    question: str
    options: Sequence[Option]
    said: str
    base_said: str | None
    picture: str


@dataclass
class Group:
    """Wrong answers of one kind, and how many of them are not shown."""

    title: str
    count: int
    cards: list[Card] = field(default_factory=list)

    @property
    def hidden(self) -> int:
        return self.count - len(self.cards)


def write_evaluation_page(
    path: Path,
    results: Mapping[str, Any],
    questions: Sequence[Question],
    predictions: Sequence[Mapping[str, Any]],
    *,
    title: str,
) -> Path:
    """Write the page in one rename; it fetches and runs nothing, and everything from the data is escaped.

    `results` is what results.json holds, and `predictions` a line of predictions.jsonl for each of `questions`. Reads
    frames of at most `CARDS` videos. Raises `DitLoraError` if the page cannot be written.
    """
    return write_page(path, _render(results, questions, predictions, title))


def _render(
    results: Mapping[str, Any],
    questions: Sequence[Question],
    predictions: Sequence[Mapping[str, Any]],
    title: str,
) -> str:
    total, average = results["all"], results["average"]
    failed = [
        (one.id, clipped(line["failed"]))
        for one, line in zip(questions, predictions, strict=True)
        if "failed" in line
    ]
    return render(
        "evaluation_page.html",
        title=title,
        setting=_setting(results["setting"]),
        total=total,
        compared="base" in total,
        average=_bar("", {**total, **average}),
        bars=[_bar(one["task"], one) for one in results["tasks"]],
        groups=_groups(results, questions, predictions),
        failed=failed,
        left_out=[(id, clipped(words)) for id, words in results["left_out"].items()],
        lines=_LINES,
    )


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


def _bar(name: str, one: Mapping[str, Any]) -> Bar:
    return Bar(
        name,
        100 * one["accuracy"],
        100 * one["base"]["accuracy"] if "base" in one else None,
        100 * one["chance"],
        one["questions"],
        one.get("only_tuned", 0),
        one.get("only_base", 0),
        one["unnamed"],
        one["failed"],
    )


def _groups(
    results: Mapping[str, Any],
    questions: Sequence[Question],
    predictions: Sequence[Mapping[str, Any]],
) -> list[Group]:
    """Return what was answered wrong: first what the fine-tune lost, then what names no option, then the rest."""
    wrong: dict[str, list[tuple[Question, Mapping[str, Any]]]] = {
        "Right only without the fine-tune": [],
        "No option named": [],
        "Wrong": [],
    }
    for question, line in zip(questions, predictions, strict=True):
        if "failed" in line or line["right"]:
            continue
        lost = line.get("base", {}).get("right", False)
        kind = "Right only without the fine-tune" if lost else "Wrong"
        wrong[kind if lost or line["named"] else "No option named"].append((question, line))
    accuracy = {one["task"]: one["accuracy"] for one in results["tasks"]}
    pictures, room, groups = Pictures(), CARDS, []
    for left, (name, ones) in zip((3, 2, 1), wrong.items(), strict=True):
        shown = list(_by_turns(ones, accuracy))[: math.ceil(room / left)]
        room -= len(shown)
        if ones:
            groups.append(Group(name, len(ones), [_card(*one, pictures) for one in shown]))
    return groups


def _by_turns(
    ones: Sequence[tuple[Question, Mapping[str, Any]]], accuracy: Mapping[str, float]
) -> Iterator[tuple[Question, Mapping[str, Any]]]:
    """Yield one of each task and again, beginning with the task of the lowest accuracy."""
    by_task: dict[str, list[tuple[Question, Mapping[str, Any]]]] = {}
    for one in ones:
        by_task.setdefault(one[0].task, []).append(one)
    ordered = sorted(by_task, key=lambda task: accuracy[task])
    turns = zip_longest(*(by_task[task] for task in ordered))
    return (one for one in chain.from_iterable(turns) if one is not None)


def _card(question: Question, line: Mapping[str, Any], pictures: Pictures) -> Card:
    base = line.get("base")
    chosen, by_base = line["named"], base["named"] if base else ()
    options = [
        Option(letter(at), clipped(words), at == question.answer, at in chosen, at in by_base)
        for at, words in enumerate(question.candidates)
    ]
    return Card(
        question.task,
        question.id,
        _part(question),
        clipped(question.question),
        options,
        clipped(line["said"]),
        clipped(base["said"]) if base else None,
        pictures.uri(_strip(question, line["seconds"])),
    )


def _strip(question: Question, seconds: Sequence[float]) -> bytes:
    """Return some of the frames that the model saw, side by side, as JPEG; empty if they can no longer be read."""
    count = min(_FRAMES, len(seconds))
    shown = [seconds[at * len(seconds) // count] for at in range(count)] or [0.0]
    try:
        header = read_facts(question.media)
        width = round(min(4.0, max(0.25, header.width / header.height)) * _HEIGHT)
        size = {"height": _HEIGHT, "width": width}
        pixels = read_frames_at(question.media, shown, **size, fit="cover")
    except ClipError:
        return b""
    stream = io.BytesIO()
    row = torch.cat(list(pixels), dim=-1).permute(1, 2, 0).contiguous()
    Image.fromarray(row.numpy()).save(stream, "JPEG", quality=75)
    return stream.getvalue()


def _part(question: Question) -> str:
    """Return the part of the video that is asked about, `12.5 to 20 s`; nothing for a whole one."""
    if question.start is None or question.end is None:
        return ""
    return f"{question.start:g} to {question.end:g} s"
