"""References: images or clips that condition a sample. The model gets their clean latents with the noisy ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_reference
from dit_lora.errors import DitLoraError
from dit_lora.families.pictures import to_pil_image

Tensors = dict[str, torch.Tensor]
# Prefix of the keys under which a batch holds latents of references: reference_0, reference_1 and so on.
REFERENCE_KEY = "reference"
EncodePixels = Callable[[torch.Tensor, torch.Tensor | None], Tensors]
"""The signature of `VideoEncoder.__call__`."""


@dataclass(frozen=True)
class ReferenceSpec:
    """Specification of the references (pictures or clips per sample) that a checkpoint accepts."""

    min_count: int
    """Minimum number of references per sample."""
    max_count: int | None
    """Maximum number of references per sample; None for no limit."""
    encoded_shape: Callable[[int, int, VideoShape], VideoShape]
    """Computes the shape at which the VAE encodes a reference, from its height and width and the sample's shape."""
    unsupported_reason: Callable[[int, int], str | None] = lambda height, width: None
    """Reason why the pipeline rejects a reference of this height and width; None if it accepts it."""
    is_clip: bool = False
    """True if the reference of a clip is a clip with as many frames."""
    is_encoded_with_caption: bool = False
    """True if captions are encoded together with the references."""
    is_resizable: bool = True
    """True if `data.reference_resolution` applies: the pipeline accepts references at other sizes than its default."""

    def reference_count_error(self, count: int) -> str | None:
        """Error message for an invalid number of references of a sample; None if the number is valid."""
        if self.min_count <= count and (self.max_count is None or count <= self.max_count):
            return None
        # "1 or more", "1 to 3", or a plain number if only one is valid.
        accepted = f"{self.min_count} or more" if self.max_count is None else f"{self.min_count} to {self.max_count}"
        accepted = str(self.max_count) if self.min_count == self.max_count else accepted
        return f"it has {count} references, and this model takes {accepted}"

    def assume_reference_shapes(self, shape: VideoShape, count: int) -> VideoShape:
        """Shape of a sample with this many references of its size. Used for data that is not on this machine."""
        # The real references are not known here. Assume as many as the data asks for, but at least the minimum.
        reference = self.encoded_shape(shape.height, shape.width, shape)
        return replace(shape, references=(reference,) * max(self.min_count, count))


