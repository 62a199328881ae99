"""Transformers video chat models: frames, placeholder tokens and answers in each model's own format.

Supported are LLaVA-NeXT-Video (the models of arXiv 2407.07895), Qwen2.5-VL, Qwen3-VL, SmolVLM2 and InternVL3, in their
Transformers versions. Pictures are preprocessed on the device, without torchvision.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoTokenizer

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.config.records import ChatTemplateFile, read_typed_json
from dit_lora.data.chat.control import build_control_pattern, check_no_control_tokens
from dit_lora.data.chat.conversation import Conversation, ConversationKind
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.template import MediaPlaceholderText, render_template
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.chat.layouts import InternVLLayout, LlavaNextVideoLayout, PictureLayout, SmolVLMLayout
from dit_lora.families.chat.qwen import QwenLayout
from dit_lora.families.chat_base import ChatCheckpoint, VisionSettings
from dit_lora.families.chat_options import refuse_diffusion_options
from dit_lora.families.opening import get_chat_checkpoint_folder, read_config

_DEFAULT_FRAMES = 8  # default without a recipe
LAYOUTS: Mapping[str, Callable[[Any, Path, Any], PictureLayout]] = {
    "llava_next_video": LlavaNextVideoLayout.from_config,
    "qwen2_5_vl": QwenLayout.from_config,
    "qwen3_vl": QwenLayout.from_config,
    "smolvlm": SmolVLMLayout.from_config,
    "internvl": InternVLLayout.from_config,
}
"""Layouts by the `model_type` in a checkpoint's config.json."""


@dataclass(frozen=True, slots=True)
class TimedRenderedConversation(RenderedConversation):
    """A tokenized conversation with its frame times, from which some models compute positions."""

    # Empty for images and text.
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the tokenizer that applies it."""

    tokenizer: Any
    text: str

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=self.text, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )


@dataclass(frozen=True, kw_only=True)
class VideoTextCheckpoint(ChatCheckpoint):
    """An opened checkpoint of a video chat model that Transformers supports."""

    layout: PictureLayout

    @property
    def model_class(self) -> Any:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self.config)]

    def apply_recipe(self, recipe: Recipe) -> Self:
        refuse_diffusion_options(recipe)
        return self.copy_with_vision_settings(VisionSettings.from_recipe(recipe))

    def copy_with_vision_settings(self, vision_settings: VisionSettings) -> Self:
        # The layout decides which sizes its vision encoder takes.
        problems = self.layout.size_error(vision_settings.height, vision_settings.width)
        if problems:
            raise DitLoraError(
                f"data.height x data.width is {vision_settings.height}x{vision_settings.width}; "
                f"for {self.config.model_type} give {problems}"
            )
        if vision_settings.tiles is not None:
            raise DitLoraError(f"chat.tiles: {self.config.model_type} has tiles of its own; remove it")
        # False is an error, because these models cannot work without times. None and True are the same for them.
        if vision_settings.timestamps is False and self.layout.has_frame_times:
            raise DitLoraError(
                f"chat.timestamps: false: {self.config.model_type} is always told when its frames are; remove it"
            )
        return replace(self, vision_settings=vision_settings)

    def shape(self, kind: ConversationKind, height: int, width: int) -> VideoShape | None:
        if kind == "text":
            return None
        # An image has one frame, whatever data.frames is.
        frames = self.vision_settings.frames if kind == "video" else 1
        return self.layout.shape(frames, height, width, (self.vision_settings.height, self.vision_settings.width))

    def tokenize_conversation(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        include_answer: bool = True,
    ) -> RenderedConversation:
        # Conversations with answers are training data, in which a control token would end a turn early.
        if include_answer:
            check_no_control_tokens(conversation, build_control_pattern(self.tokenizer))
        media, video = None, shape is not None and shape.frames > 1
        if shape is None:
            conversation = replace(conversation, kind="text")
        else:
            if video and self.layout.has_frame_times and len(seconds) != shape.frames:
                raise DitLoraError(
                    f"{conversation.id}: {self.config.model_type} is told when its frames are; got "
                    f"{len(seconds)} times for {shape.frames} frames"
                )
            # A video of one frame is an image.
            conversation = replace(conversation, kind="video" if video else "image")
            # The template writes a placeholder, for which one token for each of the model's features is put.
            media = MediaPlaceholderText(
                self.layout.get_media_placeholder(shape.frames), self.layout.build_media_token_text(shape, seconds)
            )
        template = ChatTemplate(self.tokenizer, self._get_template(is_video=video))
        rendered = render_template(template, self.tokenizer, conversation, media, include_answer=include_answer)
        return TimedRenderedConversation(rendered.pieces, seconds=tuple(seconds) if video else ())

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        model: Any = super().load_model(dtype)
        # Only SmolVLM casts features to the model's `dtype`.
        if self.config.model_type == "smolvlm":
            _override_dtype(model.model)
        return model

    def build_model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch. Qwen2.5-VL also needs the frame times of videos: `seconds`, (B, F)."""
        input_ids, pixels = batch["input_ids"], batch.get("pixels")
        if pixels is None:
            return {"input_ids": input_ids}
        # Pixels arrive as uint8, so they are normalised and cut on the device of the batch.
        model_inputs = self.layout.build_model_inputs(input_ids, pixels, batch.get("seconds"))
        return {"input_ids": input_ids, **model_inputs}

    def prompt_tensors(self, rendered: RenderedConversation) -> dict[str, torch.Tensor]:
        # (1, F)
        if isinstance(rendered, TimedRenderedConversation) and rendered.seconds:
            return {"seconds": torch.tensor([rendered.seconds])}
        return {}

    def _get_template(self, *, is_video: bool) -> str:
        """The chat template that a Transformers processor would use.

        SmolVLM has a separate one for videos. Otherwise the processor's comes first, then the tokenizer's.
        """
        if is_video and self.config.model_type == "smolvlm":
            from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

            return DEFAULT_CHAT_TEMPLATE
        # Older checkpoints store the processor's template in this file. A .jinja file takes precedence.
        older = self.path / "chat_template.json"
        if older.is_file() and not (self.path / "chat_template.jinja").is_file():
            return read_typed_json(older, ChatTemplateFile)["chat_template"]
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            raise DitLoraError(f"{self.path} has no chat template; download its chat_template.jinja or .json")
        return template


