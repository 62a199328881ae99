"""Qwen-Image-Edit's captions: encoded with the pictures by Qwen2.5-VL, and the room that text and pictures need."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2VLProcessor

from dit_lora.config.data import VideoShape
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Tensors
from dit_lora.families.references import as_pictures

MOST_RATIO = 8
"""Long side of a reference over its short one, at most: the room that is kept for its tokens is for these."""
_STEP = 32
# Sides of what the pipelines scale pictures to are multiples of it (calculate_dimensions).


class PictureProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` of text and pictures; that of videos, which it has too, needs torchvision.

    Pictures go through the image processor that Transformers takes for the stock one: torchvision's where that is
    installed, else Pillow's.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def load_processor(path: Path) -> PictureProcessor:
    """Load the processor of a checkpoint."""
    processor: PictureProcessor = load_pretrained(PictureProcessor, _folder(path))
    return processor


def load_pictures(path: Path) -> Any:
    """Load what prepares pictures alone: by it is known how many tokens they have."""
    return load_pretrained(AutoImageProcessor, _folder(path))


def _folder(path: Path) -> Path:
    folder = path / "processor"
    if not folder.is_dir():
        raise DitLoraError(f"{path} is not whole; fetch its folder processor again")
    return folder


def tokens_of(pictures: Any, height: int, width: int) -> int:
    """Return the number of tokens of a picture of this size."""
    patches: int = pictures.get_number_of_image_patches(height, width, {})
    return int(patches // pictures.merge_size**2)


def most_tokens(pictures: Any, area: int) -> int:
    """Return the tokens of the picture that has most, of those of at most `MOST_RATIO` that are scaled to this area."""
    return max(tokens_of(pictures, height, width) for height, width in _sizes(area))


def _sizes(area: int) -> Iterable[tuple[int, int]]:
    """Yield each width that pictures are scaled to, with the largest height beside it, and the other way round."""
    side, stretch = math.sqrt(area) / _STEP, math.sqrt(MOST_RATIO)
    for count in range(max(1, round(side / stretch)), round(side * stretch) + 1):
        # The least width that is rounded to it, and the height that goes with that.
        least = max(count - 0.5, side / stretch)
        other = min(round(side * side / least), round(side * stretch))
        yield other * _STEP, count * _STEP
        yield count * _STEP, other * _STEP


@dataclass(frozen=True)
class PictureText:
    """A `TextEncoder` of captions that are encoded with references."""

    model: str
    encode_one: Callable[[str, list[Image.Image]], Tensors]

    def __call__(self, captions: Sequence[str]) -> Tensors:
        raise DitLoraError(
            f"{self.model} encodes a caption with its references, and none were given"
        )

    @torch.no_grad()
    def with_references(
        self, caption: str, given: Sequence[torch.Tensor], shape: VideoShape
    ) -> Tensors:
        return self.encode_one(caption, as_pictures(given))
