"""Buckets: the shapes that samples are grouped by, and which of them each clip goes to.

Units are pixels and seconds. Everything is a function of the recipe and of media headers: nothing is decoded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.media.decode import WantedTimes
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError, listed

# Sides come in steps, so areas and ratios are met within this share, and the budget may be passed by it.
TOLERANCE = 0.05
# Rounding a side may enlarge a picture by this factor, which does not count as enlargement.
ENLARGEMENT = 1 + TOLERANCE / 2


@dataclass(frozen=True)
class Placed:
    """The bucket that a clip goes to, and what that costs."""

    shape: VideoShape
    starts: tuple[float, ...]
    """Seconds at which the clip's samples begin; the first is 0."""
    crop: float
    """Share of the picture that is lost."""
    upscale: float
    """Factor that the picture is enlarged by; 1 where it is not."""
    source: VideoHeader


@dataclass(frozen=True)
class Dropped:
    """The reason why a clip goes to no bucket: `too_short`, `cropped` or `upscaled`, and a message."""

    code: str
    words: str


def window_id(clip_id: str, start: float) -> str:
    """Return the name of a clip's sample that begins at `start` seconds; that at 0 has the clip's own name."""
    return f"{clip_id}@{round(start, 3):.12g}s" if start else clip_id


def buckets_of(
    data: DataConfig,
    side_step: int,
    fits: Callable[[VideoShape], str | None],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[VideoShape, ...]:
    """Return the shapes of a recipe, smallest first: those of `data.buckets`, or the one of a recipe without.

    There is one for each aspect ratio, resolution and number of frames within the budget of data.frames x
    data.height x data.width. Sides are multiples of `side_step`, chosen among all near ones for the area
    and the ratio that were asked for, and may pass the budget by `TOLERANCE`. The recipe's own height and
    width, upright or on their side, stand for the ratio that they have. `fits` returns why a shape cannot
    be trained; `say` is told of those. Raises `DitLoraError` if no shape is left.
    """
    if data.buckets is None:
        shapes = {VideoShape.of(data)}
    else:
        shapes = {
            VideoShape(frames, *sides)
            for frames in data.buckets.frames or (data.frames,)
            for resolution in _resolutions(data)
            for ratio in data.buckets.aspect_ratios
            if (sides := _sides(data, frames, resolution, ratio, side_step))
        }
    if not shapes:
        raise DitLoraError(
            f"data.buckets: no shape is within the budget of {VideoShape.of(data)}; lower "
            "data.buckets.resolutions or data.buckets.frames, or raise data.height and data.width"
        )
    refused = {shape: why for shape in sorted(shapes) if (why := fits(shape))}
    lines = [f"{shape}: {why}" for shape, why in refused.items()]
    if len(refused) == len(shapes):
        raise DitLoraError(
            listed("no shape of data can be trained (frames x height x width)", lines)
        )
    if refused:
        say(listed("buckets that cannot be trained are left out", lines))
    return tuple(sorted(shapes - refused.keys()))


def place(source: VideoHeader, buckets: Sequence[VideoShape], data: DataConfig) -> Placed | Dropped:
    """Choose the bucket of a clip, and its windows.

    The clip gets the most frames that it surely has at `data.fps`; of those, the highest resolution that
    does not enlarge it (by more than rounding does), or the one that enlarges it least; of that, the shape
    that crops least. An image has one frame. With `data.buckets`, a clip that would lose, or be enlarged,
    more than it allows is dropped.
    """
    frames = _frames(source, buckets, data.fps)
    if frames is None:
        return Dropped("too_short", _shortage(source, buckets, data.fps))
    return _best(source, [shape for shape in buckets if shape.frames == frames], data)


def _resolutions(data: DataConfig) -> tuple[float, ...]:
    """Return the sides, in pixels, of squares with each resolution's area, ascending."""
    asked = data.buckets.resolutions if data.buckets else None
    return tuple(sorted({*asked})) if asked else (math.sqrt(data.height * data.width),)


def _sides(
    data: DataConfig, frames: int, resolution: float, ratio: str, step: int
) -> tuple[int, int] | None:
    """Return the height and width nearest to a resolution and a ratio; None where the budget has no room for them."""
    budget = VideoShape.of(data).volume * (1 + TOLERANCE)
    aspect = Fraction(ratio.replace(":", "/"))
    if resolution**2 * frames > budget:
        return None

    def error(sides: tuple[int, int]) -> float:
        height, width = sides
        # Both errors are logarithms, so that twice and half as much weigh the same.
        area = math.log(height * width / resolution**2)
        return math.hypot(area, math.log(width / height / aspect))

    # Data's own shape is taken as it is if it is near enough, so that it is a bucket to the pixel.
    as_configured = [(data.height, data.width), (data.width, data.height)]
    for sides in as_configured:
        if error(sides) < TOLERANCE and data.height % step == data.width % step == 0:
            return sides
    height = math.sqrt(resolution**2 / aspect)
    near = [
        (high, wide)
        for high in _multiples(height, step)
        for wide in _multiples(height * aspect, step)
        if high * wide * frames <= budget
    ]
    return min(near, key=lambda sides: (error(sides), sides), default=None)


def _multiples(side: float, step: int) -> list[int]:
    middle = round(side / step)
    return [step * count for count in range(max(1, middle - 2), middle + 3)]


def _frames(source: VideoHeader, buckets: Sequence[VideoShape], fps: float | None) -> int | None:
    """Return the largest number of frames of all buckets that the clip can give; None if there is none."""
    asked = sorted({shape.frames for shape in buckets}, reverse=True)
    if source.is_image:
        return 1 if 1 in asked else None
    sure = next((frames for frames in asked if _count(source, 0.0, frames, fps) == frames), None)
    if sure is not None:
        return sure
    # Some files leave the last frame's time out of their length, so one frame more may be there:
    # decoding tells.
    least = asked[-1]
    return least if _count(source, 0.0, least, fps, spare=1) == least else None


def _count(
    source: VideoHeader, start: float, frames: int, fps: float | None, spare: float = 0
) -> int:
    """Count how many of `frames` the clip has from `start` on, if it is `spare` frames longer than its header says."""
    if source.seconds is None or source.fps is None:
        return frames
    # A time is served by the nearest frame, so the last frame serves times up to half its duration after it.
    end = source.seconds + (spare - 0.5) / source.fps
    return WantedTimes(frames, fps or 1.0, start).until(end)


def _shortage(source: VideoHeader, buckets: Sequence[VideoShape], fps: float | None) -> str:
    least = min(shape.frames for shape in buckets)
    if source.is_image:
        return f"too short: an image is one frame; the smallest bucket asks for {least}"
    gives = _count(source, 0.0, least, fps, spare=1)
    return (
        f"too short: it gives at most {gives} frames at {fps or 1.0:g} fps, the smallest bucket asks for "
        f"{least}; lower data.frames, raise data.fps or remove it"
    )


def _cost(source: VideoHeader, shape: VideoShape) -> tuple[float, float]:
    """Return (share lost, enlargement) of a picture that is scaled to cover a shape and cropped at the centre."""
    scale = max(shape.height / source.height, shape.width / source.width)
    remaining = shape.height * shape.width / (source.height * source.width * scale**2)
    return max(0.0, 1 - remaining), max(1.0, scale)


def _best(source: VideoHeader, shapes: Sequence[VideoShape], data: DataConfig) -> Placed | Dropped:
    limits = data.buckets
    most_crop = limits.max_crop if limits and limits.max_crop is not None else 1.0
    most_upscale = limits.max_upscale if limits and limits.max_upscale is not None else math.inf
    costs = [(*_cost(source, shape), shape) for shape in shapes]
    allowed = [cost for cost in costs if cost[0] <= most_crop and cost[1] <= most_upscale]
    resolutions = _resolutions(data)
    levels: dict[float, list[tuple[float, float, VideoShape]]] = {}
    for cost in allowed or costs:
        levels.setdefault(_level(cost[2], resolutions), []).append(cost)
    # The shape with the clip's own aspect ratio, which crops least, stands for each resolution.
    speakers = {level: min(costs_of_level) for level, costs_of_level in levels.items()}
    unenlarged = [level for level, cost in speakers.items() if cost[1] <= ENLARGEMENT]
    # The highest resolution without enlargement, else the one that enlarges least.
    level = max(unenlarged, default=None) or min(
        speakers, key=lambda candidate: (speakers[candidate][1], candidate)
    )
    crop, upscale, best = speakers[level]
    if allowed:
        return Placed(best, _starts(source, best.frames, data), crop, upscale, source)
    size = f"its picture of {source.width}x{source.height}"
    if crop > most_crop:
        limit = f"data.buckets.max_crop is {most_crop:g}"
        return Dropped("cropped", f"{best} would lose {crop:.0%} of {size}; {limit}")
    limit = f"data.buckets.max_upscale is {most_upscale:g}"
    return Dropped("upscaled", f"{best} would enlarge {size} {upscale:.2f} times; {limit}")


def _level(shape: VideoShape, resolutions: Sequence[float]) -> float:
    """Return the resolution that a shape was made for: the nearest on a logarithmic scale."""
    side = math.sqrt(shape.height * shape.width)
    return min(resolutions, key=lambda resolution: abs(math.log(side / resolution)))


def _starts(source: VideoHeader, frames: int, data: DataConfig) -> tuple[float, ...]:
    # A header without length or rate, or a recipe without fps, cannot tell where a second window begins.
    if data.fps is None or None in (source.seconds, source.fps):
        return (0.0,)
    stride = data.window_stride or frames / data.fps
    starts = [0.0]
    while data.windows == "all" or len(starts) < data.windows:
        start = len(starts) * stride
        if _count(source, start, frames, data.fps) < frames:
            break
        starts.append(start)
    return tuple(starts)