def open_checkpoint(model: ModelConfig) -> VideoTextCheckpoint:
    """Read a chat checkpoint's config and tokenizer. Raises `DitLoraError` for a model type without a layout."""
    path = get_chat_checkpoint_folder(model)
    # Read model_type first: AutoConfig would fail on an unknown type with a less helpful message.
    model_type = str(read_config(path, "config.json", "Transformers").get("model_type", "nameless"))
    if model_type not in LAYOUTS:
        raise DitLoraError(
            f"model.path: {model.path} has a {model_type} model; the family chat trains {', '.join(LAYOUTS)}"
        )
    config = load_pretrained(AutoConfig, path)
    tokenizer = load_pretrained(AutoTokenizer, path)
    layout = LAYOUTS[model_type](config, path, tokenizer)
    return VideoTextCheckpoint(
        path=path,
        config=config,
        tokenizer=tokenizer,
        # Until a recipe says otherwise, pictures have the size that the layout recommends.
        vision_settings=VisionSettings(_DEFAULT_FRAMES, layout.default_picture_side, layout.default_picture_side),
        fit=layout.fit,
        layout=layout,
    )


def _override_dtype(model: nn.Module) -> None:
    """Make the model's `dtype` that of its token embeddings, not of its first weight.

    A vision encoder that trains is in fp32 and comes first. SmolVLM casts image features to `dtype` and puts them
    among the embeddings (transformers, models/smolvlm/modeling_smolvlm.py).
    """
    model_class = type(model)
    dtype_property = property(lambda self: self.get_input_embeddings().weight.dtype)
    # Swap in a subclass with the same name, because `dtype` is a property of the class.
    model.__class__ = type(
        model_class.__name__, (model_class,), {"dtype": dtype_property, "__module__": model_class.__module__}
    )
