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
from dit_lora.families.chat.layouts import CLIP_MEAN, CLIP_STD, HALF, Fit, Tensors, token_text
from dit_lora.families.chat.views import Normalisation, patches, processor_config, sent


@dataclass(frozen=True)
class PixelLimits:
    """Minimum and maximum number of pixels of a picture (Qwen3-VL: of all frames of a video together)."""

    fewest: int
    most: int

    @classmethod
    def of(cls, processor: Mapping[str, Any], default: tuple[int, int]) -> "PixelLimits":
        # Older processor configs have min_pixels and max_pixels; newer ones have the same numbers under `size`.
        size = processor.get("size") or {}
        lower_limit = processor.get("min_pixels") or size.get("shortest_edge") or default[0]
        return cls(
            lower_limit, processor.get("max_pixels") or size.get("longest_edge") or default[1]
        )


@dataclass(frozen=True)
class QwenLayout:
    """Qwen2.5-VL, or with `timestamps` Qwen3-VL, whose frames come in pairs, each with its time.

    A picture has at most data.height x data.width pixels, and at least the checkpoint's minimum, unless that is
    larger. Qwen2.5-VL is told the pace of a video by the seconds between its frames: `second_per_grid_ts`. Source:
    transformers/models/qwen2_vl/video_processing_qwen2_vl.py, image_processing_pil_qwen2_vl.py,
    qwen3_vl/video_processing_qwen3_vl.py, processing_qwen3_vl.py. As there, the `<|vision_start|>` and
    `<|vision_end|>` of Qwen3-VL's chat template are kept around those of its frames.
    """

    patch: int
    merge: int
    frames_per_patch: int
    image_id: int
    video_id: int
    image_token: str
    video_token: str
    image: Normalisation
    video: Normalisation
    image_pixels: PixelLimits
    video_pixels: PixelLimits
    timestamps: bool
    fit: ClassVar[Fit] = "stretch"
    timed: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Any, path: Path, tokenizer: Any) -> "QwenLayout":
        vision, third = config.vision_config, config.model_type == "qwen3_vl"
        image, video = processor_config(path, "image"), processor_config(path, "video")
        step = vision.patch_size * vision.spatial_merge_size
        mean, std = (HALF, HALF) if third else (CLIP_MEAN, CLIP_STD)
        return cls(
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            frames_per_patch=vision.temporal_patch_size,
            image_id=config.image_token_id,
            video_id=config.video_token_id,
            image_token=token_text(tokenizer, config.image_token_id),
            video_token=token_text(tokenizer, config.video_token_id),
            image=Normalisation.of(image, mean, std),
            video=Normalisation.of(video, mean, std),
            # Defaults of the processor classes.
            image_pixels=PixelLimits.of(image, (56 * 56, 28 * 28 * 1280)),
            video_pixels=PixelLimits.of(video, (128 * step**2, 768 * step**2)),
            timestamps=third,
        )

    @property
    def native(self) -> int:
        # 16 merged patches: 448 pixels with Qwen2.5-VL's sizes, 512 with Qwen3-VL's.
        return 16 * self.patch * self.merge

    def wrong(self, height: int, width: int) -> str | None:
        step = self.patch * self.merge
        return f"at least {step} pixels a side" if min(height, width) < step else None

    def shape(self, frames: int, height: int, width: int, budget: tuple[int, int]) -> VideoShape:
        """Size of a picture for the model. Raises `DitLoraError` if one side is more than 200 times the other."""
        if max(height, width) > 200 * min(height, width):
            raise DitLoraError(
                f"a picture of {height}x{width} is too narrow; its sides may differ by a factor of 200"
            )
        # Qwen3-VL counts the pixels of all frames of a video together, Qwen2.5-VL those of one frame.
        limits, pictures = self.image_pixels, 1
        if frames > 1:
            limits, pictures = self.video_pixels, frames if self.timestamps else 1
        max_pixels = min(limits.most, budget[0] * budget[1] * pictures)
        sides = self._smart_size(
            height, width, pictures, min(limits.fewest, max_pixels), max_pixels
        )
        return VideoShape(frames, *sides)

    def placeholder(self, frames: int) -> str:
        return _between(self.video_token if frames > 1 else self.image_token)

    def expansion(self, shape: VideoShape, seconds: Sequence[float]) -> str:
        # After merging, each step x step square of pixels is one token, and `size` frames share theirs.
        step, size = self.patch * self.merge, self.frames_per_patch
        count = (shape.height // step) * (shape.width // step)
        if shape.frames == 1:
            return _between(self.image_token * count)
        if not self.timestamps:
            return _between(self.video_token * (-(-shape.frames // size) * count))
        # Repeat the last time, as the last frame is repeated to fill its group.
        padded = [*seconds, *[seconds[-1]] * (-shape.frames % size)]
        # Mean time of the first and last frame of each group: Qwen3VLProcessor._calculate_timestamps.
        times = [
            (padded[start] + padded[start + size - 1]) / 2 for start in range(0, len(padded), size)
        ]
        frames = (f"<{time:.1f} seconds>{_between(self.video_token * count)}" for time in times)
        return _between("".join(frames))

    def inputs(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, seconds: torch.Tensor | None
    ) -> Tensors:
        batch, frames, _, height, width = pixels.shape
        kind, name = ("image", "pixel_values") if frames == 1 else ("video", "pixel_values_videos")
        normalise = self.image if frames == 1 else self.video
        # (B, patches, 3 * frames_per_patch * patch**2)
        patch_tensors = patches(
            normalise(pixels),
            side=self.patch,
            merge=self.merge,
            frames_per_patch=self.frames_per_patch,
        )
        # Time, height and width in patches. Frames are rounded up to whole groups.
        grid = (-(-frames // self.frames_per_patch), height // self.patch, width // self.patch)
        # 0 for text, 1 for images, 2 for videos: ProcessorMixin.create_mm_token_type_ids.
        types = (input_ids == self.image_id).int() + 2 * (input_ids == self.video_id).int()
        model_inputs = {
            name: patch_tensors.flatten(0, 1),
            f"{kind}_grid_thw": sent([grid] * batch, pixels.device),
            "mm_token_type_ids": types,
        }
        if frames > 1 and not self.timestamps:
            if seconds is None:
                raise DitLoraError(
                    "the batch has no `seconds`, by which Qwen2.5-VL counts the positions of frames"
                )
            # (B,), the mean time between frames.
            frame_interval = (seconds[:, -1] - seconds[:, 0]) / (frames - 1)
            model_inputs["second_per_grid_ts"] = self.frames_per_patch * frame_interval
        return model_inputs

    def _smart_size(
        self, height: int, width: int, pictures: int, fewest: int, most: int
    ) -> tuple[int, int]:
        """Nearest multiples of the step, scaled if all pictures together have too many or too few pixels."""
        step = self.patch * self.merge
        if pictures > 1 and min(height, width) < step:
            scale = max(step / height, step / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / step), round(width / step)
        # Count pairs of frames here, but single frames below, as Transformers does.
        pairs = round(pictures / self.frames_per_patch) * self.frames_per_patch
        volume = (pairs if pictures > 1 else 1) * rows * columns * step**2
        if volume > most:
            scale = math.sqrt(pictures * height * width / most)
            rows, columns = (max(1, math.floor(side / scale / step)) for side in (height, width))
        elif volume < fewest:
            scale = math.sqrt(fewest / (pictures * height * width))
            rows, columns = (math.ceil(side * scale / step) for side in (height, width))
        return rows * step, columns * step


def _between(tokens: str) -> str:
    return f"<|vision_start|>{tokens}<|vision_end|>"