@runtime_checkable
class ReferenceEncoder(Protocol):
    """Protocol of a `VideoEncoder` that also encodes a sample's references."""

    def encode_references(self, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        """Encode a sample's references, each uint8 (frames, 3, height, width) at its size. `shape` is the sample's."""


@dataclass(frozen=True)
class PictureEncoder:
    """VAE encoder of images whose references are images."""

    encode_pixels: Callable[[torch.Tensor], Tensors]
    encode_reference: Callable[[Image.Image], torch.Tensor]
    """Encodes a reference of at most `resolution` squared pixels to latents (C, H, W)."""
    resolution: int | None

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        return self.encode_pixels(pixels)

    @torch.no_grad()
    def encode_references(self, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        # Encode one reference at a time: their sizes may differ, so they cannot be stacked.
        pictures = (scale_image(picture, self.resolution) for picture in to_pil_images(references))
        return name_reference_latents([self.encode_reference(picture) for picture in pictures])


@runtime_checkable
class EditTextEncoder(Protocol):
    """Protocol of a `TextEncoder` that encodes captions together with the references."""

    def encode_with_references(self, caption: str, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        """Encode one caption with its references, each uint8 (frames, 3, height, width), to tensors (1, ...)."""


def to_pil_images(references: Sequence[torch.Tensor]) -> list[Image.Image]:
    """Convert references of one frame, uint8 (1, 3, height, width), to PIL images."""
    return [to_pil_image(clip[0]) for clip in references]


def get_reference_latents(batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Latents of a batch's references, read from its keys `reference_0`, `reference_1` and so on."""
    latents: list[torch.Tensor] = []
    # Keys are numbered without gaps, so the first missing one ends the list.
    while f"{REFERENCE_KEY}_{len(latents)}" in batch:
        latents.append(batch[f"{REFERENCE_KEY}_{len(latents)}"])
    return latents


def name_reference_latents(latents: Sequence[torch.Tensor]) -> Tensors:
    """Name reference latents by the keys that a batch has for them: `reference_0`, `reference_1` and so on."""
    return {f"{REFERENCE_KEY}_{number}": latent for number, latent in enumerate(latents)}


def scale_image(image: Image.Image, resolution: int | None) -> Image.Image:
    """Scale an image down to at most `resolution` squared pixels, keeping its aspect ratio."""
    # PIL sizes are (width, height).
    width, height = compute_scaled_size(image.height, image.width, resolution)[::-1]
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def compute_scaled_size(height: int, width: int, resolution: int | None) -> tuple[int, int]:
    """Height and width scaled down to at most `resolution` squared pixels (None: no limit), keeping their ratio."""
    if resolution is None or height * width <= resolution * resolution:
        return height, width
    # Scale the area to side**2, so each side by the square root of the ratio.
    scale = resolution / (height * width) ** 0.5
    return max(1, round(height * scale)), max(1, round(width * scale))


def min_side_error(size: tuple[int, int], min_side: int) -> str | None:
    """Error message for a reference of this height and width with a side below `min_side` pixels; else None."""
    height, width = size
    if min(size) >= min_side:
        return None
    return f"it is {width} x {height}, and each side must have {min_side} pixels or more"


def read_references(model: str, reference_spec: ReferenceSpec | None, files: Sequence[Path]) -> list[Image.Image]:
    """Read the references of one sample to generate, as PIL images.

    Raises `DitLoraError` if the model does not accept them (`reference_spec` is None) or accepts another number.
    """
    if reference_spec is None:
        if files:
            raise DitLoraError(f"{model} takes no references; leave --reference out")
        return []
    _require_reference_count(model, reference_spec, files)
    # Images need no shape and no frame rate.
    return to_pil_images([read_reference(MediaFile(file), None, 0.0) for file in files])


def read_reference_clips(
    model: str, reference_spec: ReferenceSpec, files: Sequence[Path], shape: VideoShape, fps: float
) -> list[torch.Tensor]:
    """Read the references of one sample to generate, uint8 (frames, 3, height, width), as training reads them.

    Args:
        model: Name of the model for messages.
        reference_spec: The references that the model accepts.
        files: One file per reference. The reference of a clip must be a clip.
        shape: Shape of the sample.
        fps: Frames per second at which clips are read.

    Raises:
        DitLoraError: The number or kind of the references is wrong, or a clip is too short.
    """
    _require_reference_count(model, reference_spec, files)
    media = [MediaFile(file) for file in files]
    pictures = [file.name for file in media if is_image(file)]
    # An image file is only valid where the sample itself is an image.
    if shape.frames > 1 and pictures:
        raise DitLoraError(
            f"{model}: {', '.join(pictures)}: no clip; the reference of a clip is a clip, give one with --reference"
        )
    return [read_reference(file, shape, fps) for file in media]


def _require_reference_count(model: str, reference_spec: ReferenceSpec, files: Sequence[Path]) -> None:
    problem = reference_spec.reference_count_error(len(files))
    if problem is not None:
        raise DitLoraError(f"{model}: {problem}; give them with --reference")


def reference_errors(recipe: Recipe, reference_spec: ReferenceSpec | None) -> list[str]:
    """One error message per problem with a recipe's validation references and with its options about references."""
    validation, data, problems = recipe.validation, recipe.data, []
    if data.reference_resolution is not None and (reference_spec is None or not reference_spec.is_resizable):
        reason = "it takes none" if reference_spec is None else "its pipeline scales them by itself"
        problems.append(f"data.reference_resolution: {reason}; remove it")
    # A checkpoint without references: any option about them is an error, and nothing else can be checked.
    if reference_spec is None:
        if validation.references:
            problems.append("validation.references: it takes no references; remove it")
        has_references = any(source.reference_columns or source.reference_folders for source in data.all_sources)
        if has_references:
            problems.append("data.reference_columns, data.reference_folders: it takes no references; remove it")
        return problems
    if reference_spec.is_encoded_with_caption and data.flip:
        problems.append(
            "data.flip: captions are encoded with the references, and a mirrored one would need another; remove it"
        )
    # `validation.references` is either empty or has one list of files for each prompt.
    if len(validation.references) not in (0, len(validation.prompts)):
        problems.append(
            f"validation.references: give a list of files for each prompt; got {len(validation.references)} for "
            f"{len(validation.prompts)} in validation.prompts"
        )
        return problems
    for number, prompt in enumerate(validation.prompts):
        files = validation.references[number] if validation.references else ()
        problem = reference_spec.reference_count_error(len(files))
        if problem is not None:
            problems.append(f"validation.references of {prompt!r}: {problem}")
        # A model with reference clips also generates images, from the first frame of a clip.
        clips = reference_spec.is_clip and data.frames > 1
        # Files of the wrong kind: images where clips are needed, and the other way round.
        wrong_files = [file for file in files if is_image(MediaFile(Path(file))) == clips]
        if wrong_files and (clips or not reference_spec.is_clip):
            kind = "clip" if clips else "picture"
            problems.append(f"validation.references of {prompt!r}: no {kind}: {', '.join(wrong_files)}")
    return problems
