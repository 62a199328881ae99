"""References: pictures or clips that a sample is made from, which the model is given clean beside the noisy latents."""

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
REFERENCE = "reference"
VideoEncoding = Callable[[torch.Tensor, torch.Tensor | None], Tensors]
"""The call of a `VideoEncoder`."""


@dataclass(frozen=True)
class References:
    """The references that a checkpoint takes."""

    least: int
    """Number that every sample has at least."""
    most: int | None
    """Number that a sample has at most; None for any."""
    shape: Callable[[int, int, VideoShape], VideoShape]
    """Shape that the VAE is given of a reference: of its own height and width, for a sample of that shape."""
    refusal: Callable[[int, int], str | None] = lambda height, width: None
    """Reason why the pipeline takes no reference of this height and width; None if it does."""
    clips: bool = False
    """True if a reference of a clip is a clip, of as many frames."""
    in_text: bool = False
    """True if a caption is encoded with the references."""
    scales: bool = True
    """True if `data.reference_resolution` applies: the pipeline takes references of other sizes than its own."""

    def wrong_number(self, number: int) -> str | None:
        """Return what is wrong with so many references of a sample; None if nothing is."""
        if self.least <= number and (self.most is None or number <= self.most):
            return None
        takes = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        takes = str(self.most) if self.least == self.most else takes
        return f"it has {number} references, and this model takes {takes}"

    def assumed(self, shape: VideoShape, number: int) -> VideoShape:
        """Return the shape with so many references of its own size, where the data is not here to tell."""
        one = self.shape(shape.height, shape.width, shape)
        return replace(shape, references=(one,) * max(self.least, number))


@runtime_checkable
class ReferenceEncoder(Protocol):
    """A `VideoEncoder` of a family that takes references."""

    def references(self, given: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        """Encode uint8 (frames, 3, height, width) of each, at its own size; `shape` is the sample's, with theirs."""


@dataclass(frozen=True)
class PictureEncoder:
    """A `VideoEncoder` of pictures, and of references as pictures."""

    encode: VideoEncoding
    encode_reference: Callable[[Image.Image], torch.Tensor]
    """A reference, of at most `resolution` squared pixels, to its latents (C, H, W)."""
    resolution: int | None

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        return self.encode(pixels, image)

    @torch.no_grad()
    def references(self, given: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        pictures = (scaled(one, self.resolution) for one in as_pictures(given))
        return named([self.encode_reference(one) for one in pictures])


@runtime_checkable
class EditTextEncoder(Protocol):
    """A `TextEncoder` of a family whose captions are encoded with the references."""

    def with_references(
        self, caption: str, given: Sequence[torch.Tensor], shape: VideoShape
    ) -> Tensors:
        """Encode one caption with uint8 (frames, 3, height, width) of each; each tensor is (1, ...)."""


def as_pictures(given: Sequence[torch.Tensor]) -> list[Image.Image]:
    """Return references of one frame, uint8 (1, 3, height, width), as pipelines take pictures."""
    return [as_picture(one[0]) for one in given]


def latents_of(batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the references' latents of a batch, `reference_0` and on."""
    found: list[torch.Tensor] = []
    while f"{REFERENCE}_{len(found)}" in batch:
        found.append(batch[f"{REFERENCE}_{len(found)}"])
    return found


def named(latents: Sequence[torch.Tensor]) -> Tensors:
    """Return references' latents by the names that they have in a batch."""
    return {f"{REFERENCE}_{number}": one for number, one in enumerate(latents)}


def scaled(image: Image.Image, side: int | None) -> Image.Image:
    """Return a picture of at most `side` squared pixels, with its aspect kept; itself where it has no more."""
    width, height = scaled_size(image.height, image.width, side)[::-1]
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)


def scaled_size(height: int, width: int, side: int | None) -> tuple[int, int]:
    """Return height and width of at most `side` squared pixels, with their ratio kept."""
    if side is None or height * width <= side * side:
        return height, width
    scale = side / (height * width) ** 0.5
    return max(1, round(height * scale)), max(1, round(width * scale))


def too_small(size: tuple[int, int], least: int) -> str | None:
    """Return what is wrong with a reference of that height and width whose sides must have `least` pixels."""
    height, width = size
    if min(size) >= least:
        return None
    return f"it is {width} x {height}, and each side must have {least} pixels or more"


def read_references(
    model: str, takes: References | None, files: Sequence[Path]
) -> list[Image.Image]:
    """Return the references of one sample to make, as pictures; raise `DitLoraError` for what the model does not take."""
    if takes is None:
        if files:
            raise DitLoraError(f"{model} takes no references; leave --reference out")
        return []
    _require_number(model, takes, files)
    return as_pictures([read_reference(MediaFile(file), None, 0.0) for file in files])


def read_clips(
    model: str, takes: References, files: Sequence[Path], shape: VideoShape, fps: float
) -> list[torch.Tensor]:
    """Return the references of one sample to make, uint8 (frames, 3, height, width): of a clip, clips as training reads them.

    Raises `DitLoraError` for what the model does not take, and for a file that is too short.
    """
    _require_number(model, takes, files)
    media = [MediaFile(file) for file in files]
    pictures = [one.name for one in media if is_image(one)]
    if shape.frames > 1 and pictures:
        raise DitLoraError(
            f"{model}: {', '.join(pictures)}: no clip; the reference of a clip is a clip, give one with --reference"
        )
    return [read_reference(one, shape, fps) for one in media]


def _require_number(model: str, takes: References, files: Sequence[Path]) -> None:
    wrong = takes.wrong_number(len(files))
    if wrong is not None:
        raise DitLoraError(f"{model}: {wrong}; give them with --reference")


def wrong_references(recipe: Recipe, takes: References | None) -> list[str]:
    """Say what is wrong with a recipe's own references, and with its options about them."""
    validation, data, wrong = recipe.validation, recipe.data, []
    if data.reference_resolution is not None and (takes is None or not takes.scales):
        why = "it takes none" if takes is None else "its pipeline scales them by itself"
        wrong.append(f"data.reference_resolution: {why}; remove it")
    if takes is None:
        if validation.references:
            wrong.append("validation.references: it takes no references; remove it")
        named = any(one.reference_columns or one.reference_folders for one in data.all_sources)
        if named:
            wrong.append(
                "data.reference_columns, data.reference_folders: it takes no references; remove it"
            )
        return wrong
    if takes.in_text and data.flip:
        wrong.append(
            "data.flip: captions are encoded with the references, and a mirrored one would need another; remove it"
        )
    if len(validation.references) not in (0, len(validation.prompts)):
        wrong.append(
            f"validation.references: give a list of files for each prompt; got {len(validation.references)} for "
            f"{len(validation.prompts)} in validation.prompts"
        )
        return wrong
    for number, prompt in enumerate(validation.prompts):
        files = validation.references[number] if validation.references else ()
        fault = takes.wrong_number(len(files))
        if fault is not None:
            wrong.append(f"validation.references of {prompt!r}: {fault}")
        # A model of clips makes pictures too, from a clip's first frame.
        clips = takes.clips and data.frames > 1
        other = [one for one in files if is_image(MediaFile(Path(one))) == clips]
        if other and (clips or not takes.clips):
            kind = "clip" if clips else "picture"
            wrong.append(f"validation.references of {prompt!r}: no {kind}: {', '.join(other)}")
    return wrong
