"""Measures one image, decoded as for training."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from dit_lora.data.audit.measure import SIDE, PictureMeasures
from dit_lora.data.audit.outline import Outline
from dit_lora.data.media.media import Media, open_bytes
from dit_lora.data.media.opened import HEIC_REASON, MOST_PIXELS, message_of, open_picture
from dit_lora.data.media.pictures import DAMAGED, ORIENTATION, cover, image_size, open_image

THUMBNAIL = 320
"""Width of a thumbnail in pixels."""
EDGE = 160
"""Longer side of a thumbnail that shows a single image, in pixels."""

Failures = list[tuple[str, str]]
"""Code and message of each reason why a file cannot be used."""


def measure_image(
    media: Media, alive: Callable[[], None]
) -> tuple[Failures, dict[str, Any], bytes | None]:
    """Failures that make an image unusable, its measurements, and a JPEG thumbnail (None if it cannot be decoded)."""
    facts: dict[str, Any] = {}

    def read() -> Image.Image:
        facts.update(_header(media))
        return Image.fromarray(cover(open_image(media), 1.0, facts["height"], facts["width"]))

    picture = decoded(media, read)
    if isinstance(picture, tuple):
        return [picture], facts, None
    # Decoding a large image takes long, so report progress before measuring it.
    alive()
    # BOX averages each area, so that the measures describe all pixels.
    pictures, small = PictureMeasures(), picture.resize((SIDE, SIDE), Image.Resampling.BOX)
    pictures.add(np.asarray(small))
    pictures.add_levels(np.asarray(picture.convert("L")))
    # An image is one frame at 0 s that lasts 0 s.
    facts |= {
        "frames": 1,
        **pictures.facts([0.0, 0.0]),
        "outlines": [Outline.of(np.asarray(small)).text],
    }
    picture.thumbnail((EDGE, EDGE))
    return [], facts, jpeg([np.asarray(picture)])


def decoded(media: Media, read: Callable[[], Image.Image]) -> Image.Image | tuple[str, str]:
    """The image that `read` decodes, or the code and message of the fault in the file."""
    with warnings.catch_warnings():
        # Pillow warns about odd metadata and large images, which are not faults.
        warnings.simplefilter("ignore")
        try:
            # Opened once without decoding, to tell an unreadable header from damaged pixels.
            with open_picture(media):
                pass
        except DAMAGED as error:
            return _unopened(error)
        try:
            return read()
        except DAMAGED as error:
            return _undecoded(error)


def odd_mode(mode: str, bits: int) -> str | None:
    """Unusual property of a Pillow mode with this many bits per level; None for plain RGB or grey of 8 bits."""
    if bits > 8 or mode.startswith("I"):
        return "more than 8 bits a level"
    if mode in ("RGB", "RGBA", "L", "LA"):
        return None
    # Modes without a name here, such as CMYK, are reported by Pillow's name.
    return {"P": "a palette", "PA": "a palette", "1": "black and white only"}.get(mode, mode)


def jpeg(pictures: list[np.ndarray]) -> bytes:
    """Encode uint8 (H, W, 3) of equal heights, side by side, as JPEG."""
    stream = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, axis=1)).save(stream, "JPEG", quality=70)
    return stream.getvalue()


def _header(media: Media) -> dict[str, Any]:
    """Facts that Pillow reads without decoding the pixels."""
    # The size is that of the upright image, while the mode is the stored one.
    height, width = image_size(media)
    with open_picture(media) as image:
        facts = {
            "container": (image.format or "").lower(),
            "height": height,
            "width": width,
            "pixel_format": image.mode,
            "bits": _bits(media, image.mode),
            "pictures": int(getattr(image, "n_frames", 1)),
            "orientation": image.getexif().get(ORIENTATION, 1),
            "alpha": image.mode in ("RGBA", "LA", "PA", "RGBa", "La")
            or "transparency" in image.info,
        }
    return facts


def _bits(media: Media, mode: str) -> int:
    """Bits per level in the file. Pillow reads a PNG's 16-bit colours as 8 (PNG, 11.2.1), so its header is read."""
    if mode.startswith("I") or mode == "F":
        return 16
    with open_bytes(media) as stream:
        head = stream.read(25)
    # Byte 24 of a PNG is the bit depth of its IHDR.
    return head[24] if head.startswith(b"\x89PNG") else 8


def _unopened(error: Exception) -> tuple[str, str]:
    """Code and message for an error while the header was read."""
    if isinstance(error, Image.DecompressionBombError):
        return "corrupt", f"its header promises more than {MOST_PIXELS} pixels, as a bomb does"
    if isinstance(error, UnidentifiedImageError):
        # `open_picture` raises this message for phone pictures, for which the user needs another remedy.
        if str(error) == HEIC_REASON:
            return "unreadable", HEIC_REASON
        return "unreadable", "its header is damaged, or of an image format that is not known here"
    return "unreadable", f"its header cannot be read: {message_of(error)}"


def _undecoded(error: Exception) -> tuple[str, str]:
    """Code and message for an error while the pixels were decoded."""
    reason = message_of(error)
    # Pillow has no exception class of its own for truncated files, only this word in its messages.
    if "truncated" in reason.lower():
        return "truncated", f"the image ends early: {reason}"
    return "corrupt", f"it cannot be decoded: {reason}"
