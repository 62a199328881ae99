"""Single pictures of images and videos: upright, in square pixels, scaled to cover, cropped at the centre.

Shapes: H and W pixels.
"""

import struct
import zlib
from collections.abc import Sequence

import av
import numpy as np
from PIL import Image, ImageOps

from dit_lora.data.media.colour_profile import convert_to_srgb
from dit_lora.data.media.display import Orientation
from dit_lora.data.media.media import Media, open_bytes
from dit_lora.data.media.missing_rows import has_late_metadata, missing_rows
from dit_lora.data.media.opened import open_picture

# What Pillow's readers raise at damaged files.
DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    RuntimeError,  # AVIF's decoder
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

ORIENTATION = 0x0112
"""EXIF's tag of the orientation."""
_QUARTER_TURNS = (5, 6, 7, 8)
"""Orientations in which height and width change places."""


def open_image(media: Media) -> Image.Image:
    """Return the decoded picture in RGB, upright, its colours those of sRGB, transparent parts white.

    Raises one of `DAMAGED`.
    """
    image, profile = _open_upright(media)
    return _on(convert_to_srgb(image, profile), "white").convert("RGB")


def open_mask(media: Media, *, alpha: bool) -> Image.Image:
    """Return a decoded mask in mode L, upright: its luma, transparent parts black; with `alpha`, its opacity alone.

    Raises one of `DAMAGED`.
    """
    # A mask's levels are data: a profile does not change them.
    image, _ = _open_upright(media)
    if alpha:
        return image.convert("RGBA").getchannel("A")
    if image.mode == "F":
        raise ValueError("its levels are floating-point numbers, and a mask's are 8 or 16 bits")
    # From RGB, since palettes and CMYK are no luma.
    return _on(image, "black").convert("RGB").convert("L")


def _open_upright(media: Media) -> tuple[Image.Image, bytes | None]:
    """Return the decoded picture in its own mode, upright, of 8 bits a level, and its ICC profile."""
    with open_picture(media) as opened:
        opened.load()
        _require_whole(media, opened)
        profile = opened.info.get("icc_profile")
        image = ImageOps.exif_transpose(opened)
    # Modes I and I;16 hold 16 bits a pixel, which Pillow would cut at 255; 65535 / 255 is 257.
    if image.mode.startswith("I"):
        levels = np.asarray(image, np.float32) / 257
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return image, profile


def _on(image: Image.Image, colour: str) -> Image.Image:
    """Return a picture with its transparent parts in that colour."""
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    ground = Image.new("RGBA", image.size, colour)
    return Image.alpha_composite(ground, image.convert("RGBA"))


def _require_whole(media: Media, image: Image.Image) -> None:
    with open_bytes(media) as stream:
        lacks = missing_rows(stream, image)
    if lacks:
        raise ValueError(lacks)


def image_size(media: Media) -> tuple[int, int]:
    """Return height and width in pixels of the upright image, as `open_image` turns it, from its header.

    Raises one of `DAMAGED`.
    """
    with open_picture(media) as image:
        with open_bytes(media) as stream:
            # Pillow would decode every PNG without EXIF to look for it behind the pixels, where it hardly ever is.
            if image.format == "PNG" and has_late_metadata(stream):
                image.load()
        orientation = Image.Image.getexif(image).get(ORIENTATION)
        # Pillow turns the size of a TIFF by its own tag when it opens it.
        tags = getattr(image, "tag_v2", {})
        is_turned = orientation in _QUARTER_TURNS and tags.get(ORIENTATION) not in _QUARTER_TURNS
        return (image.width, image.height) if is_turned else (image.height, image.width)


def upright(frame: av.VideoFrame, stretch: float) -> tuple[Image.Image, float]:
    """Return a frame's picture, turned and mirrored as its display matrix says, with the `stretch` of that picture."""
    orientation = Orientation.from_frame(frame)
    picture = orientation.apply(frame.to_ndarray(format="rgb24"))
    return Image.fromarray(picture), 1 / stretch if orientation.is_on_its_side else stretch


def cover(
    image: Image.Image,
    stretch: float,
    height: int,
    width: int,
    resample: Image.Resampling = Image.Resampling.LANCZOS,
) -> np.ndarray:
    """Return uint8 (H, W, 3), of mode L (H, W), of an image scaled to cover the shape and cropped at the centre."""
    # In square pixels the picture is `stretch` times as wide as it is stored.
    scale = max(width / (image.width * stretch), height / image.height)
    kept_width, kept_height = width / scale / stretch, height / scale
    left, top = (image.width - kept_width) / 2, (image.height - kept_height) / 2
    box = (left, top, left + kept_width, top + kept_height)
    return np.asarray(image.resize((width, height), resample, box=box))


def planes(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Stack pictures (H, W, 3) to uint8 (F, 3, H, W)."""
    # Plane by plane takes an eighth of the time of transposing them all.
    stacked = np.empty((len(pictures), 3, *pictures[0].shape[:2]), np.uint8)
    for frame, picture in zip(stacked, pictures, strict=True):
        for channel in range(3):
            frame[channel] = picture[..., channel]
    return stacked
