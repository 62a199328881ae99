"""Frames of a video that a chat model sees: which they are, and how they become its pixels.

Shapes: F frames, H and W pixels.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from dit_lora.data.media.decode import Instants
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, as_media
from dit_lora.data.media.pictures import cover, planes
from dit_lora.data.media.video import ClipError, pictures_at

_RATIOS = (3 / 4, 4 / 3)
_TRIES = 10


class Box(NamedTuple):
    """Part of an upright picture, in shares of its height and width."""

    top: float
    left: float
    height: float
    width: float


def frame_seconds(
    duration: float,
    fps: float,
    count: int,
    *,
    start: float | None = None,
    end: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[float, ...]:
    """Return one time, in seconds from the first frame, in each of `count` equal parts of `start` to `end`.

    It is that of the frame in the middle of each part or, with a `generator`, of any of its frames by
    chance. Fewer frames than `count` come once each, and the last one for the rest. An `end` after the
    clip's is the clip's. Images have no times. Raises `ClipError`, without the file's name, if nothing of
    the clip lies between `start` and `end`.

    Source: `get_frame_indices` of VideoChat2's video_utils.py, whose middle frames these are. By chance, it
    never takes the last frame of a part (a `range` that ends too early), and of parts of one frame it draws
    from the whole clip; here each frame of a part is as likely.
    """
    parts = _parts(duration, fps, count, start, end)
    if generator is None:
        return tuple((first + last) // 2 / fps for first, last in parts)
    draws = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    return tuple(
        (first + math.floor(draw * (last - first + 1))) / fps
        for (first, last), draw in zip(parts, draws, strict=True)
    )


def latest_seconds(
    duration: float,
    fps: float,
    count: int,
    *,
    start: float | None = None,
    end: float | None = None,
) -> tuple[float, ...]:
    """Return the latest times that `frame_seconds` can give: none takes more digits to write."""
    return tuple(last / fps for _, last in _parts(duration, fps, count, start, end))


def _parts(
    duration: float, fps: float, count: int, start: float | None, end: float | None
) -> list[tuple[int, int]]:
    """Return the first and the last frame of each part."""
    start, end = start or 0.0, duration if end is None else min(end, duration)
    if not start < end:
        raise ClipError(
            f"nothing lies between {start:g} s and {end:g} s of it; it is {duration:g} s long"
        )
    # The addend keeps 29.999999 frames from being 29.
    before = math.floor(start * fps + 1e-6)
    frames = max(1, math.floor((end - start) * fps + 1e-6))
    used = min(count, frames)
    bounds = [before + index * frames // used for index in range(used + 1)]
    parts = [(bounds[index], bounds[index + 1] - 1) for index in range(used)]
    return parts + parts[-1:] * (count - used)


def read_at(
    media: Media,
    seconds: Sequence[float],
    *,
    height: int,
    width: int,
    fit: Literal["stretch", "cover"],
    box: Box | None = None,
) -> torch.Tensor:
    """Return uint8 (F, 3, H, W): the frames nearest to `seconds` since the clip's first frame, which must ascend.

    An image is one frame, whatever the times. Each frame is first cut to `box`. Then `stretch` resizes what
    is left, bicubic with antialiasing and without regard to its aspect, as VideoChat2's notebooks do (its
    training's crops are tensors, which torchvision 0.14 resizes without antialiasing); `cover` resizes as
    `read_frames` does. The last frame stands for a second, or for as long as it is shown if that is longer:
    a length that the file gives may be its sound's. Frames between the last time after one key frame and
    the next key frame are not decoded. Raises `ClipError` if the file cannot be read as far as needed,
    `ValueError` if times do not ascend or a video has none.
    """
    media, times = as_media(media), tuple(seconds)
    if list(times) != sorted(times) or not (times or is_image(media)):
        raise ValueError(f"a video needs times, in order; got {times}")

    def fitted(image: Image.Image, stretch: float) -> np.ndarray:
        if box is not None:
            image = image.crop(_pixels(box, image.width, image.height))
        if fit == "cover":
            return cover(image, stretch, height, width)
        return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))

    chosen = pictures_at(media, Instants(times), fitted)
    if len(chosen) < len(times) and not is_image(media):
        raise ClipError(
            f"{media.name}: it ends before {times[len(chosen)]:.2f} s, where a frame is asked for, though it says "
            "that it is longer; encode it anew or remove it"
        )
    return torch.from_numpy(planes(chosen))


def _pixels(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a box in pixels; it has one pixel at least."""
    left = min(round(box.left * width), width - 1)
    top = min(round(box.top * height), height - 1)
    kept_width, kept_height = max(1, round(box.width * width)), max(1, round(box.height * height))
    return left, top, min(width, left + kept_width), min(height, top + kept_height)


def random_box(generator: torch.Generator, least: float, aspect: float = 1.0) -> Box:
    """Draw a crop: `least` to 1 of the picture's area, 3:4 to 4:3, anywhere in it.

    `aspect` is the picture's width to its height. After ten draws that do not fit in, it is the largest
    crop in the middle. This is the rule of torchvision's `RandomResizedCrop`, in shares in place of whole
    pixels.
    """
    for _ in range(_TRIES):
        area, ratio, down, across = torch.rand(4, dtype=torch.float64, generator=generator).tolist()
        share = least + (1 - least) * area
        # The ratio is drawn on a logarithmic scale, where 3:4 and 4:3 are as far from 1.
        low, high = (math.log(bound) for bound in _RATIOS)
        relative = math.exp(low + (high - low) * ratio) / aspect
        width, height = math.sqrt(share * relative), math.sqrt(share / relative)
        if width <= 1 and height <= 1:
            return Box((1 - height) * down, (1 - width) * across, height, width)
    width = min(1.0, _RATIOS[1] / aspect)
    height = min(1.0, aspect / _RATIOS[0])
    return Box((1 - height) / 2, (1 - width) / 2, height, width)
