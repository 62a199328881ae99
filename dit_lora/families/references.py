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
from dit_lora.families.pictures import as_picture

Tensors = dict[str, torch.Tensor]
# Prefix of the keys under which a batch holds latents of references: reference_0, reference_1 and so on.
REFERENCE = "reference"
VideoEncoding = Callable[[torch.Tensor, torch.Tensor | None], Tensors]
"""The signature of `VideoEncoder.__call__`."""


@dataclass(frozen=True)
class References:
    """The references that a checkpoint accepts."""

    least: int
    """Minimum number of references per sample."""
    most: int | None
    """Maximum number of references per sample; None for no limit."""
    shape: Callable[[int, int, VideoShape], VideoShape]
    """Computes the shape at which the VAE encodes a reference, from its height and width and the sample's shape."""
    refusal: Callable[[int, int], str | None] = lambda height, width: None
    """Reason why the pipeline rejects a reference of this height and width; None if it accepts it."""
    clips: bool = False
    """True if the reference of a clip is a clip with as many frames."""
    in_text: bool = False
    """True if captions are encoded together with the references."""
    scales: bool = True
    """True if `data.reference_resolution` applies: the pipeline accepts references at other sizes than its default."""

    def wrong_number(self, number: int) -> str | None:
        """Message for an invalid number of references of a sample; None if it is valid."""
        if self.least <= number and (self.most is None or number <= self.most):
            return None
        # "1 or more", "1 to 3", or a plain number if only one is valid.
        accepted = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        accepted = str(self.most) if self.least == self.most else accepted
        return f"it has {number} references, and this model takes {accepted}"

    def assumed(self, shape: VideoShape, number: int) -> VideoShape:
        """The shape with this many references of the sample's own size, for data that is not on this machine."""
        # The real references are not known here. Assume as many as the data asks for, but at least the minimum.
        reference = self.shape(shape.height, shape.width, shape)
        return replace(shape, references=(reference,) * max(self.least, number))


