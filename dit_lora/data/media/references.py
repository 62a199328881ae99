"""References and masks as pixels: references at their own size, masks as their sample is scaled and cropped.

Shapes: F frames, H and W pixels.
"""

import numpy as np
import torch
from PIL import Image, ImageOps

from dit_lora.config.data import VideoShape
from dit_lora.data.media.decode import WantedTimes
from dit_lora.data.media.media import Media, require_readable
from dit_lora.data.media.opened import open_picture
from dit_lora.data.media.pictures import DAMAGED, cover, planes
from dit_lora.data.media.video import ClipError, pictures_at, read_frames, reason

NEAR = 0.02
"""Part by which the aspect ratio of a mask may differ from its picture's: sizes are whole numbers."""


def read_reference(
    media: Media, clip: VideoShape | None, fps: float | None, start: float = 0.0
) -> torch.Tensor:
    """Return a reference's pixels, uint8 (F, 3, H, W): a picture, or a video's first frame, upright and at its own size.

    With `clip`, the frames that a clip of that shape has, scaled and cropped to it. Raises `ClipError` if it cannot be
    read as far as needed.
    """
    if clip is None or clip.frames == 1:
        return torch.from_numpy(planes(pictures_at(media, WantedTimes(1, 1.0, start), _own_size)))
    size = {"height": clip.height, "width": clip.width}
    return read_frames(media, frames=clip.frames, fps=fps, start=start, **size)


def _own_size(image: Image.Image, stretch: float) -> np.ndarray:
    """Return uint8 (H, W, 3) of a picture in square pixels."""
    if stretch != 1:
        size = (max(1, round(image.width * stretch)), image.height)
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def read_mask(media: Media, *, alpha: bool, height: int, width: int) -> torch.Tensor:
    """Return a mask as float32 (H, W) from 0 to 1: grey values, or with `alpha` how opaque a picture is.

    It is scaled and cropped as its sample. Raises `ClipError` if the file is no picture, or nothing in it is above 0.
    """
    try:
        with open_picture(media) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
            if alpha:
                grey = image.convert("RGBA").getchannel("A")
            else:
                grey = image.convert("RGB").convert("L")
    except DAMAGED as error:
        require_readable(media)
        raise ClipError(f"{media.name}: cannot be read as a mask: {reason(error)}") from error
    mask = torch.from_numpy(cover(grey, 1.0, height, width).astype(np.float32) / 255)
    if not bool((mask > 0).any()):
        what = "it is wholly transparent" if alpha else "its mask is black"
        raise ClipError(f"{media.name}: {what}, so that nothing of the sample would be learned")
    return mask


def wrong_mask(mask: tuple[int, int], picture: tuple[int, int]) -> str | None:
    """Return why a mask of that height and width does not fit a picture's; None if it does."""
    ratio = mask[1] * picture[0] / (mask[0] * picture[1])
    if abs(ratio - 1) <= NEAR:
        return None
    return f"its mask is {mask[1]} x {mask[0]} and the picture {picture[1]} x {picture[0]}: they have to have one shape"
