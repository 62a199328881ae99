"""Measures one loss mask, decoded as for training."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dit_lora.data.audit.image_probe import MAX_THUMBNAIL_SIDE, THUMBNAIL_QUALITY, Failures, decode_or_explain_fault
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.opened import encode_jpeg
from dit_lora.data.media.pictures import open_mask
from dit_lora.data.sources.clips import LossMask


def measure_mask(mask: LossMask, heartbeat: Callable[[], None]) -> tuple[Failures, dict[str, Any], bytes | None]:
    """Measure a mask file: failures that make it unusable, its size and levels, and a JPEG thumbnail.

    The thumbnail is None if the file cannot be decoded.
    """
    # A mask is a still picture, also for a video.
    if not is_image(mask.media):
        return [("not_media", "a mask must be a picture, and its name is not that of one")], {}, None
    grey = decode_or_explain_fault(mask.media, lambda: open_mask(mask.media, alpha=mask.alpha))
    if isinstance(grey, tuple):
        return [grey], {}, None
    heartbeat()
    # "learned" is the mean of the mask: the share of the picture that counts in the loss.
    darkest, brightest = grey.getextrema()
    facts = {
        "frames": 1,
        "height": grey.height,
        "width": grey.width,
        "least": darkest,
        "most": brightest,
        "learned": round(float(np.asarray(grey, np.float32).mean()) / 255, 4),
    }
    grey.thumbnail((MAX_THUMBNAIL_SIDE, MAX_THUMBNAIL_SIDE))
    return [], facts, encode_jpeg(grey, THUMBNAIL_QUALITY)
