"""Measures one image, decoded as for training."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from dit_lora.data.audit.measure import SMALL_SIDE, PictureMeasures
from dit_lora.data.audit.outline import PictureOutline
from dit_lora.data.media.media import Media, open_media_bytes
from dit_lora.data.media.opened import HEIC_REASON, MAX_PIXELS, encode_jpeg, get_error_message, open_picture
from dit_lora.data.media.pictures import DECODE_ERRORS, ORIENTATION_TAG, open_image, read_image_size, scale_to_cover

THUMBNAIL_WIDTH = 320
"""Width of a thumbnail in pixels."""
MAX_THUMBNAIL_SIDE = 160
"""Longer side of a thumbnail that shows a single image, in pixels."""
THUMBNAIL_QUALITY = 70

Failures = list[tuple[str, str]]
"""Code and message of each reason why a file cannot be used."""


def measure_image(media: Media, heartbeat: Callable[[], None]) -> tuple[Failures, dict[str, Any], bytes | None]:
    """Failures that make an image unusable, its measurements, and a JPEG thumbnail (None if it cannot be decoded)."""
    facts: dict[str, Any] = {}

    def read() -> Image.Image:
        facts.update(_read_header(media))
        return Image.fromarray(scale_to_cover(open_image(media), 1.0, facts["height"], facts["width"]))

    picture = decode_or_explain_fault(media, read)
    if isinstance(picture, tuple):
        return [picture], facts, None
    # Decoding a large image takes long, so report progress before measuring it.
    heartbeat()
    # BOX averages each area, so that the measures describe all pixels.
    pictures, small = PictureMeasures(), picture.resize((SMALL_SIDE, SMALL_SIDE), Image.Resampling.BOX)
    pictures.add(np.asarray(small))
    pictures.add_luma_levels(np.asarray(picture.convert("L")))
    # An image is one frame at 0 s that lasts 0 s.
    facts |= {"frames": 1, **pictures.compute_measurements([0.0, 0.0])}
    facts["outlines"] = [PictureOutline.from_picture(np.asarray(small)).text]
    picture.thumbnail((MAX_THUMBNAIL_SIDE, MAX_THUMBNAIL_SIDE))
    return [], facts, encode_jpeg(picture, THUMBNAIL_QUALITY)


def decode_or_explain_fault(media: Media, read: Callable[[], Image.Image]) -> Image.Image | tuple[str, str]:
    """Decode an image with `read`; returns the image, or the code and message of the fault in the file."""
    with warnings.catch_warnings():
        # Pillow warns about odd metadata and large images, which are not faults.
        warnings.simplefilter("ignore")
        try:
            # Opened once without decoding, to tell an unreadable header from damaged pixels.
            with open_picture(media):
                pass
        except Image.DecompressionBombError:
            return "corrupt", f"its header promises more than {MAX_PIXELS} pixels, as a bomb does"
        except UnidentifiedImageError as error:
            # `open_picture` raises this message for phone pictures, for which the user needs another remedy.
            if str(error) == HEIC_REASON:
                return "unreadable", HEIC_REASON
            return "unreadable", "its header is damaged, or its image format is not supported"
        except DECODE_ERRORS as error:
            return "unreadable", f"its header cannot be read: {get_error_message(error)}"
        try:
            return read()
        except DECODE_ERRORS as error:
            reason = get_error_message(error)
            # Pillow has no exception class of its own for truncated files, only this word in its messages.
            if "truncated" in reason.lower():
                return "truncated", f"the image ends early: {reason}"
            return "corrupt", f"it cannot be decoded: {reason}"


def describe_unusual_image_mode(mode: str, bits: int) -> str | None:
    """Unusual property of an image with this Pillow mode and bit depth; None for plain RGB or grey of 8 bits."""
    if bits > 8 or mode.startswith("I"):
        return "more than 8 bits a level"
    if mode in ("RGB", "RGBA", "L", "LA"):
        return None
    # Modes without a name here, such as CMYK, are reported by Pillow's name.
    return {"P": "a palette", "PA": "a palette", "1": "black and white only"}.get(mode, mode)


def _read_header(media: Media) -> dict[str, Any]:
    """Facts about an image file that Pillow reads without decoding the pixels: format, size, mode."""
    # The size is that of the upright image, while the mode is the stored one.
    height, width = read_image_size(media)
    with open_picture(media) as image:
        return {
            "container": (image.format or "").lower(),
            "height": height,
            "width": width,
            "pixel_format": image.mode,
            "bits": _read_bit_depth(media, image.mode),
            "pictures": int(getattr(image, "n_frames", 1)),
            "orientation": image.getexif().get(ORIENTATION_TAG, 1),
            "alpha": image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info,
        }


def _read_bit_depth(media: Media, mode: str) -> int:
    """Bits per level in an image file.

    Pillow reads a PNG's 16-bit colours as 8 (PNG, 11.2.1), so its header is read.
    """
    if mode.startswith("I") or mode == "F":
        return 16
    with open_media_bytes(media) as stream:
        head = stream.read(25)
    # Byte 24 of a PNG is the bit depth of its IHDR.
    return head[24] if head.startswith(b"\x89PNG") else 8
