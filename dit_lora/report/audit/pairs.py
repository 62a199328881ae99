"""Pictures of samples next to their references, with the masked-out part tinted."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dit_lora.data.audit.finding import JudgedSample
from dit_lora.data.media.opened import own_jpeg
from dit_lora.report.pages import PagePictures

_TINT = (122, 90, 245)
_TINTED = 0.6


@dataclass(frozen=True)
class Card:
    """One sample with its pictures, each a data URI or an empty string."""

    sample: JudgedSample
    picture: str
    references: Sequence[str] = ()


def card(one: JudgedSample, pictures: PagePictures) -> Card:
    """Make a sample's card, with as many of its pictures as the page has space for."""
    picture = one.thumbnail
    if picture is not None and one.mask is not None:
        picture = tinted(picture, one.mask, is_video="seconds" in one.facts)
    references = [pictures.uri(reference) for reference in one.references]
    return Card(one, pictures.uri(picture), references)


def some_pairs(judged: Sequence[JudgedSample], most: int) -> list[JudgedSample]:
    """Choose at most `most` good samples with references or a mask, evenly spaced over the data set."""
    pairs = [
        sample
        for sample in judged
        if sample.verdict == "ok" and sample.thumbnail and (sample.references or sample.mask)
    ]
    if len(pairs) <= most:
        return pairs
    return [pairs[round(position)] for position in np.linspace(0, len(pairs) - 1, most)]


def tinted(picture: bytes, mask: bytes, *, is_video: bool) -> bytes:
    """Tint the part of a picture, or of frames in a row, that the mask excludes from the loss.

    `picture`, `mask` and the result are JPEG bytes.
    """
    image, grey = own_jpeg(picture), own_jpeg(mask).convert("L")
    # A mask has the shape of one frame.
    # The strip's aspect ratio divided by the mask's: the number of frames side by side.
    ratio = image.width * grey.height / (image.height * grey.width)
    frames = max(1, round(ratio)) if is_video else 1
    frame_mask = (
        np.asarray(grey.resize((max(1, image.width // frames), image.height)), np.float32) / 255
    )
    # (H, W, 1) between 0 and 1. The strip's width may not be a multiple of the frames: pad with the last column.
    learned = np.pad(
        np.tile(frame_mask, frames),
        ((0, 0), (0, image.width - frame_mask.shape[1] * frames)),
        mode="edge",
    )[..., None]
    levels = np.asarray(image, np.float32)
    # The picture with the tint over all of it, from which the excluded part is taken.
    covered = (1 - _TINTED) * levels + _TINTED * np.array(_TINT, np.float32)
    # `learned` has shape (H, W, 1), and `levels` (H, W, 3).
    mixed = learned * levels + (1 - learned) * covered
    stream = io.BytesIO()
    Image.fromarray(mixed.round().astype(np.uint8)).save(stream, "JPEG", quality=80)
    return stream.getvalue()
