"""A chat model that says what it is told to, and its answerer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tiny_chat_models import mistral
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.data.chat.conversation import Conversation, ConversationKind
from dit_lora.data.chat.rendered import RenderedConversation, TokenPiece
from dit_lora.families.chat_base import VisionSettings
from dit_lora.training.tasks.chat.answerer import ChatAnswerGenerator

Say = Callable[[nn.Module, str], str]
HOW = VisionSettings(frames=4, height=8, width=10)


@dataclass
class Checkpoint:
    """A chat checkpoint that keeps what it was asked, and says what it is told to."""

    path: Path = Path("nowhere")
    fit: Any = "stretch"
    vision_settings: VisionSettings = HOW
    say: Say = lambda model, question: "A"
    asked: list[tuple[Conversation, tuple[float, ...]]] = field(default_factory=list)
    pixels: list[torch.Tensor | None] = field(default_factory=list)

    def copy_with_vision_settings(self, vision_settings: VisionSettings) -> "Checkpoint":
        return replace(self, vision_settings=vision_settings)  # what is asked of either is kept in the same lists

    def shape(self, kind: ConversationKind, height: int, width: int) -> VideoShape:
        return VideoShape(
            self.vision_settings.frames if kind == "video" else 1,
            self.vision_settings.height,
            self.vision_settings.width,
        )

    def tokenize_conversation(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        include_answer: bool = True,
    ) -> RenderedConversation:
        assert not include_answer
        times = () if self.vision_settings.timestamps is False else tuple(seconds)
        self.asked.append((conversation, times))
        return RenderedConversation((TokenPiece((7, 9, 11), "fixed"),))

    def answer(
        self,
        model: nn.Module,
        rendered: RenderedConversation,
        pixels: torch.Tensor | None,
        max_tokens: int,
    ) -> str:
        assert not torch.is_grad_enabled()
        self.pixels.append(pixels)
        return self.say(model, self.asked[-1][0].turns[-1].question)

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        return mistral().to(dtype)


def answerer(say: Say = Checkpoint.say) -> ChatAnswerGenerator:
    return ChatAnswerGenerator(Checkpoint(say=say), nn.Linear(3, 3), torch.device("cpu"), torch.float32)
