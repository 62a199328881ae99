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
from dit_lora.data.chat.control import control_pattern, refuse_control
from dit_lora.data.chat.conversation import Conversation, Kind
from dit_lora.data.chat.prompts import PROMPT_FORMATS, FormatName, instruction_text, render_prompt
from dit_lora.data.chat.rendered import Rendered
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import ChatCheckpoint, Viewing
from dit_lora.families.chat_options import refuse_options_of_diffusion
from dit_lora.families.opening import local_chat_checkpoint, read_config
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.tokenizer import load_tokenizer

# ImageNet's statistics, as in the original (dataset/__init__.py).
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST_INSTRUCTION = 512  # number of positions of the Q-Former's BERT
_TILE = 224  # pixels per side of a tile in the original


@dataclass(frozen=True, kw_only=True)
class VideoChat2Checkpoint(ChatCheckpoint):
    """An opened VideoChat2 folder."""

    config: VideoChat2Config
    qformer_tokenizer: Any

    def for_recipe(self, recipe: Recipe) -> Self:
        refuse_options_of_diffusion(recipe, takes=("chat.tiles",))
        return self.viewing(Viewing.of(recipe))

    def viewing(self, how: Viewing) -> Self:
        size = self.config.vision_config["image_size"]
        if (how.height, how.width) != (size, size):
            raise DitLoraError(
                f"data.height x data.width is {how.height}x{how.width}; this vision encoder sees {size}x{size}"
                + (
                    " a tile (chat.tiles)"
                    if how.tiles
                    else "; chat.tiles shows it more of a picture"
                )
            )
        # The default of the prompt format with which the checkpoint was trained.
        if how.timestamps is None:
            how = replace(how, timestamps=PROMPT_FORMATS[self.prompt_format].timestamps)
        return replace(self, how=how)

    @property
    def model_class(self) -> Any:
        from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

        return VideoChat2ForConditionalGeneration

    @property
    def prompt_format(self) -> FormatName:
        return cast(FormatName, self.config.prompt_format)  # validated by the config

    @property
    def answer_end(self) -> str:
        """Text that ends an answer in training: a token, or plain text in Vicuna's format."""
        return PROMPT_FORMATS[self.prompt_format].answer[1].strip()

    def shape(self, kind: Kind, height: int, width: int) -> VideoShape | None:
        if kind == "text":
            return None
        frames = self.how.frames if kind == "video" else 1
        rows, columns = tile_grid(height, width, self.how.tiles) if self.how.tiles else (1, 1)
        return VideoShape(frames, rows * self.how.height, columns * self.how.width)

    def render(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        answered: bool = True,
    ) -> Rendered:
        if answered:
            control = PROMPT_FORMATS[self.prompt_format].control
            refuse_control(conversation, control_pattern(self.tokenizer, control))
        rendered = render_prompt(
            self.prompt_format,
            conversation,
            self.tokenizer,
            self.config.media_token_id,
            self.config.num_media_tokens(shape.height, shape.width) if shape else 0,
            seconds,
            timestamps=bool(self.how.timestamps),
            answered=answered,
        )
        # The Q-Former reads the instruction only together with media.
        if not self.config.qformer_config["use_text"] or shape is None:
            return rendered
        text = instruction_text(self.prompt_format, conversation)
        ids = self.qformer_tokenizer(text, truncation=True, max_length=_MOST_INSTRUCTION).input_ids
        return replace(rendered, instruction=tuple(ids))

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": batch["input_ids"]}
        if "pixels" in batch:
            pixels = batch["pixels"]
            mean, std = (
                pixels.new_tensor(statistic, dtype=torch.float32) for statistic in (_MEAN, _STD)
            )
            # (B, F, 3, H, W), normalised per color channel.
            scaled = (pixels.float() / 255 - mean[:, None, None]) / std[:, None, None]
            inputs["pixel_values"] = scaled
        # (B, I), padded on the right.
        return inputs | {
            name: batch[name] for name in ("instruction_ids", "instruction_mask") if name in batch
        }

    def prompt_tensors(self, rendered: Rendered) -> dict[str, torch.Tensor]:
        if not rendered.instruction:
            return {}
        ids = torch.tensor([rendered.instruction])
        return {"instruction_ids": ids, "instruction_mask": torch.ones_like(ids)}


def tile_grid(height: int, width: int, most: int) -> tuple[int, int]:
    """Rows and columns of at most `most` tiles, with the aspect ratio nearest to the picture's.

    Ties go to the smaller grid, unless the picture has more than half of the larger grid's pixels (with tiles of 224 x
    224), as in dataset/hd_utils.py.
    """
    grids = [(r, c) for r in range(1, most + 1) for c in range(1, most + 1) if r * c <= most]
    best, min_distance = (1, 1), float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        if distance < min_distance:
            best, min_distance = (rows, columns), distance
        elif distance == min_distance and height * width > 0.5 * _TILE**2 * rows * columns:
            best = (rows, columns)
    return best


def open_checkpoint(model: ModelConfig) -> VideoChat2Checkpoint:
    """Read config and tokenizers of a folder made by `dit-lora convert videochat2`."""
    path = local_chat_checkpoint(model)
    model_type = read_config(path, "config.json", "Transformers").get("model_type")
    if model_type != "videochat2":
        raise DitLoraError(
            f"model.path: {model.path} holds a {model_type} model, not a videochat2; make one of the released files "
            "with dit-lora convert videochat2"
        )
    config = load_pretrained(VideoChat2Config, path)
    size = config.vision_config["image_size"]
    # Until a recipe says otherwise: the frames and size of the checkpoint's training.
    viewing = Viewing(config.vision_config["num_frames"], size, size)
    return VideoChat2Checkpoint(
        path=path,
        config=config,
        tokenizer=load_tokenizer(path),
        qformer_tokenizer=load_pretrained(AutoTokenizer, path / "qformer_tokenizer"),
        how=viewing,
    ).viewing(viewing)
