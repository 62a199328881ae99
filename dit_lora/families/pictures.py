"""First and last images of a video: conversion for the pipeline, and checks of the images that a recipe gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensor

from dit_lora.config.data import VideoShape
from dit_lora.config.validation import ValidationConfig
from dit_lora.data.media.video import read_frames
from dit_lora.errors import DitLoraError, format_list

# Keys are the pipelines' argument names.
IMAGE_OPTIONS = {"image": ("first", "--image", "images"), "last_image": ("last", "--last-image", "last_images")}
"""For each pipeline argument: which image it is, the option of `dit-lora sample`, and the field of `validation`."""


def to_pil_image(pixels: torch.Tensor) -> Image.Image:
    """Convert uint8 (3, height, width) to a PIL image. A fake tensor, which has no values, gives a black image."""
    if isinstance(pixels, FakeTensor):
        # Memory planning runs the encoders on fake tensors, whose pixels cannot be read.
        _, height, width = pixels.shape
        return Image.new("RGB", (width, height))
    # (3, height, width) -> (height, width, 3), as PIL expects.
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def read_conditioning_images(
    model: str, required: Sequence[str], files_by_argument: Mapping[str, Path | None], shape: VideoShape
) -> dict[str, Image.Image]:
    """Read the images that a pipeline starts from, scaled and cropped to the video's size, by argument name.

    Args:
        model: Name of the model for messages.
        required: Arguments that the pipeline needs, of `IMAGE_OPTIONS`.
        files_by_argument: File of each argument, or None.
        shape: Shape of the video.

    Raises:
        DitLoraError: An image is missing, or one is given that the pipeline does not accept.
    """
    pictures = {}
    for name, (kind, option, field) in IMAGE_OPTIONS.items():
        file = files_by_argument[name]
        # Reject an image that the pipeline would ignore.
        if name not in required:
            if file is not None:
                accepts = "takes no last image" if required else "starts from no image"
                raise DitLoraError(f"{model} {accepts}; remove {option}")
            continue
        if file is None:
            raise DitLoraError(
                f"{model} is image-to-video: give the {kind} image with {option} (or validation.{field} in a recipe)"
            )
        # Scaled and cropped as training reads clips, so that the first frame has the video's shape.
        (frame,) = read_frames(file, frames=1, fps=None, height=shape.height, width=shape.width)
        pictures[name] = to_pil_image(frame)
    return pictures


def image_errors(validation: ValidationConfig, required: Sequence[str]) -> list[str]:
    """One error message per kind of image that validation prompts lack, or have although it is not accepted."""
    problems = []
    for name, (kind, _, field) in IMAGE_OPTIONS.items():
        # `images` and `last_images` each hold one file for every prompt, or none.
        files: Sequence[str] = getattr(validation, field)
        if files and name not in required:
            problems.append(f"validation.{field}: it takes no {kind} image; remove it")
        if name in required and len(files) != len(validation.prompts):
            problems.append(
                f"validation.{field}: give one {kind} image for each prompt; got {len(files)} for "
                f"{len(validation.prompts)} in validation.prompts"
            )
    return problems


def require_images(
    model: str, validation: ValidationConfig, required: Sequence[str], other_problems: Sequence[str] = ()
) -> None:
    """Raise `DitLoraError` that lists these problems and those of a recipe's validation images, if there are any."""
    problems = [*image_errors(validation, required), *other_problems]
    if problems:
        raise DitLoraError(format_list(f"{model} is image-to-video", problems))
