"""Tiny video chat checkpoints of Transformers' own types, and samples for them.

Shapes: B batch, F frames, H and W pixels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.recipe import ModelConfig
from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.tensors import conversation_to_tensors
from dit_lora.families.chat import FAMILY
from dit_lora.families.chat.checkpoint import VideoTextCheckpoint
from dit_lora.families.chat_base import VisionSettings

VARIANTS = FAMILY.tiny_variants
KINDS: tuple[ConversationKind, ...] = ("video", "image", "text")
# data.height and data.width: room for images of four tiles, where there are tiles.
SIDES = {
    "llava-next-video": 56,
    "qwen2.5-vl": 84,
    "qwen3-vl": 96,
    "smolvlm2": 64,
    "internvl": 112,
}


def opened(path: Path, *, frames: int = 3) -> VideoTextCheckpoint:
    """The checkpoint of the folder, which has its variant's name."""
    checkpoint = FAMILY.open(ModelConfig(family="chat", path=str(path)))
    side = SIDES[path.name]
    return checkpoint.copy_with_vision_settings(VisionSettings(frames, side, side))


def conversation(kind: ConversationKind, question: str, answer: str) -> Conversation:
    turns = (Turn("Look at it.", "Yes, I see."), Turn(question, answer))
    return Conversation("one", kind, None, turns)


def frame_times(frames: int, apart: float = 1.5) -> list[float]:
    return [0.25 + apart * frame for frame in range(frames)]


def rendered_sample(
    checkpoint: VideoTextCheckpoint,
    kind: ConversationKind,
    *,
    size: tuple[int, int] = (90, 151),
    question: str = "What is it?",
    answer: str = "A dog.",
    answered: bool = True,
    apart: float = 1.5,
    generator: torch.Generator,
) -> tuple[RenderedConversation, dict[str, torch.Tensor]]:
    """The tokens, and `pixels` (F, 3, H, W) and `seconds` (F,) unless of kind text."""
    shape = checkpoint.shape(kind, *size)
    times = frame_times(shape.frames, apart) if shape and kind == "video" else []
    text = conversation(kind, question, answer)
    rendered = checkpoint.tokenize_conversation(text, shape, times, include_answer=answered)
    if shape is None:
        return rendered, {}
    size3 = (shape.frames, 3, shape.height, shape.width)
    media = {"pixels": torch.randint(0, 256, size3, dtype=torch.uint8, generator=generator)}
    if kind == "video":
        media["seconds"] = torch.tensor(times)
    return rendered, media


def batched(
    samples: Sequence[tuple[RenderedConversation, Mapping[str, torch.Tensor]]],
    *,
    extra: int = 0,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """One batch, padded on the right to the longest and `extra` more."""
    length = max(len(rendered) for rendered, _ in samples) + extra
    answers = max(rendered.num_answer_tokens for rendered, _ in samples) + extra
    rows = [
        {
            **conversation_to_tensors(
                rendered,
                length=length,
                num_answers=answers,
                instruction_length=None,
                pad_token_id=pad,
            ),
            **media,
        }
        for rendered, media in samples
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def picture(height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """A smooth image, uint8 (1, 3, height, width)."""
    coarse = torch.rand(1, 3, height // 8 + 1, width // 8 + 1, generator=generator) * 255
    smooth: Any = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return smooth.round().clamp(0, 255).to(torch.uint8)
