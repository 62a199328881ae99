"""A chat model that says what it is told to, an adapter that can be seen, and questions to ask it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import torch
from tiny_chat_models import mistral
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.data.chat.conversation import Conversation, Kind
from dit_lora.data.chat.mvbench import Question
from dit_lora.data.chat.rendered import Piece, Rendered
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import Viewing
from dit_lora.training.tasks.chat.answerer import Answerer

Say = Callable[[nn.Module, str], str]
HOW = Viewing(frames=4, height=8, width=10)


@dataclass
class Checkpoint:
    """A chat checkpoint that keeps what it was asked, and says what it is told to."""

    path: Path = Path("nowhere")
    fit: Any = "stretch"
    how: Viewing = HOW
    say: Say = lambda model, question: "A"
    asked: list[tuple[Conversation, tuple[float, ...], str]] = field(default_factory=list)
    pixels: list[torch.Tensor | None] = field(default_factory=list)

    timed: bool = False
    """Always told when its frames are."""

    def viewing(self, how: Viewing) -> "Checkpoint":
        if self.timed and how.timestamps is False:
            raise DitLoraError("chat.timestamps: remove it")
        return replace(self, how=how)  # what is asked of either is kept in the same lists

    def in_notebook(self) -> "Checkpoint":
        return self if self.timed else replace(self, how=replace(self.how, timestamps=False))

    def shape(self, kind: Kind, height: int, width: int) -> VideoShape:
        return VideoShape(
            self.how.frames if kind == "video" else 1, self.how.height, self.how.width
        )

    def render(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        answered: bool = True,
        prefix: str = "",
    ) -> Rendered:
        assert not answered
        told = () if self.how.timestamps is False else tuple(seconds)
        self.asked.append((conversation, told, prefix))
        return Rendered((Piece((7, 9, 11), "fixed"),))

    def answer(
        self, model: nn.Module, rendered: Rendered, pixels: torch.Tensor | None, max_tokens: int
    ) -> str:
        assert not torch.is_grad_enabled()
        self.pixels.append(pixels)
        return self.say(model, self.asked[-1][0].turns[-1].question)

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        return mistral().to(dtype)


class Net(nn.Module):
    """A model whose adapter can be seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(3, 3, bias=False)
        config = peft.LoraConfig(target_modules=["q"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, self)

    def is_tuned(self) -> bool:
        x = torch.arange(3.0)
        return not torch.equal(self.q(x), self.q.base_layer(x))


def answerer(say: Say = Checkpoint.say, model: nn.Module | None = None) -> Answerer:
    checkpoint, model = Checkpoint(say=say), model or Net()
    made = {"target": "run", "weights": "abc"}
    return Answerer(checkpoint, model, torch.device("cpu"), torch.float32, made=made)


def questions_about(shape_clips: Path) -> list[Question]:
    """Two tasks of three and two questions, of 2 and 4 options; the right one is always the second."""
    clips = [MediaFile(path) for path in sorted(shape_clips.glob("*.mp4"))]
    tasks = ("Colours", "Shapes", "Colours", "Shapes", "Colours")
    options = {"Colours": ("red", "green"), "Shapes": ("disc", "square", "star", "none")}
    return [
        Question(task, f"mine/{at}", clips[at], f"Question {at}?", options[task], 1)
        for at, task in enumerate(tasks)
    ]
