"""Single pictures of images and videos: upright, in square pixels, scaled to cover a shape, cropped at the centre.

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
from dit_lora.data.media.media import Media, open_media_bytes
from dit_lora.data.media.missing_rows import find_missing_rows, has_metadata_after_pixels
from dit_lora.data.media.opened import open_picture

_MASK_ASPECT_TOLERANCE = 0.02
"""Relative difference allowed between the aspect ratios of a mask and its picture, since sizes are rounded."""

# Exceptions that Pillow's readers raise for damaged files.
DECODE_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, ArithmeticError, AttributeError),
    # AVIF's decoder raises `RuntimeError`.
    *(MemoryError, RuntimeError, struct.error, zlib.error, Image.DecompressionBombError),
)

ORIENTATION_TAG = 0x0112
"""EXIF tag of the orientation."""
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
"""EXIF orientations in which height and width are swapped."""


def open_image(media: Media) -> Image.Image:
    """Decode a picture to RGB: upright, in sRGB, with transparent parts white; raises one of `DECODE_ERRORS`."""
    image, profile = _open_upright_picture(media)
    return _fill_transparency(convert_to_srgb(image, profile), "white").convert("RGB")


def open_mask(media: Media, *, alpha: bool) -> Image.Image:
    """Decode a mask to mode L, upright: its luma with transparent parts black, or with `alpha` only its opacity.

    Raises one of `DECODE_ERRORS`.
    """
    # The levels of a mask are data, so its colour profile is ignored.
    image, _ = _open_upright_picture(media)
    if alpha:
        return image.convert("RGBA").getchannel("A")
    if image.mode == "F":
        raise ValueError("its levels are floating-point numbers, and a mask's are 8 or 16 bits")
    # Convert to RGB first, since palette and CMYK values are not luma.
    return _fill_transparency(image, "black").convert("RGB").convert("L")


def _open_upright_picture(media: Media) -> tuple[Image.Image, bytes | None]:
    """Decode a picture in its own mode, upright, with 8 bits per level; also returns its ICC profile."""
    with open_picture(media) as opened:
        # Decode before checking for missing rows, and before the file is closed.
        opened.load()
        with open_media_bytes(media) as stream:
            problem = find_missing_rows(stream, opened)
        if problem:
            raise ValueError(problem)
        profile = opened.info.get("icc_profile")
        image = ImageOps.exif_transpose(opened)
    # Modes I and I;16 have 16 bits per pixel, which Pillow would clip at 255; 65535 / 255 is 257.
    if image.mode.startswith("I"):
        levels = np.asarray(image, np.float32) / 257
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return image, profile


def _fill_transparency(image: Image.Image, colour: str) -> Image.Image:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    ground = Image.new("RGBA", image.size, colour)
    return Image.alpha_composite(ground, image.convert("RGBA"))


def read_image_size(media: Media) -> tuple[int, int]:
    """Height and width in pixels of an upright image, from its header; raises one of `DECODE_ERRORS`."""
    with open_picture(media) as image:
        with open_media_bytes(media) as stream:
            # To find EXIF after the pixels of a PNG, Pillow must decode it. It is rarely there, so check first.
            if image.format == "PNG" and has_metadata_after_pixels(stream):
                image.load()
        orientation = Image.Image.getexif(image).get(ORIENTATION_TAG)
        # When Pillow opens a TIFF, it swaps height and width itself according to the TIFF's own tag.
        tags = getattr(image, "tag_v2", {})
        is_turned = orientation in _SIDEWAYS_ORIENTATIONS and tags.get(ORIENTATION_TAG) not in _SIDEWAYS_ORIENTATIONS
        return (image.width, image.height) if is_turned else (image.height, image.width)


def to_upright_image(frame: av.VideoFrame, pixel_aspect: float) -> tuple[Image.Image, float]:
    """Convert a video frame to a picture, upright by its display matrix; also returns its pixel aspect ratio."""
    orientation = Orientation.from_frame(frame)
    picture = orientation.apply(frame.to_ndarray(format="rgb24"))
    # A rotation by 90 degrees also turns the pixels' shape.
    return Image.fromarray(picture), 1 / pixel_aspect if orientation.swaps_height_and_width else pixel_aspect


def scale_to_cover(
    image: Image.Image,
    pixel_aspect: float,
    height: int,
    width: int,
    resample: Image.Resampling = Image.Resampling.LANCZOS,
) -> np.ndarray:
    """Scale an image to cover the shape and crop it at the centre: uint8 (H, W, 3), or (H, W) for mode L."""
    # In square pixels, the picture is `pixel_aspect` times as wide as stored.
    scale = max(width / (image.width * pixel_aspect), height / image.height)
    crop_width, crop_height = width / scale / pixel_aspect, height / scale
    # The box is in stored pixels, centred; Pillow resizes only this part.
    x, y = (image.width - crop_width) / 2, (image.height - crop_height) / 2
    box = (x, y, x + crop_width, y + crop_height)
    return np.asarray(image.resize((width, height), resample, box=box))


def stack_pictures(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Stack pictures (H, W, 3) to uint8 (F, 3, H, W)."""
    # Copying plane by plane takes an eighth of the time of a transpose.
    stacked = np.empty((len(pictures), 3, *pictures[0].shape[:2]), np.uint8)
    for frame, picture in zip(stacked, pictures, strict=True):
        for channel in range(3):
            frame[channel] = picture[..., channel]
    return stacked


def find_mask_mismatch(mask_size: tuple[int, int], picture_size: tuple[int, int]) -> str | None:
    """Why a mask's height and width do not fit those of its picture; None if they do."""
    # Quotient of the two aspect ratios, width by height.
    ratio = mask_size[1] * picture_size[0] / (mask_size[0] * picture_size[1])
    if abs(ratio - 1) <= _MASK_ASPECT_TOLERANCE:
        return None
    return (
        f"its mask is {mask_size[1]} x {mask_size[0]} and the picture {picture_size[1]} x "
        f"{picture_size[0]}: both must have the same shape"
    )
