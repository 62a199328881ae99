"""Decodes references and masks: references at their own size, masks scaled and cropped like their sample.

Shapes: F frames, H and W pixels.
"""

import numpy as np
import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media.decode import WantedTimes
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, read_media
from dit_lora.data.media.pictures import DAMAGED, cover, open_mask, planes
from dit_lora.data.media.video import ClipError, pictures_at, read_frames, reason

NEAR = 0.02
"""Relative difference allowed between the aspect ratios of a mask and its picture, since sizes are rounded."""


def read_reference(
    media: Media, clip: VideoShape | None, fps: float | None, start: float = 0.0
) -> torch.Tensor:
    """Pixels of a reference, uint8 (F, 3, H, W): a picture or a video's first frame, upright and at its own size.

    With `clip`, the frames of a clip of that shape instead, scaled and cropped to it. Raises `ClipError` if the
    file cannot be read as far as needed.
    """
    # A video reference has as many frames as its sample, at the same times.
    if clip is not None and clip.frames > 1:
        size = {"height": clip.height, "width": clip.width}
        return read_frames(media, frames=clip.frames, fps=fps, start=start, **size)
    chosen = pictures_at(media, WantedTimes(1, 1.0, start), _own_size)
    if not chosen:
        raise ClipError(f"{media.name}: too short: it has no frame {start:g} s from its start")
    return torch.from_numpy(planes(chosen))


def _own_size(image: Image.Image, stretch: float) -> np.ndarray:
    """A picture in square pixels, uint8 (H, W, 3)."""
    if stretch != 1:
        # Stretch only the width, so that the height keeps its stored resolution.
        size = (max(1, round(image.width * stretch)), image.height)
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def read_mask(media: Media, *, alpha: bool, height: int, width: int) -> torch.Tensor:
    """A mask as float32 (H, W) from 0 to 1: grey values, or with `alpha` the opacity of a picture.

    It is scaled and cropped like its sample. Raises `ClipError` if the file is not a picture, or nothing in it
    is above 0.
    """
    if not is_image(media):
        raise ClipError(f"{media.name}: a mask is a picture, and it is not named as one")
    try:
        grey = read_media(media, lambda: open_mask(media, alpha=alpha), DAMAGED)
    except DAMAGED as error:
        raise ClipError(f"{media.name}: cannot be read as a mask: {reason(error)}") from error
    if grey.getextrema()[1] == 0:
        problem = "it is wholly transparent" if alpha else "its mask is black"
        raise ClipError(f"{media.name}: {problem}, so that nothing of the sample would be learned")
    # Average over areas: black stays 0 next to an edge, where Lanczos would overshoot.
    pixels = cover(grey, 1.0, height, width, Image.Resampling.BOX)
    if not pixels.any():
        raise ClipError(
            f"{media.name}: all that its mask leaves is cropped away, so that nothing of the sample would be learned"
        )
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def wrong_mask(mask: tuple[int, int], picture: tuple[int, int]) -> str | None:
    """Why a mask of that height and width does not fit a picture of the other; None if it does."""
    # Quotient of the two aspect ratios, width by height.
    ratio = mask[1] * picture[0] / (mask[0] * picture[1])
    if abs(ratio - 1) <= NEAR:
        return None
    return (
        f"its mask is {mask[1]} x {mask[0]} and the picture {picture[1]} x {picture[0]}: "
        "they have to have one shape"
    )
