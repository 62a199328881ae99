"""Differences between the model types: sizes of pictures, their placeholder text, and the tensors made from them.

This reimplements the processors of Transformers. Its video processors need torchvision; these only need torch. A video
of one frame is an image.

Shapes: B batch, L tokens, F frames, V views of one picture, H and W pixels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers.image_processing_utils import select_best_resolution

from dit_lora.config.data import VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.families.chat.views import (
    PixelNormalization,
    copy_to_device,
    read_processor_config,
    resize_pixels,
    split_tiles,
    split_tiles_with_whole,
)
from dit_lora.families.chat_base import Fit

Tensors = dict[str, torch.Tensor]
# Defaults of Transformers' image processors, for checkpoints whose processor config has no values.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


class PictureLayout(Protocol):
    """Protocol for how a model type resizes images and places them in the prompt."""

    fit: ClassVar[Fit]
    has_frame_times: ClassVar[bool]
    """True if the model is told the frame times, in the prompt or through positions."""

    @property
    def default_picture_side(self) -> int:
        """Side length in pixels that recipes usually set as data.height and data.width for a model type."""

    def size_error(self, height: int, width: int) -> str | None:
        """Error message that names valid values if these data.height and data.width are invalid.

        None if they are valid.
        """

    def shape(self, frames: int, height: int, width: int, budget: tuple[int, int]) -> VideoShape:
        """Size at which the model sees pictures stored as height x width; `budget` is data.height and data.width."""

    def get_media_placeholder(self, frames: int) -> str:
        """Placeholder that the chat template writes for a picture or video. `build_media_token_text` replaces it."""

    def build_media_token_text(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        """Prompt text of a picture or video of this shape, with the tokens that stand for the model's features."""

    def build_model_inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        """The chat model's arguments except `input_ids`, from uint8 pixels (B, F, 3, H, W) and frame times (B, F)."""


