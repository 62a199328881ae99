"""Buckets: the shapes by which samples are grouped, and the choice of a bucket for each clip.

Units are pixels and seconds. Everything is computed from the recipe and from media headers: nothing is decoded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.media.decode import RegularFrameTimes
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError, format_list

# Sides are multiples of a step, so areas and ratios are met within this tolerance. The budget may be exceeded by it.
TOLERANCE = 0.05
# Rounding a side may enlarge a picture by up to this factor, which does not count as enlargement.
MAX_ENLARGEMENT = 1 + TOLERANCE / 2


@dataclass(frozen=True)
class BucketPlacement:
    """Bucket of a clip, with the crop and the enlargement that it needs."""

    shape: VideoShape
    starts: tuple[float, ...]
    """Start of each sample (window) of the clip, in seconds; the first is 0."""
    crop: float
    """Share of the picture that is cropped away."""
    upscale: float
    """Factor by which the picture is enlarged; 1 if it is not."""
    header: VideoHeader


@dataclass(frozen=True)
class DroppedClip:
    """Reason why a clip has no bucket: code `too_short`, `cropped` or `upscaled`, and a message."""

    code: str
    words: str


def make_window_id(clip_id: str, start: float) -> str:
    """Id of the sample that begins at `start` seconds of a clip; at 0 s it is the clip's id."""
    return f"{clip_id}@{round(start, 3):.12g}s" if start else clip_id


