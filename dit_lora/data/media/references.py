"""Decodes references and masks: references at their own size, masks scaled and cropped like their sample.

Shapes: F frames, H and W pixels.
"""

import numpy as np
import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media.decode import RegularFrameTimes
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, read_media
from dit_lora.data.media.pictures import DECODE_ERRORS, open_mask, scale_to_cover, stack_pictures
from dit_lora.data.media.video import ClipError, decode_pictures, describe_media_error, read_frames


def read_reference(media: Media, clip_shape: VideoShape | None, fps: float | None, start: float = 0.0) -> torch.Tensor:
    """Read a reference picture, or a video's first frame, uint8 (F, 3, H, W), upright and at its own size.

    With `clip_shape`, the frames of a clip of that shape instead, scaled and cropped to it. Raises `ClipError` if the
    file cannot be read as far as needed.
    """
    # A video reference has as many frames as its sample, at the same times.
    if clip_shape is not None and clip_shape.frames > 1:
        size = {"height": clip_shape.height, "width": clip_shape.width}
        return read_frames(media, frames=clip_shape.frames, fps=fps, start=start, **size)
    chosen = decode_pictures(media, RegularFrameTimes(1, 1.0, start), _resize_to_square_pixels)
    if not chosen:
        raise ClipError(f"{media.name}: too short: it has no frame {start:g} s from its start")
    return torch.from_numpy(stack_pictures(chosen))


def _resize_to_square_pixels(image: Image.Image, pixel_aspect: float) -> np.ndarray:
    """Resize a picture so that its pixels are square, uint8 (H, W, 3)."""
    if pixel_aspect != 1:
        # Stretch only the width, so that the height keeps its stored resolution.
        image = image.resize((max(1, round(image.width * pixel_aspect)), image.height), Image.Resampling.LANCZOS)
    return np.asarray(image)


def read_mask(media: Media, *, alpha: bool, height: int, width: int) -> torch.Tensor:
    """A mask as float32 (H, W) from 0 to 1: grey values, or with `alpha` the opacity of a picture.

    It is scaled and cropped like its sample. Raises `ClipError` if the file is not a picture, or nothing in it
    is above 0.
    """
    if not is_image(media):
        raise ClipError(f"{media.name}: a mask must be a picture, and its name is not that of one")
    try:
        grey = read_media(media, lambda: open_mask(media, alpha=alpha), DECODE_ERRORS)
    except DECODE_ERRORS as error:
        raise ClipError(f"{media.name}: cannot be read as a mask: {describe_media_error(error)}") from error
    if grey.getextrema()[1] == 0:
        problem = "it is completely transparent" if alpha else "its mask is black"
        raise ClipError(f"{media.name}: {problem}, so nothing of the sample would be learned")
    # Average over areas: black stays 0 next to an edge, where Lanczos would overshoot.
    pixels = scale_to_cover(grey, 1.0, height, width, Image.Resampling.BOX)
    if not pixels.any():
        raise ClipError(
            f"{media.name}: everything inside its mask is cropped away, so nothing of the sample would be learned"
        )
    return torch.from_numpy(pixels.astype(np.float32) / 255)