@dataclass(frozen=True, kw_only=True)
class SquareFrameLayout(ABC):
    """Base class of layouts with square frames of one size, and images that are tiled into such squares."""

    # Side of a frame or tile in pixels, the input size of the vision encoder.
    side: int
    image_token: str
    normalize_image: PixelNormalization
    normalize_video: PixelNormalization
    fit: ClassVar[Fit] = "stretch"
    has_frame_times: ClassVar[bool] = False

    @property
    def default_picture_side(self) -> int:
        return self.side

    def size_error(self, height: int, width: int) -> str | None:
        if height % self.side or width % self.side:
            square = f"{self.side}x{self.side}"
            return f"multiples of {self.side}: frames have {square}, images that many tiles"
        return None

    def shape(self, frames: int, height: int, width: int, budget: tuple[int, int]) -> VideoShape:
        # Videos are never tiled: every frame is one square.
        if frames > 1:
            return VideoShape(frames, self.side, self.side)
        return VideoShape(1, *self._compute_scaled_image_size(height, width, budget))

    def get_media_placeholder(self, frames: int) -> str:
        return "<video>" if frames > 1 else self.image_token

    @abstractmethod
    def _compute_scaled_image_size(self, height: int, width: int, budget: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image stored as height x width, after scaling to the model's limits."""


@dataclass(frozen=True, kw_only=True)
class LlavaNextVideoLayout(SquareFrameLayout):
    """LLaVA-NeXT-Video: 336x336 frames, pooled by 2x2; images in tiles at the best fitting size (anyres).

    An image always takes three to six views, whatever the budget, because the model has no smaller sizes: at least
    1176 tokens. Source: transformers/models/llava_next_video/processing_llava_next_video.py,
    llava_next/image_processing_pil_llava_next.py.
    """

    # Pixels per side of a patch, and the stride by which a video frame's features are pooled.
    patch_size: int
    pool_stride: int
    pinpoints: tuple[tuple[int, int], ...]
    """Sizes (height, width) at which images are tiled."""
    video_token: str
    fit: ClassVar[Fit] = "cover"

    @classmethod
    def from_config(cls, config: Any, path: Path, tokenizer: Any) -> "LlavaNextVideoLayout":
        vision = config.vision_config
        return cls(
            side=vision.image_size,
            patch_size=vision.patch_size,
            pool_stride=config.spatial_pool_stride,
            pinpoints=tuple((height, width) for height, width in config.image_grid_pinpoints),
            image_token=get_token_text(tokenizer, config.image_token_id),
            video_token=get_token_text(tokenizer, config.video_token_id),
            normalize_image=PixelNormalization.from_processor_config(
                read_processor_config(path, "image"), CLIP_MEAN, CLIP_STD
            ),
            normalize_video=PixelNormalization.from_processor_config(
                read_processor_config(path, "video"), CLIP_MEAN, CLIP_STD
            ),
        )

    def size_error(self, height: int, width: int) -> str | None:
        if (height, width) != (self.side, self.side):
            return f"{self.side}x{self.side}, the one size of frames that it takes"
        return None

    def get_media_placeholder(self, frames: int) -> str:
        return self.video_token if frames > 1 else self.image_token

    def build_media_token_text(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        # Features per side of one square.
        grid = self.side // self.patch_size
        # Video frames are pooled by `pool_stride` in both directions and have no newline features.
        if shape.frames > 1:
            return self.video_token * (shape.frames * (grid // self.pool_stride) ** 2)
        height, width = self._select_canvas(shape.height, shape.width)
        # Size of the feature grid of all tiles together.
        rows, columns = height // self.side * grid, width // self.side * grid
        # Features of the padding are removed, and each row ends with a learned newline feature: unpad_image.
        if shape.width / shape.height > columns / rows:
            unpadded = int(round(shape.height * (columns / shape.width), 7))
            rows -= (rows - unpadded) // 2 * 2
        else:
            unpadded = int(round(shape.width * (rows / shape.height), 7))
            columns -= (columns - unpadded) // 2 * 2
        # The whole image, the unpadded tiles, and one newline feature per row.
        return self.image_token * (grid**2 + rows * columns + rows)

    def build_model_inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        # (B, F, 3, side, side)
        if pixels.shape[1] > 1:
            return {"pixel_values_videos": self.normalize_video(pixels)}
        picture = pixels[:, 0]
        size = (picture.shape[-2], picture.shape[-1])
        # `inside` is the part of the canvas that the picture covers without changing its aspect ratio.
        canvas, inner_size = self._select_canvas(*size), self._compute_scaled_image_size(*size, size)
        top, left = (canvas[0] - inner_size[0]) // 2, (canvas[1] - inner_size[1]) // 2
        # Center the scaled picture on a black canvas that splits into whole tiles.
        padded = picture.new_zeros(len(picture), 3, *canvas)
        padded[..., top : top + inner_size[0], left : left + inner_size[1]] = resize_pixels(picture, *inner_size)
        # (B, 1, 3, side, side) and (B, tiles, 3, side, side)
        views = [resize_pixels(picture, self.side, self.side)[:, None], split_tiles(padded, self.side, self.side)]
        return {
            "pixel_values": self.normalize_image(torch.cat(views, dim=1)),
            "image_sizes": copy_to_device([size] * len(picture), pixels.device),
        }

    def _select_canvas(self, height: int, width: int) -> tuple[int, int]:
        return select_best_resolution((height, width), list(self.pinpoints))

    def _compute_scaled_image_size(self, height: int, width: int, budget: tuple[int, int]) -> tuple[int, int]:
        """The largest size with the picture's aspect ratio that fits its canvas (get_patch_output_size)."""
        canvas = self._select_canvas(height, width)
        # The side that needs the smaller scale fills the canvas; the other one is rounded up, at most to the canvas.
        height_scale, width_scale = canvas[0] / height, canvas[1] / width
        if width_scale < height_scale:
            return min(math.ceil(height * width_scale), canvas[0]), canvas[1]
        return canvas[0], min(math.ceil(width * height_scale), canvas[1])


@dataclass(frozen=True, kw_only=True)
class SmolVLMLayout(SquareFrameLayout):
    """SmolVLM2: square frames, each with its time; images as square tiles plus the whole image.

    Images are scaled so that their longer side fits data.height and data.width, at most the checkpoint's limit. The
    whole image is downscaled bicubically, as Transformers does on a GPU; its Pillow version uses Lanczos. Source:
    transformers/models/smolvlm/processing_smolvlm.py, image_processing_pil_smolvlm.py.
    """

    max_long_side: int
    """Maximum length of an image's longer side, in pixels."""
    tokens_per_tile: int
    """Number of tokens per tile."""
    has_frame_times: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: Any, path: Path, tokenizer: Any) -> "SmolVLMLayout":
        image = read_processor_config(path, "image")
        vision = config.vision_config
        side = image.get("max_image_size", {}).get("longest_edge", vision.image_size)
        # Without splitting, an image is a single tile.
        splits = image.get("do_image_splitting", True)
        return cls(
            side=side,
            max_long_side=image.get("size", {}).get("longest_edge", 4 * side) if splits else side,
            # Patches of one tile, merged by `scale_factor` in both directions.
            tokens_per_tile=int((side // vision.patch_size) ** 2 / config.scale_factor**2),
            image_token=get_token_text(tokenizer, config.image_token_id),
            normalize_image=PixelNormalization.from_processor_config(image, HALF, HALF),
            normalize_video=PixelNormalization.from_processor_config(read_processor_config(path, "video"), HALF, HALF),
        )

    def _compute_scaled_image_size(self, height: int, width: int, budget: tuple[int, int]) -> tuple[int, int]:
        # The largest multiple of the tile that both the recipe and the checkpoint allow.
        long_side = min(self.max_long_side, max(budget) // self.side * self.side)
        if long_side <= self.side:
            return self.side, self.side
        # _resize_output_size_rescale_to_max_len followed by resize_for_vision_encoder.
        if width >= height:
            size = (_round_up_to_even(int(long_side / (width / height))), long_side)
        else:
            size = (long_side, _round_up_to_even(int(long_side * (width / height))))
        # Round up to whole tiles, at least one in each direction.
        rows, columns = (max(1, math.ceil(value / self.side)) for value in size)
        return rows * self.side, columns * self.side

    def build_media_token_text(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        marker, picture = "<fake_token_around_image>", self.image_token * self.tokens_per_tile
        # The whole image, downscaled, comes last. Frames of a video have only this part.
        overview = f"{marker}<global-img>{picture}{marker}"
        if shape.frames > 1:
            frames = [f"\nFrame from {_format_minutes(second)}:{overview}" for second in seconds]
            return (
                f"You are provided the following series of {spell_number(shape.frames)} frames from a "
                f"{_format_hours(seconds[-1])} [H:MM:SS] video.\n{''.join(frames)}\n\n"
            )
        rows, columns = shape.height // self.side, shape.width // self.side
        if rows * columns == 1:
            return overview
        # One line of text per row of tiles; rows and columns count from 1, as in the tokenizer's special tokens.
        lines = [
            "".join(f"{marker}<row_{row}_col_{column}>{picture}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        return "\n".join(lines) + f"\n\n{overview}"

    def build_model_inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        if pixels.shape[1] > 1:
            return {"pixel_values": self.normalize_video(pixels)}
        return {"pixel_values": self.normalize_image(split_tiles_with_whole(pixels[:, 0], self.side))}


@dataclass(frozen=True, kw_only=True)
class InternVLLayout(SquareFrameLayout):
    """InternVL3: 448x448 frames; images in as many such tiles as data.height x data.width allows, and whole.

    Source: transformers/models/internvl/processing_internvl.py, got_ocr2/image_processing_pil_got_ocr2.py.
    """

    tokens_per_tile: int
    """Number of tokens per tile."""
    max_tiles: int
    min_tiles: int

    @classmethod
    def from_config(cls, config: Any, path: Path, tokenizer: Any) -> "InternVLLayout":
        image = read_processor_config(path, "image")
        (side, _), (patch, _) = config.vision_config.image_size, config.vision_config.patch_size
        return cls(
            side=side,
            tokens_per_tile=int((side // patch) ** 2 * config.downsample_ratio**2),
            max_tiles=image.get("max_patches", 12),
            min_tiles=image.get("min_patches", 1),
            image_token=get_token_text(tokenizer, config.image_token_id),
            normalize_image=PixelNormalization.from_processor_config(image, IMAGENET_MEAN, IMAGENET_STD),
            normalize_video=PixelNormalization.from_processor_config(
                read_processor_config(path, "video"), IMAGENET_MEAN, IMAGENET_STD
            ),
        )

    def _compute_scaled_image_size(self, height: int, width: int, budget: tuple[int, int]) -> tuple[int, int]:
        # Number of tiles that data.height x data.width holds.
        num_tiles = max(budget[0] * budget[1] // self.side**2, self.min_tiles)
        rows, columns = self._select_grid(height, width, min(num_tiles, self.max_tiles))
        return rows * self.side, columns * self.side

    def build_media_token_text(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        picture = self.image_token * self.tokens_per_tile
        if shape.frames > 1:
            frames = range(1, shape.frames + 1)
            return "\n".join(f"Frame{frame}: <img>{picture}</img>" for frame in frames)
        # Several tiles are followed by the whole image, one tile more.
        count = shape.height * shape.width // self.side**2
        return f"<img>{picture * (count if count == 1 else count + 1)}</img>"

    def build_model_inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        # (B, F, ...) or (B, V, ...) -> (B * F, ...): the model takes a flat list of tiles.
        if pixels.shape[1] > 1:
            return {"pixel_values": self.normalize_video(pixels).flatten(0, 1)}
        return {"pixel_values": self.normalize_image(split_tiles_with_whole(pixels[:, 0], self.side)).flatten(0, 1)}

    def _select_grid(self, height: int, width: int, max_tiles: int) -> tuple[int, int]:
        """Rows and columns of the tile grid whose aspect ratio is nearest to a picture's.

        Ties go to the largest grid that the picture fills by half.
        """
        # Smaller grids come first, so that a tie can replace them by a larger one.
        best, min_distance = (1, 1), math.inf
        grids = [(rows, cols) for cols in range(1, max_tiles + 1) for rows in range(1, max_tiles // cols + 1)]
        for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            if rows * columns < self.min_tiles:
                continue
            # Distance between the aspect ratios (width / height) of picture and grid.
            distance = abs(width / height - columns / rows)
            is_half_filled = height * width > 0.5 * self.side**2 * rows * columns
            if distance < min_distance or (distance == min_distance and is_half_filled):
                best, min_distance = (rows, columns), distance
        return best


def get_token_text(tokenizer: Any, token_id: int) -> str:
    """Text of a token id from the model's config. Raises `DitLoraError` if the tokenizer does not have this token."""
    # The text must encode to exactly this id, or the placeholder would become several ordinary tokens.
    text = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    if not isinstance(text, str) or tokenizer.encode(text, add_special_tokens=False) != [token_id]:
        raise DitLoraError(
            f"the tokenizer has no token {token_id}, which config.json says stands for pictures; got "
            f"{text!r}: download tokenizer and config of the same revision"
        )
    return text


def spell_number(number: int) -> str:
    """A number from 0 to 999 in English, as written by num2words, which SmolVLM's processor uses."""
    small = [
        *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
        *("ten", "eleven", "twelve", "thirteen", "fourteen"),
        *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
    ]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    # num2words writes British English: "one hundred and five".
    if number >= 100:
        remainder = f" and {spell_number(number % 100)}" if number % 100 else ""
        return f"{small[number // 100]} hundred{remainder}"
    if number >= 20:
        unit = f"-{small[number % 10]}" if number % 10 else ""
        return f"{tens[number // 10 - 2]}{unit}"
    return small[number]


def _round_up_to_even(side: int) -> int:
    return side + side % 2


def _format_minutes(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _format_hours(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
