"""Converts pictures with an ICC profile to sRGB, as browsers and viewers show them."""

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

# By the profile's colour space: the mode in which lcms receives the picture, and the Pillow modes it applies to.
_PROFILE_MODES: Mapping[str, tuple[str, frozenset[str]]] = {
    "RGB ": ("RGB", frozenset({"RGB", "RGBA", "RGBX", "P", "PA", "L", "LA", "1"})),
    "GRAY": ("L", frozenset({"L", "LA", "1"})),
    "CMYK": ("CMYK", frozenset({"CMYK"})),
}
_MAX_ROUNDING = 1
"""Maximum difference, in levels of 255, at which a profile counts as sRGB itself."""
_PROBE_IMAGE = Image.fromarray(
    np.stack(np.meshgrid(*[np.arange(0, 256, 17)] * 3), -1).reshape(1, -1, 3).astype(np.uint8)
)


def convert_to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert a picture of 8 bits, with its transparency, to sRGB; unchanged if its profile is missing or sRGB."""
    transform = _build_transform(profile, image.mode) if profile else None
    if transform is None:
        return image
    source_mode, converter = transform
    if "transparency" in image.info or image.mode == "PA":
        image = image.convert("RGBA")
    # lcms converts colours only, so the transparency is kept aside and put back.
    alpha = image.getchannel("A") if "A" in image.getbands() else None
    converted = converter.apply(image.convert(source_mode))
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def has_non_srgb_colours(image: Image.Image) -> bool:
    """True if a picture's colour profile is not sRGB, so that `convert_to_srgb` would change its colours."""
    profile = image.info.get("icc_profile")
    # `open_image` reduces 16-bit grey to mode L before the conversion.
    mode = "L" if image.mode.startswith("I") else image.mode
    return profile is not None and _build_transform(profile, mode) is not None


# A set of pictures usually has only a few profiles.
@lru_cache(maxsize=64)
def _build_transform(profile: bytes, mode: str) -> tuple[str, Any] | None:
    """Build the colour transform of a picture's ICC profile to sRGB, and the mode that lcms receives.

    None if the profile is damaged, of another kind, or sRGB.
    """
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = str(source.profile.xcolor_space)
        if space not in _PROFILE_MODES or mode not in _PROFILE_MODES[space][1]:
            return None
        source_mode = _PROFILE_MODES[space][0]
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(source, srgb, source_mode, "RGB")
    except (OSError, ImageCms.PyCMSError):
        # Viewers ignore a damaged profile too.
        return None
    # A grid of colours over the whole range, (1, 4096) pixels.
    probe = _PROBE_IMAGE.convert(source_mode)
    before = np.asarray(probe.convert("RGB"), np.int16)
    after = np.asarray(transform.apply(probe), np.int16)
    if np.abs(after - before).max() <= _MAX_ROUNDING:
        return None
    return source_mode, transform