@runtime_checkable
class ReferenceEncoder(Protocol):
    """A `VideoEncoder` of a family that accepts references."""

    def references(self, given: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        """Encode references, each uint8 (frames, 3, height, width) at its own size. `shape` is the sample's."""


@dataclass(frozen=True)
class PictureEncoder:
    """A `VideoEncoder` of images whose references are images."""

    encode: VideoEncoding
    encode_reference: Callable[[Image.Image], torch.Tensor]
    """Encodes a reference of at most `resolution` squared pixels to latents (C, H, W)."""
    resolution: int | None

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        return self.encode(pixels, image)

    @torch.no_grad()
    def references(self, given: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        # Encode one reference at a time: their sizes may differ, so they cannot be stacked.
        pictures = (scaled(picture, self.resolution) for picture in as_pictures(given))
        return named([self.encode_reference(picture) for picture in pictures])


@runtime_checkable
class EditTextEncoder(Protocol):
    """A `TextEncoder` of a family whose captions are encoded together with the references."""

    def with_references(
        self, caption: str, given: Sequence[torch.Tensor], shape: VideoShape
    ) -> Tensors:
        """Encode one caption with its references, each uint8 (frames, 3, height, width), to tensors (1, ...)."""


def as_pictures(given: Sequence[torch.Tensor]) -> list[Image.Image]:
    """Convert references of one frame, uint8 (1, 3, height, width), to PIL images."""
    return [as_picture(clip[0]) for clip in given]


def latents_of(batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Latents of a batch's references: `reference_0`, `reference_1` and so on."""
    latents: list[torch.Tensor] = []
    # Keys are numbered without gaps, so the first missing one ends the list.
    while f"{REFERENCE}_{len(latents)}" in batch:
        latents.append(batch[f"{REFERENCE}_{len(latents)}"])
    return latents


def named(latents: Sequence[torch.Tensor]) -> Tensors:
    """Latents of references, keyed as in a batch: `reference_0`, `reference_1` and so on."""
    return {f"{REFERENCE}_{number}": latent for number, latent in enumerate(latents)}


def scaled(image: Image.Image, side: int | None) -> Image.Image:
    """Scale an image to at most `side` squared pixels, keeping its aspect ratio. Smaller images stay as they are."""
    # PIL sizes are (width, height).
    width, height = scaled_size(image.height, image.width, side)[::-1]
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def scaled_size(height: int, width: int, side: int | None) -> tuple[int, int]:
    """Height and width scaled to at most `side` squared pixels, keeping their ratio. No limit if `side` is None."""
    if side is None or height * width <= side * side:
        return height, width
    # Scale the area to side**2, so each side by the square root of the ratio.
    scale = side / (height * width) ** 0.5
    return max(1, round(height * scale)), max(1, round(width * scale))


def too_small(size: tuple[int, int], least: int) -> str | None:
    """Message for a reference of this height and width with a side below `least` pixels; else None."""
    height, width = size
    if min(size) >= least:
        return None
    return f"it is {width} x {height}, and each side must have {least} pixels or more"


def read_references(
    model: str, takes: References | None, files: Sequence[Path]
) -> list[Image.Image]:
    """Read the references of one sample to generate, as PIL images.

    Raises `DitLoraError` if the model does not accept them (`takes` is None) or accepts another number.
    """
    if takes is None:
        if files:
            raise DitLoraError(f"{model} takes no references; leave --reference out")
        return []
    _require_number(model, takes, files)
    # Images need no shape and no frame rate.
    return as_pictures([read_reference(MediaFile(file), None, 0.0) for file in files])


def read_clips(
    model: str, takes: References, files: Sequence[Path], shape: VideoShape, fps: float
) -> list[torch.Tensor]:
    """Read the references of one sample to generate, uint8 (frames, 3, height, width), as training reads them.

    Args:
        model: Name of the model for messages.
        takes: The references that the model accepts.
        files: One file per reference. The reference of a clip must be a clip.
        shape: Shape of the sample.
        fps: Frames per second at which clips are read.

    Raises:
        DitLoraError: The number or kind of the references is wrong, or a clip is too short.
    """
    _require_number(model, takes, files)
    media = [MediaFile(file) for file in files]
    pictures = [file.name for file in media if is_image(file)]
    # An image file is only valid where the sample itself is an image.
    if shape.frames > 1 and pictures:
        raise DitLoraError(
            f"{model}: {', '.join(pictures)}: no clip; the reference of a clip is a clip, give one with --reference"
        )
    return [read_reference(file, shape, fps) for file in media]


def _require_number(model: str, takes: References, files: Sequence[Path]) -> None:
    problem = takes.wrong_number(len(files))
    if problem is not None:
        raise DitLoraError(f"{model}: {problem}; give them with --reference")


def wrong_references(recipe: Recipe, takes: References | None) -> list[str]:
    """One message per problem with a recipe's validation references and with its options about references."""
    validation, data, problems = recipe.validation, recipe.data, []
    if data.reference_resolution is not None and (takes is None or not takes.scales):
        reason = "it takes none" if takes is None else "its pipeline scales them by itself"
        problems.append(f"data.reference_resolution: {reason}; remove it")
    # A checkpoint without references: any option about them is an error, and nothing else can be checked.
    if takes is None:
        if validation.references:
            problems.append("validation.references: it takes no references; remove it")
        has_references = any(
            source.reference_columns or source.reference_folders for source in data.all_sources
        )
        if has_references:
            problems.append(
                "data.reference_columns, data.reference_folders: it takes no references; remove it"
            )
        return problems
    if takes.in_text and data.flip:
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
        problem = takes.wrong_number(len(files))
        if problem is not None:
            problems.append(f"validation.references of {prompt!r}: {problem}")
        # A model with reference clips also generates images, from the first frame of a clip.
        clips = takes.clips and data.frames > 1
        # Files of the wrong kind: images where clips are needed, and the other way round.
        wrong_files = [file for file in files if is_image(MediaFile(Path(file))) == clips]
        if wrong_files and (clips or not takes.clips):
            kind = "clip" if clips else "picture"
            problems.append(
                f"validation.references of {prompt!r}: no {kind}: {', '.join(wrong_files)}"
            )
    return problems
