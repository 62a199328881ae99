"""Pictures of samples next to their references, with the masked-out part tinted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dit_lora.data.audit.finding import AuditedSample
from dit_lora.data.media.opened import decode_jpeg, encode_jpeg
from dit_lora.report.pages import PagePictures, choose_evenly

_TINT_COLOR = (122, 90, 245)
_TINT_OPACITY = 0.6


@dataclass(frozen=True)
class SampleCard:
    """Card of one sample for the audit page, with its pictures, each a data URI or an empty string."""

    sample: AuditedSample
    picture: str
    references: Sequence[str] = ()


def make_sample_card(sample: AuditedSample, pictures: PagePictures) -> SampleCard:
    """Make a sample's card for the audit page, with as many of its pictures as the page has space for."""
    picture = sample.thumbnail
    if picture is not None and sample.mask is not None:
        picture = tint_masked_area(picture, sample.mask, is_video="seconds" in sample.facts)
    references = [pictures.make_uri(reference) for reference in sample.references]
    return SampleCard(sample, pictures.make_uri(picture), references)


def choose_edit_samples(samples: Sequence[AuditedSample], max_pairs: int) -> list[AuditedSample]:
    """Choose at most `max_pairs` good samples with references or a mask, evenly spaced over the data set."""
    pairs = [
        sample
        for sample in samples
        if sample.verdict == "ok" and sample.thumbnail and (sample.references or sample.mask)
    ]
    return choose_evenly(pairs, max_pairs)


def tint_masked_area(picture: bytes, mask: bytes, *, is_video: bool) -> bytes:
    """Tint the part of a picture, or of frames in a row, that the mask excludes from the loss.

    `picture`, `mask` and the result are JPEG bytes.
    """
    image, grey = decode_jpeg(picture), decode_jpeg(mask).convert("L")
    # A mask has the shape of one frame, so the ratio of both aspect ratios is the number of frames side by side.
    ratio = image.width * grey.height / (image.height * grey.width)
    frames = max(1, round(ratio)) if is_video else 1
    frame_mask = np.asarray(grey.resize((max(1, image.width // frames), image.height)), np.float32) / 255
    # (H, W, 1) between 0 and 1. The strip's width may not be a multiple of the frames: pad with the last column.
    padding = image.width - frame_mask.shape[1] * frames
    learned = np.pad(np.tile(frame_mask, frames), ((0, 0), (0, padding)), mode="edge")[..., None]
    levels = np.asarray(image, np.float32)
    # The picture with the tint over all of it, from which the excluded part is taken.
    covered = (1 - _TINT_OPACITY) * levels + _TINT_OPACITY * np.array(_TINT_COLOR, np.float32)
    # `learned` has shape (H, W, 1), and `levels` (H, W, 3).
    mixed = learned * levels + (1 - learned) * covered
    return encode_jpeg(Image.fromarray(mixed.round().astype(np.uint8)), 80)
