"""Chooses the frames of a video that a chat model sees, and converts them to its input pixels.

Shapes: F frames, H and W pixels.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from dit_lora.data.media.decode import ArbitraryFrameTimes
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, to_media
from dit_lora.data.media.pictures import scale_to_cover, stack_pictures
from dit_lora.data.media.video import ClipError, decode_pictures

_ASPECT_RANGE = (3 / 4, 4 / 3)
_MAX_TRIES = 10


class CropBox(NamedTuple):
    """Crop box of an upright picture, in fractions of its height and width."""

    top: float
    left: float
    height: float
    width: float


def sample_frame_times(
    duration: float,
    fps: float,
    count: int,
    *,
    start: float | None = None,
    end: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[float, ...]:
    """One time, in seconds from the first frame, in each of `count` equal parts of `start` to `end`.

    It is the time of the middle frame of each part or, with a `generator`, of a random frame of it. If there
    are fewer frames than `count`, each comes once and the last one is repeated. An `end` after the clip's end
    means the clip's end. Images have no times. Raises `ClipError`, without the file's name, if no part of the
    clip is between `start` and `end`.

    Source: `get_frame_indices` of VideoChat2's video_utils.py, with the same middle frames. Its random choice
    never takes the last frame of a part (a `range` that ends too early), and for parts of one frame it draws
    from the whole clip; here each frame of a part is equally likely.
    """
    parts = _split_frames(duration, fps, count, start, end)
    if generator is None:
        return tuple((begin + stop) // 2 / fps for begin, stop in parts)
    # float64, so that rounding never reaches the next frame.
    draws = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    return tuple(
        (begin + math.floor(draw * (stop - begin + 1))) / fps for (begin, stop), draw in zip(parts, draws, strict=True)
    )


def compute_latest_times(
    duration: float, fps: float, count: int, *, start: float | None = None, end: float | None = None
) -> tuple[float, ...]:
    """Latest times, in seconds, that `sample_frame_times` can return; no others need more digits as text."""
    return tuple(stop / fps for _, stop in _split_frames(duration, fps, count, start, end))


def _split_frames(
    duration: float, fps: float, count: int, start: float | None, end: float | None
) -> list[tuple[int, int]]:
    """First and last frame of each of `count` equal parts of a clip."""
    start, end = start or 0.0, duration if end is None else min(end, duration)
    if not start < end:
        raise ClipError(f"nothing lies between {start:g} s and {end:g} s of it; it is {duration:g} s long")
    # The small addend keeps rounding errors from turning 30 frames into 29.
    before = math.floor(start * fps + 1e-6)
    frames = max(1, math.floor((end - start) * fps + 1e-6))
    used = min(count, frames)
    bounds = [before + index * frames // used for index in range(used + 1)]
    parts = [(bounds[index], bounds[index + 1] - 1) for index in range(used)]
    return parts + parts[-1:] * (count - used)


def read_frames_at(
    media: Media,
    seconds: Sequence[float],
    *,
    height: int,
    width: int,
    fit: Literal["stretch", "cover"],
    box: CropBox | None = None,
) -> torch.Tensor:
    """Frames nearest to `seconds` since the clip's first frame, as uint8 (F, 3, H, W).

    An image is one frame, regardless of the times. Each frame is first cropped to `box`. The fit `stretch` then
    resizes without keeping the aspect ratio, bicubic with antialiasing, as VideoChat2's notebooks do. (Its training
    crops tensors, which torchvision 0.14 resizes without antialiasing.) `cover` resizes as `read_frames` does. The
    last frame is used for times up to one second after it, or for as long as it is shown if that is longer, because
    the length stated in a file may be that of its sound. Frames between the last time after one key frame and the next
    key frame are not decoded.

    Raises:
        ClipError: The file cannot be read as far as needed.
        ValueError: The times do not ascend, or a video has none.
    """
    media, times = to_media(media), tuple(seconds)
    if list(times) != sorted(times) or not (times or is_image(media)):
        raise ValueError(f"the times of a video must be in order; got {times}")

    def fit_picture(image: Image.Image, pixel_aspect: float) -> np.ndarray:
        if box is not None:
            # Crop before resizing, so that the result has the full resolution. The crop has at least one pixel.
            x = min(round(box.left * image.width), image.width - 1)
            top = min(round(box.top * image.height), image.height - 1)
            right = min(image.width, x + max(1, round(box.width * image.width)))
            bottom = min(image.height, top + max(1, round(box.height * image.height)))
            image = image.crop((x, top, right, bottom))
        if fit == "cover":
            return scale_to_cover(image, pixel_aspect, height, width)
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))

    # Fewer pictures than times mean that the file ends before its stated length.
    chosen = decode_pictures(media, ArbitraryFrameTimes(times), fit_picture)
    if len(chosen) < len(times) and not is_image(media):
        raise ClipError(
            f"{media.name}: it ends before {times[len(chosen)]:.2f} s, where a frame is needed, though its "
            "header says that it is longer; encode it again or remove it"
        )
    return torch.from_numpy(stack_pictures(chosen))


def sample_random_box(generator: torch.Generator, min_share: float, aspect: float = 1.0) -> CropBox:
    """Random crop box with `min_share` to 1 of the picture's area and a ratio of 3:4 to 4:3, anywhere in the picture.

    `aspect` is the picture's width divided by its height. After ten draws that do not fit, it is the largest crop in
    the centre. This is the algorithm of torchvision's `RandomResizedCrop`, with shares instead of whole pixels.
    """
    for _ in range(_MAX_TRIES):
        area, ratio, down, across = torch.rand(4, dtype=torch.float64, generator=generator).tolist()
        share = min_share + (1 - min_share) * area
        # The ratio is uniform on a logarithmic scale, on which 3:4 and 4:3 are equally far from 1.
        low, high = (math.log(bound) for bound in _ASPECT_RANGE)
        relative = math.exp(low + (high - low) * ratio) / aspect
        width, height = math.sqrt(share * relative), math.sqrt(share / relative)
        if width <= 1 and height <= 1:
            return CropBox((1 - height) * down, (1 - width) * across, height, width)
    width = min(1.0, _ASPECT_RANGE[1] / aspect)
    height = min(1.0, aspect / _ASPECT_RANGE[0])
    return CropBox((1 - height) / 2, (1 - width) / 2, height, width)
