"""Captions of Qwen-Image-Edit: encoded together with images by Qwen2.5-VL, and the number of tokens they need."""

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
from dit_lora.families.references import to_pil_images

MAX_RATIO = 8
"""Maximum ratio of a reference's long side to its short side. Token counts are reserved for images within it."""
_SIZE_STEP = 32
# The pipelines scale images to sides that are multiples of this (calculate_dimensions).


class PictureProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` for text and images, without its video processor, which needs torchvision.

    Images use the image processor that Transformers selects for the stock one: torchvision's if installed, else
    Pillow's.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def load_processor(path: Path) -> PictureProcessor:
    """Load a checkpoint's Qwen2-VL processor for text and images."""
    return load_pretrained(PictureProcessor, _processor_folder(path))


def load_image_processor(path: Path) -> Any:
    """Load only a checkpoint's image processor, which tells how many tokens an image has."""
    return load_pretrained(AutoImageProcessor, _processor_folder(path))


def _processor_folder(path: Path) -> Path:
    folder = path / "processor"
    if not folder.is_dir():
        raise DitLoraError(f"{path} is incomplete; download its folder processor again")
    return folder


def count_image_tokens(image_processor: Any, height: int, width: int) -> int:
    """Number of tokens that an image of this size has in the text encoder."""
    # The model merges squares of merge_size x merge_size patches into one token.
    patches: int = image_processor.get_number_of_image_patches(height, width, {})
    return int(patches // image_processor.merge_size**2)


def max_image_tokens(image_processor: Any, area: int) -> int:
    """Maximum number of text encoder tokens of an image scaled to this area.

    All aspect ratios up to `MAX_RATIO` are considered.
    """
    return max(
        count_image_tokens(image_processor, height, width) for height, width in _iterate_extreme_image_sizes(area)
    )


def _iterate_extreme_image_sizes(area: int) -> Iterable[tuple[int, int]]:
    """Yield each width that images are scaled to with its largest height, and each height with its largest width."""
    side, stretch = math.sqrt(area) / _SIZE_STEP, math.sqrt(MAX_RATIO)
    # Sides in multiples of the step, from the narrowest to the widest image.
    for count in range(max(1, round(side / stretch)), round(side * stretch) + 1):
        # The smallest width that rounds to this count, and the height that goes with it.
        short_side = max(count - 0.5, side / stretch)
        long_side = min(round(side * side / short_side), round(side * stretch))
        yield long_side * _SIZE_STEP, count * _SIZE_STEP
        yield count * _SIZE_STEP, long_side * _SIZE_STEP


@dataclass(frozen=True)
class PictureTextEncoder:
    """Text encoder for captions that are encoded together with reference images."""

    model: str
    encode_caption: Callable[[str, list[Image.Image]], Tensors]

    def __call__(self, captions: Sequence[str]) -> Tensors:
        raise DitLoraError(f"{self.model} encodes a caption with its references, and none were given")

    @torch.no_grad()
    def encode_with_references(self, caption: str, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        return self.encode_caption(caption, to_pil_images(references))
