"""Training sets of conversations for tests of how they are read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.loading.batch import DataReadingSettings, PositionSampler
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.families import get_family
from dit_lora.families.chat_base import ChatCheckpoint
from dit_lora.training.tasks.chat.samples import ChatSamples, build_training_set, find_conversations
from dit_lora.training.tasks.chat.training_set import ChatTrainingSet

WATCH = "Watch the video and answer the question, please."


def records() -> list[dict[str, Any]]:
    """About two clips, two images and nothing: of one turn and several, with instructions and without."""
    questions = [
        {"i": "Look.", "q": "What colour is it?", "a": "Red."},
        {
            "i": WATCH,
            "q": "Which way does it move, to the left or to the right?",
            "a": "To the right.",
        },
        {"i": "", "q": "", "a": "A disc before a dark wall."},
    ]
    return [
        {"video": "clips/00_red_disc_right.mp4", "QA": questions},
        {"video": "clips/01_green_disc_left.mp4", "QA": questions[1:2]},
        {"image": "images/00_red_disc_left.png", "QA": questions[:1]},
        {"image": "images/01_green_disc_right.png", "QA": questions[2:]},
        {"messages": turns("What is one and one?", "Two.", "And three?", "Four, I think.")},
        {"messages": turns("What is it?", "Nothing.")},
    ]


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def write_records(folder: Path, given: Sequence[Any], name: str = "mine.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(list(given)))
    return path


def recipe_of(checkpoint: Path, path: Path, tmp_path: Path, *, family: str = "videochat2", **chat: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"family": family, "path": str(checkpoint)},
        "data": {"path": str(path), "frames": 4, "height": 32, "width": 32},
        "chat": {"length_step": 32, "max_tokens": 256, "timestamps": True, **chat},
        "optim": {"groups": {"adapter": {"lr": 1e-3}}},
        "train": {"steps": 4},
        "run": {"dir": str(tmp_path / "run")},
    }
    return parse_recipe(values, "test")


def found_in(recipe: Recipe) -> tuple[ChatCheckpoint, ChatSamples]:
    checkpoint = get_family(recipe.model.family).open(recipe.model, recipe)
    return checkpoint, find_conversations(recipe, checkpoint, recipe.data, quiet=True)


def set_of(recipe: Recipe) -> ChatTrainingSet:
    checkpoint, media = found_in(recipe)
    assert not media.rejected
    return build_training_set(media.entries, checkpoint, recipe)


def reading(
    tmp_path: Path,
    *,
    size: int = 2,
    accumulate: int = 1,
    rank: int = 0,
    ranks: int = 1,
    **other: Any,
) -> DataReadingSettings:
    steps = other.pop("steps", 12)
    sampler = PositionSampler(
        start_step=0,
        steps=steps,
        batch_size=size,
        accumulate=accumulate,
        rank=rank,
        num_ranks=ranks,
    )
    defaults: dict[str, Any] = {"seed": 3, "caption_dropout": 0.0, "workers": 0, "prefetch": 2}
    quarantine = Quarantine(tmp_path / "quarantine.json")
    return DataReadingSettings(sampler, quarantine=quarantine, pin_memory=False, **{**defaults, **other})
