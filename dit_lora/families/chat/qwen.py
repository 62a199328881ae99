"""Pictures of Qwen2.5-VL and Qwen3-VL: any size in steps of 28 or 32 pixels, two frames per patch.

Shapes: B batch, L tokens, F frames, H and W pixels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from dit_lora.config.data import VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.families.chat.layouts import CLIP_MEAN, CLIP_STD, HALF, Fit, Tensors, get_token_text
from dit_lora.families.chat.views import PixelNormalization, copy_to_device, read_processor_config, split_patches


@dataclass(frozen=True)
class PixelLimits:
    """Minimum and maximum number of pixels of a picture (Qwen3-VL: of all frames of a video together)."""

    min_pixels: int
    max_pixels: int

    @classmethod
    def from_config(cls, processor: Mapping[str, Any], default: tuple[int, int]) -> "PixelLimits":
        # Older processor configs have min_pixels and max_pixels; newer ones have the same numbers under `size`.
        size = processor.get("size") or {}
        lower_limit = processor.get("min_pixels") or size.get("shortest_edge") or default[0]
        return cls(lower_limit, processor.get("max_pixels") or size.get("longest_edge") or default[1])


@dataclass(frozen=True)
class QwenLayout:
    """Qwen2.5-VL, or with `has_timestamps` Qwen3-VL, whose frames come in pairs, each with its time.

    A picture has at most data.height x data.width pixels, and at least the checkpoint's minimum, unless that is
    larger. Qwen2.5-VL is told the pace of a video by the seconds between its frames: `second_per_grid_ts`. Source:
    transformers/models/qwen2_vl/video_processing_qwen2_vl.py, image_processing_pil_qwen2_vl.py,
    qwen3_vl/video_processing_qwen3_vl.py, processing_qwen3_vl.py. As there, the `<|vision_start|>` and
    `<|vision_end|>` of Qwen3-VL's chat template are kept around those of its frames.
    """

    patch_size: int
    merge_size: int
    frames_per_patch: int
    image_token_id: int
    video_token_id: int
    image_token: str
    video_token: str
    normalize_image: PixelNormalization
    normalize_video: PixelNormalization
    image_pixel_limits: PixelLimits
    video_pixel_limits: PixelLimits
    has_timestamps: bool
    fit: ClassVar[Fit] = "stretch"
    has_frame_times: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: Any, path: Path, tokenizer: Any) -> "QwenLayout":
        vision, third = config.vision_config, config.model_type == "qwen3_vl"
        image, video = read_processor_config(path, "image"), read_processor_config(path, "video")
        step = vision.patch_size * vision.spatial_merge_size
        mean, std = (HALF, HALF) if third else (CLIP_MEAN, CLIP_STD)
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            frames_per_patch=vision.temporal_patch_size,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            image_token=get_token_text(tokenizer, config.image_token_id),
            video_token=get_token_text(tokenizer, config.video_token_id),
            normalize_image=PixelNormalization.from_processor_config(image, mean, std),
            normalize_video=PixelNormalization.from_processor_config(video, mean, std),
            # Defaults of the processor classes.
            image_pixel_limits=PixelLimits.from_config(image, (56 * 56, 28 * 28 * 1280)),
            video_pixel_limits=PixelLimits.from_config(video, (128 * step**2, 768 * step**2)),
            has_timestamps=third,
        )

    @property
    def default_picture_side(self) -> int:
        # 16 merged patches: 448 pixels with Qwen2.5-VL's sizes, 512 with Qwen3-VL's.
        return 16 * self.patch_size * self.merge_size

    def size_error(self, height: int, width: int) -> str | None:
        step = self.patch_size * self.merge_size
        return f"at least {step} pixels a side" if min(height, width) < step else None

    def shape(self, frames: int, height: int, width: int, budget: tuple[int, int]) -> VideoShape:
        """Size at which Qwen sees a picture. Raises `DitLoraError` if one side is more than 200 times the other."""
        if max(height, width) > 200 * min(height, width):
            raise DitLoraError(f"a picture of {height}x{width} is too narrow; its sides may differ by a factor of 200")
        # Qwen3-VL counts the pixels of all frames of a video together, Qwen2.5-VL those of one frame.
        limits, pictures = self.image_pixel_limits, 1
        if frames > 1:
            limits, pictures = self.video_pixel_limits, frames if self.has_timestamps else 1
        max_pixels = min(limits.max_pixels, budget[0] * budget[1] * pictures)
        sides = self._compute_smart_size(height, width, pictures, min(limits.min_pixels, max_pixels), max_pixels)
        return VideoShape(frames, *sides)

    def get_media_placeholder(self, frames: int) -> str:
        return _wrap_vision_tokens(self.video_token if frames > 1 else self.image_token)

    def build_media_token_text(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        # After merging, each step x step square of pixels is one token, and `size` frames share theirs.
        step, size = self.patch_size * self.merge_size, self.frames_per_patch
        count = (shape.height // step) * (shape.width // step)
        if shape.frames == 1:
            return _wrap_vision_tokens(self.image_token * count)
        if not self.has_timestamps:
            return _wrap_vision_tokens(self.video_token * (-(-shape.frames // size) * count))
        # Repeat the last time, as the last frame is repeated to fill its group.
        padded = [*seconds, *[seconds[-1]] * (-shape.frames % size)]
        # Mean time of the first and last frame of each group: Qwen3VLProcessor._calculate_timestamps.
        times = [(padded[start] + padded[start + size - 1]) / 2 for start in range(0, len(padded), size)]
        frames = (f"<{time:.1f} seconds>{_wrap_vision_tokens(self.video_token * count)}" for time in times)
        return _wrap_vision_tokens("".join(frames))

    def build_model_inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        batch, frames, _, height, width = pixels.shape
        kind, name = ("image", "pixel_values") if frames == 1 else ("video", "pixel_values_videos")
        normalise = self.normalize_image if frames == 1 else self.normalize_video
        # (B, patches, 3 * frames_per_patch * patch**2)
        patch_tensors = split_patches(
            normalise(pixels), side=self.patch_size, merge=self.merge_size, frames_per_patch=self.frames_per_patch
        )
        # Time, height and width in patches. Frames are rounded up to whole groups.
        grid = (-(-frames // self.frames_per_patch), height // self.patch_size, width // self.patch_size)
        # 0 for text, 1 for images, 2 for videos: ProcessorMixin.create_mm_token_type_ids.
        types = (input_ids == self.image_token_id).int() + 2 * (input_ids == self.video_token_id).int()
        model_inputs = {
            name: patch_tensors.flatten(0, 1),
            f"{kind}_grid_thw": copy_to_device([grid] * batch, pixels.device),
            "mm_token_type_ids": types,
        }
        if frames > 1 and not self.has_timestamps:
            if seconds is None:
                raise DitLoraError("the batch has no `seconds`, by which Qwen2.5-VL counts the positions of frames")
            # (B,), the mean time between frames.
            frame_interval = (seconds[:, -1] - seconds[:, 0]) / (frames - 1)
            model_inputs["second_per_grid_ts"] = self.frames_per_patch * frame_interval
        return model_inputs

    def _compute_smart_size(
        self, height: int, width: int, num_pictures: int, min_pixels: int, max_pixels: int
    ) -> tuple[int, int]:
        """Nearest multiples of the step to a height and width.

        They are scaled if all pictures together have too many or too few pixels.
        """
        step = self.patch_size * self.merge_size
        if num_pictures > 1 and min(height, width) < step:
            scale = max(step / height, step / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / step), round(width / step)
        # Count pairs of frames here, but single frames below, as Transformers does.
        pairs = round(num_pictures / self.frames_per_patch) * self.frames_per_patch
        volume = (pairs if num_pictures > 1 else 1) * rows * columns * step**2
        if volume > max_pixels:
            scale = math.sqrt(num_pictures * height * width / max_pixels)
            rows, columns = (max(1, math.floor(side / scale / step)) for side in (height, width))
        elif volume < min_pixels:
            scale = math.sqrt(min_pixels / (num_pictures * height * width))
            rows, columns = (math.ceil(side * scale / step) for side in (height, width))
        return rows * step, columns * step


def _wrap_vision_tokens(tokens: str) -> str:
    return f"<|vision_start|>{tokens}<|vision_end|>"