def list_buckets(
    data: DataConfig,
    side_step: int,
    unsupported_reason: Callable[[VideoShape], str | None],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[VideoShape, ...]:
    """List the buckets of a recipe, smallest first: those of `data.buckets`, or a single shape without buckets.

    There is one for each aspect ratio, resolution and number of frames within the budget of data.frames x
    data.height x data.width. Sides are multiples of `side_step`, chosen among all near ones to fit the
    requested area and ratio; they may exceed the budget by `TOLERANCE`. The recipe's own height and width, in
    either orientation, are used for their aspect ratio.

    Args:
        data: The recipe's data section.
        side_step: Step of the model's height and width, in pixels.
        unsupported_reason: Returns why the model cannot train a shape; None if it can.
        say: Receives a message about the shapes that are left out.

    Raises:
        DitLoraError: No shape is left.
    """
    if data.buckets is None:
        shapes = {VideoShape.from_data(data)}
    else:
        shapes = {
            VideoShape(frames, *sides)
            for frames in data.buckets.frames or (data.frames,)
            for resolution in _list_resolutions(data)
            for ratio in data.buckets.aspect_ratios
            if (sides := _choose_sides(data, frames, resolution, ratio, side_step))
        }
    if not shapes:
        raise DitLoraError(
            f"data.buckets: no shape is within the budget of {VideoShape.from_data(data)}; lower "
            "data.buckets.resolutions or data.buckets.frames, or raise data.height and data.width"
        )
    # The model may not support a shape, for example because of its VAE stride or patch size.
    refused = {shape: reason for shape in sorted(shapes) if (reason := unsupported_reason(shape))}
    lines = [f"{shape}: {reason}" for shape, reason in refused.items()]
    if len(refused) == len(shapes):
        raise DitLoraError(format_list("none of the shapes in data can be trained (frames x height x width)", lines))
    if refused:
        say(format_list("left out: buckets that cannot be trained", lines))
    return tuple(sorted(shapes - refused.keys()))


def choose_bucket(
    header: VideoHeader, buckets: Sequence[VideoShape], data: DataConfig
) -> BucketPlacement | DroppedClip:
    """Choose the bucket of a clip, and the windows in it.

    The clip gets the largest number of frames that it certainly has at `data.fps`. Of those buckets, the
    highest resolution that does not enlarge it beyond rounding is chosen, or else the one that enlarges it
    least; of these, the shape that crops least. An image has one frame. With `data.buckets`, a clip that
    exceeds the allowed crop or enlargement is dropped.
    """
    # The number of frames comes first: it decides how much of the clip is used.
    frames = _choose_num_frames(header, buckets, data.fps)
    if frames is None:
        min_frames = min(shape.frames for shape in buckets)
        if header.is_image:
            message = f"too short: an image is one frame, and the smallest bucket needs {min_frames}"
        else:
            num_available = _count_frames(header, 0.0, min_frames, data.fps, extra_frames=1)
            message = (
                f"too short: it gives at most {num_available} frames at {data.fps or 1.0:g} fps, and the smallest "
                f"bucket needs {min_frames}; lower data.frames, raise data.fps or remove it"
            )
        return DroppedClip("too_short", message)
    return _choose_best_shape(header, [shape for shape in buckets if shape.frames == frames], data)


def _list_resolutions(data: DataConfig) -> tuple[float, ...]:
    """Resolutions of a recipe's buckets: side of a square with the same area, in pixels, ascending."""
    # Without resolutions, there is one: that of the recipe's own height and width.
    resolutions = data.buckets.resolutions if data.buckets else None
    return tuple(sorted({*resolutions})) if resolutions else (math.sqrt(data.height * data.width),)


def _choose_sides(
    data: DataConfig, frames: int, resolution: float, ratio: str, side_step: int
) -> tuple[int, int] | None:
    """Choose a bucket's height and width nearest to a resolution and a ratio; None if none is within the budget."""
    budget = VideoShape.from_data(data).volume * (1 + TOLERANCE)
    # A ratio is written width to height, such as 16:9.
    aspect = Fraction(ratio.replace(":", "/"))
    if resolution**2 * frames > budget:
        return None

    def compute_error(sides: tuple[int, int]) -> float:
        height, width = sides
        # Both errors are logarithms, so that twice and half the value count the same.
        area = math.log(height * width / resolution**2)
        return math.hypot(area, math.log(width / height / aspect))

    # If the recipe's own height and width are near enough, use exactly these.
    for sides in ((data.height, data.width), (data.width, data.height)):
        if compute_error(sides) < TOLERANCE and data.height % side_step == data.width % side_step == 0:
            return sides
    # Exact sides of the requested area and ratio; sides on the grid around them are tried below.
    height = math.sqrt(resolution**2 / aspect)
    candidates = [
        (high, wide)
        for high in _list_multiples(height, side_step)
        for wide in _list_multiples(height * aspect, side_step)
        if high * wide * frames <= budget
    ]
    # Compare the sides too, so that equal errors give the same choice on every machine.
    return min(candidates, key=lambda sides: (compute_error(sides), sides), default=None)


def _list_multiples(side: float, step: int) -> list[int]:
    middle = round(side / step)
    # Two steps to either side: the best pair need not be the nearest in each side.
    return [step * count for count in range(max(1, middle - 2), middle + 3)]


def _choose_num_frames(header: VideoHeader, buckets: Sequence[VideoShape], fps: float | None) -> int | None:
    """Choose the largest number of frames of any bucket that a clip can give; None if there is none."""
    lengths = sorted({shape.frames for shape in buckets}, reverse=True)
    if header.is_image:
        return 1 if 1 in lengths else None
    certain = next((frames for frames in lengths if _count_frames(header, 0.0, frames, fps) == frames), None)
    if certain is not None:
        return certain
    # Some files do not count the last frame's duration, so they may have one frame more than stated;
    # only decoding shows whether they do.
    shortest = lengths[-1]
    return shortest if _count_frames(header, 0.0, shortest, fps, extra_frames=1) == shortest else None


def _count_frames(header: VideoHeader, start: float, frames: int, fps: float | None, extra_frames: float = 0) -> int:
    """Number of frames, up to `frames`, that a clip has from `start` on if it is `extra_frames` longer than stated."""
    if header.seconds is None or header.fps is None:
        return frames
    # Each time gets the nearest frame, so the last frame is used for times up to half its duration after it.
    end = header.seconds + (extra_frames - 0.5) / header.fps
    return RegularFrameTimes(frames, fps or 1.0, start).count_frame_times_until(end)


def _compute_cost(header: VideoHeader, shape: VideoShape) -> tuple[float, float]:
    """Cost of fitting a picture into a shape: the share cropped away, and the enlargement.

    The picture is scaled to cover the shape and cropped at the centre.
    """
    scale = max(shape.height / header.height, shape.width / header.width)
    # Share of the scaled picture's area that is inside the shape.
    remaining = shape.height * shape.width / (header.height * header.width * scale**2)
    return max(0.0, 1 - remaining), max(1.0, scale)


def _choose_best_shape(
    header: VideoHeader, shapes: Sequence[VideoShape], data: DataConfig
) -> BucketPlacement | DroppedClip:
    limits = data.buckets
    max_crop = limits.max_crop if limits and limits.max_crop is not None else 1.0
    max_upscale = limits.max_upscale if limits and limits.max_upscale is not None else math.inf
    # (crop, enlargement, shape) of each candidate.
    costs = [(*_compute_cost(header, shape), shape) for shape in shapes]
    allowed = [cost for cost in costs if cost[0] <= max_crop and cost[1] <= max_upscale]
    resolutions = _list_resolutions(data)
    levels: dict[float, list[tuple[float, float, VideoShape]]] = {}
    # If no shape is allowed, continue with all of them, to name the best one in the message.
    for cost in allowed or costs:
        side = math.sqrt(cost[2].height * cost[2].width)
        # The resolution that the shape was made for: the nearest on a logarithmic scale.
        nearest = min(resolutions, key=lambda resolution: abs(math.log(side / resolution)))
        levels.setdefault(nearest, []).append(cost)
    # For each resolution, take the shape that crops least, which is the one nearest to the clip's aspect ratio.
    best_by_level = {level: min(level_costs) for level, level_costs in levels.items()}
    unenlarged = [level for level, cost in best_by_level.items() if cost[1] <= MAX_ENLARGEMENT]
    # Choose the highest resolution without enlargement, or else the one that enlarges least.
    level = max(unenlarged, default=None) or min(
        best_by_level, key=lambda candidate: (best_by_level[candidate][1], candidate)
    )
    crop, upscale, best = best_by_level[level]
    if allowed:
        return BucketPlacement(best, _list_window_starts(header, best.frames, data), crop, upscale, header)
    size = f"its picture of {header.width}x{header.height}"
    if crop > max_crop:
        message = f"{best} would lose {crop:.0%} of {size}; data.buckets.max_crop is {max_crop:g}"
        return DroppedClip("cropped", message)
    message = f"{best} would enlarge {size} {upscale:.2f} times; data.buckets.max_upscale is {max_upscale:g}"
    return DroppedClip("upscaled", message)


def _list_window_starts(header: VideoHeader, frames: int, data: DataConfig) -> tuple[float, ...]:
    # Without length or frame rate in the header, or fps in the recipe, the start of a second window is unknown.
    if data.fps is None or None in (header.seconds, header.fps):
        return (0.0,)
    # By default, windows follow one another without overlap.
    stride = data.window_stride or frames / data.fps
    starts = [0.0]
    while data.windows == "all" or len(starts) < data.windows:
        start = len(starts) * stride
        if _count_frames(header, start, frames, data.fps) < frames:
            break
        starts.append(start)
    return tuple(starts)
