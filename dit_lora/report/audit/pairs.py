"""Pictures of samples beside what they are made from, with what is not learned tinted."""

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
    """One sample with its pictures, each a data URI or nothing."""

    sample: JudgedSample
    picture: str
    references: Sequence[str] = ()


def card(one: JudgedSample, pictures: PagePictures) -> Card:
    """Return a sample's card, with as many of its pictures as the page has room for."""
    shown = one.thumbnail
    if shown is not None and one.mask is not None:
        shown = tinted(shown, one.mask, is_video="seconds" in one.facts)
    references = [pictures.uri(reference) for reference in one.references]
    return Card(one, pictures.uri(shown), references)


def some_pairs(judged: Sequence[JudgedSample], most: int) -> list[JudgedSample]:
    """Return some of the sound samples that have references or a mask, evenly from first to last."""
    pairs = [
        one
        for one in judged
        if one.verdict == "ok" and one.thumbnail and (one.references or one.mask)
    ]
    if len(pairs) <= most:
        return pairs
    return [pairs[round(place)] for place in np.linspace(0, len(pairs) - 1, most)]


def tinted(picture: bytes, mask: bytes, *, is_video: bool) -> bytes:
    """Return a JPEG of a picture, or of frames in a row, with the part that the mask (a JPEG) leaves out tinted."""
    shown, grey = own_jpeg(picture), own_jpeg(mask).convert("L")
    # A mask has the shape of one frame.
    ratio = shown.width * grey.height / (shown.height * grey.width)
    frames = max(1, round(ratio)) if is_video else 1
    one = np.asarray(grey.resize((max(1, shown.width // frames), shown.height)), np.float32) / 255
    learned = np.pad(
        np.tile(one, frames), ((0, 0), (0, shown.width - one.shape[1] * frames)), mode="edge"
    )[..., None]
    levels = np.asarray(shown, np.float32)
    covered = (1 - _TINTED) * levels + _TINTED * np.array(_TINT, np.float32)
    mixed = learned * levels + (1 - learned) * covered
    stream = io.BytesIO()
    Image.fromarray(mixed.round().astype(np.uint8)).save(stream, "JPEG", quality=80)
    return stream.getvalue()
