"""VideoChat2: a UMT-L video encoder, a Q-Former that reads the instruction, and a language model (arXiv 2311.17005).

A checkpoint is a folder that `dit-lora convert videochat2` makes from the released files, or `dit-lora tiny`. Prompts,
sampling and tiles follow OpenGVLab/Ask-Anything, video_chat2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from transformers import AutoTokenizer

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.data.chat.control import build_control_pattern, check_no_control_tokens
from dit_lora.data.chat.conversation import Conversation, ConversationKind
from dit_lora.data.chat.prompts import PROMPT_FORMATS, FormatName, build_instruction, render_prompt
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint, VisionSettings
from dit_lora.families.chat_options import refuse_diffusion_options
from dit_lora.families.opening import get_chat_checkpoint_folder, read_config
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.tokenizer import load_tokenizer

# ImageNet's statistics, as in the original (dataset/__init__.py).
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_INSTRUCTION_TOKENS = 512  # number of positions of the Q-Former's BERT
_TILE_SIZE = 224  # pixels per side of a tile in the original


@dataclass(frozen=True, kw_only=True)
class VideoChat2Checkpoint(ChatCheckpoint):
    """An opened VideoChat2 checkpoint, a chat model."""

    config: VideoChat2Config
    qformer_tokenizer: Any

    def apply_recipe(self, recipe: Recipe) -> Self:
        refuse_diffusion_options(recipe, supported_options=("chat.tiles",))
        return self.copy_with_vision_settings(VisionSettings.from_recipe(recipe))

    def copy_with_vision_settings(self, vision_settings: VisionSettings) -> Self:
        size = self.config.vision_config["image_size"]
        if (vision_settings.height, vision_settings.width) != (size, size):
            raise DitLoraError(
                f"data.height x data.width is {vision_settings.height}x{vision_settings.width}; "
                f"this vision encoder sees {size}x{size}"
                + (" a tile (chat.tiles)" if vision_settings.tiles else "; chat.tiles shows it more of a picture")
            )
        # The default of the prompt format with which the checkpoint was trained.
        if vision_settings.timestamps is None:
            vision_settings = replace(vision_settings, timestamps=PROMPT_FORMATS[self.prompt_format].has_timestamps)
        return replace(self, vision_settings=vision_settings)

    @property
    def model_class(self) -> Any:
        from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

        return VideoChat2ForConditionalGeneration

    @property
    def prompt_format(self) -> FormatName:
        return cast(FormatName, self.config.prompt_format)  # validated by the config

    @property
    def answer_end(self) -> str:
        """Text that ends an answer of VideoChat2 in training: a token, or plain text in Vicuna's format."""
        return PROMPT_FORMATS[self.prompt_format].answer[1].strip()

    def shape(self, kind: ConversationKind, height: int, width: int) -> VideoShape | None:
        if kind == "text":
            return None
        frames = self.vision_settings.frames if kind == "video" else 1
        rows, columns = (
            select_tile_grid(height, width, self.vision_settings.tiles) if self.vision_settings.tiles else (1, 1)
        )
        return VideoShape(frames, rows * self.vision_settings.height, columns * self.vision_settings.width)

    def tokenize_conversation(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        include_answer: bool = True,
    ) -> RenderedConversation:
        if include_answer:
            control = PROMPT_FORMATS[self.prompt_format].forbidden_texts
            check_no_control_tokens(conversation, build_control_pattern(self.tokenizer, control))
        rendered = render_prompt(
            self.prompt_format,
            conversation,
            self.tokenizer,
            self.config.media_token_id,
            self.config.num_media_tokens(shape.height, shape.width) if shape else 0,
            seconds,
            timestamps=bool(self.vision_settings.timestamps),
            include_answer=include_answer,
        )
        # The Q-Former reads the instruction only together with media.
        if not self.config.qformer_config["use_text"] or shape is None:
            return rendered
        text = build_instruction(self.prompt_format, conversation)
        ids = self.qformer_tokenizer(text, truncation=True, max_length=_MAX_INSTRUCTION_TOKENS).input_ids
        return replace(rendered, instruction=tuple(ids))

    def build_model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": batch["input_ids"]}
        if "pixels" in batch:
            pixels = batch["pixels"]
            mean, std = (pixels.new_tensor(statistic, dtype=torch.float32) for statistic in (_MEAN, _STD))
            # (B, F, 3, H, W), normalised per color channel.
            scaled = (pixels.float() / 255 - mean[:, None, None]) / std[:, None, None]
            inputs["pixel_values"] = scaled
        # (B, I), padded on the right.
        return inputs | {name: batch[name] for name in ("instruction_ids", "instruction_mask") if name in batch}

    def prompt_tensors(self, rendered: RenderedConversation) -> dict[str, torch.Tensor]:
        if not rendered.instruction:
            return {}
        ids = torch.tensor([rendered.instruction])
        return {"instruction_ids": ids, "instruction_mask": torch.ones_like(ids)}


def select_tile_grid(height: int, width: int, max_tiles: int) -> tuple[int, int]:
    """Rows and columns of at most `max_tiles` tiles, with the aspect ratio nearest to the picture's.

    Ties go to the smaller grid, unless the picture has more than half of the larger grid's pixels (with tiles of 224 x
    224), as in dataset/hd_utils.py.
    """
    grids = [(r, c) for r in range(1, max_tiles + 1) for c in range(1, max_tiles + 1) if r * c <= max_tiles]
    best, min_distance = (1, 1), float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        if distance < min_distance:
            best, min_distance = (rows, columns), distance
        elif distance == min_distance and height * width > 0.5 * _TILE_SIZE**2 * rows * columns:
            best = (rows, columns)
    return best


def open_checkpoint(model: ModelConfig) -> VideoChat2Checkpoint:
    """Read config and tokenizers of a folder made by `dit-lora convert videochat2`."""
    path = get_chat_checkpoint_folder(model)
    model_type = read_config(path, "config.json", "Transformers").get("model_type")
    if model_type != "videochat2":
        raise DitLoraError(
            f"model.path: {model.path} has a {model_type} model, not a videochat2; convert the released files "
            "with dit-lora convert videochat2"
        )
    config = load_pretrained(VideoChat2Config, path)
    size = config.vision_config["image_size"]
    # Until a recipe says otherwise: the frames and size of the checkpoint's training.
    viewing = VisionSettings(config.vision_config["num_frames"], size, size)
    return VideoChat2Checkpoint(
        path=path,
        config=config,
        tokenizer=load_tokenizer(path),
        qformer_tokenizer=load_pretrained(AutoTokenizer, path / "qformer_tokenizer"),
        vision_settings=viewing,
    ).copy_with_vision_settings(viewing)
