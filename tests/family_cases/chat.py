"""A tiny chat checkpoint under test, samples of different lengths for it, and its model with an adapter.

Shapes: B batch, L tokens (padded), A answer tokens (padded), F frames, H and W pixels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import parameter_groups
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.tensors import conversation_to_tensors
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.chat_base import ChatCheckpoint, VisionSettings
from dit_lora.families.family import ChatFamily
from dit_lora.training.tasks.chat.task import select_default_targets

FAMILY_OF = {variant: name for name in CHAT_FAMILIES for variant in get_family(name).tiny_variants}
"""Every tiny variant."""
SIDES = {
    "videochat2-mistral": 32,
    "videochat2-vicuna": 32,
    "videochat2-phi3": 32,
    "videochat2-hd": 32,
    "llava-next-video": 56,
    "qwen2.5-vl": 84,
    "qwen3-vl": 96,
    "smolvlm2": 64,
    "internvl": 112,
}
"""data.height and data.width."""
TURNS = (
    (Turn("What is it?", "A dog.", "Watch it."), Turn("Why?", "It rains, and nobody saw it.")),
    (Turn("Which way does it move, left or right?", "Right", "Watch the video and answer."),),
    (Turn("Is it red?", "No, it is a blue square.", "Look."),),
)


class Sample(NamedTuple):
    rendered: RenderedConversation
    media: dict[str, torch.Tensor]
    """`pixels` (F, 3, H, W), and of a video `seconds` (F,)."""


class ChatSubject(NamedTuple):
    variant: str
    family: ChatFamily
    checkpoint: ChatCheckpoint

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return self.checkpoint.load_model(dtype)

    def samples(self, kind: ConversationKind = "video", *, answered: bool = True) -> list[Sample]:
        """Three that differ in text, pixels and length."""
        generator, rendered_samples = torch.Generator().manual_seed(3), []
        shape = self.checkpoint.shape(kind, 90, 151)
        for number, turns in enumerate(TURNS):
            media: dict[str, torch.Tensor] = {}
            seconds: tuple[float, ...] = ()
            if shape is not None:
                size = (shape.frames, 3, shape.height, shape.width)
                noise = torch.randint(0, 256, size, generator=generator)
                media["pixels"] = noise.to(torch.uint8)
            if shape is not None and kind == "video":
                seconds = tuple((0.25 + 0.5 * number) * (1 + frame) for frame in range(shape.frames))
                media["seconds"] = torch.tensor(seconds)
            conversation = Conversation(str(number), kind, None, turns)
            rendered = self.checkpoint.tokenize_conversation(conversation, shape, seconds, include_answer=answered)
            rendered_samples.append(Sample(rendered, media))
        return rendered_samples


def open_chat(variant: str, path: Path) -> ChatSubject:
    """The checkpoint, shown three frames."""
    family, side = get_family(FAMILY_OF[variant]), SIDES[variant]
    opened_checkpoint = family.open(ModelConfig(family=family.name, path=str(path)))
    tiles = 4 if variant == "videochat2-hd" else None
    return ChatSubject(
        variant,
        family,
        opened_checkpoint.copy_with_vision_settings(VisionSettings(3, side, side, tiles)),
    )


def padded(samples: Sequence[Sample], *, extra: int = 0, pad: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One batch, padded on the right to the longest and `extra` more."""
    length, answers, instruction_length = (
        max(count(sample.rendered) for sample in samples) + extra
        for count in (
            len,
            lambda sample: sample.num_answer_tokens,
            lambda sample: len(sample.instruction),
        )
    )
    reads = any(sample.rendered.instruction for sample in samples)
    rows = [
        {
            **conversation_to_tensors(
                sample.rendered,
                length=length,
                num_answers=answers,
                instruction_length=instruction_length if reads else None,
                pad_token_id=pad,
            ),
            **sample.media,
        }
        for sample in samples
    ]
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def adapted(subject: ChatSubject, *, trained: bool = True, base: bool = True) -> Any:
    """The model with LoRA and, with `base`, connector and backbone training; `trained`: all of it moved a little."""
    model, family = subject.model(), subject.family
    targets = select_default_targets(family, model)
    attach_lora(model, LoraConfig(rank=4, alpha=7), targets, seed=0, submodules=family.lora_parent_modules)
    if base:
        patterns = family.group_patterns
        parameter_groups(model, adapter=1e-3, connector=1e-4, backbone=1e-5, patterns=patterns)
    if trained:
        move(model)
    return model


def move(model: nn.Module) -> None:
    """As if it had trained; LoRA more than what is not zero at the start."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.2 if ".lora_B." in name else 0.02
                parameter += scale * torch.randn(parameter.shape, generator=generator)
