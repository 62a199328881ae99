"""Video files in and out, through PyAV: frames chosen by their time stamps, resized with their aspect kept.

Shapes: F frames, H and W pixels.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps

from dit_lora.data.media import Media, as_media, is_image
from dit_lora.errors import DitLoraError

# Changes whenever the same file and arguments would give other pixels; part of each clip's cache key.
DECODE_VERSION = "pyav-2: nearest time stamp, square pixels, Lanczos to cover, centre crop"


# x264's macroblock tree, and more than one thread, made equal frames differ by some grey levels (docs/log.md).
_H264 = {"crf": "17", "x264-params": "mbtree=0"}


class ClipError(DitLoraError):
    """A clip cannot give the frames asked for; the message names file and reason."""


def read_frames(
    media: Media | Path, *, frames: int, height: int, width: int, fps: float | None
) -> torch.Tensor:
    """uint8 (F, 3, H, W): the frames nearest to 0, 1/fps, 2/fps ... seconds of the clip; an image is one frame.

    Without `fps`, of a clip its first. Frames are scaled to cover height x width and cropped at the centre. Memory holds the chosen frames
    only. Raises `ClipError` if the file cannot be read or is too short.
    """
    media = as_media(media)
    try:
        if is_image(media):
            chosen = [_read_image(media, height, width)]
        else:
            chosen = list(_choose(media, frames, height, width, fps or 1.0))
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise ClipError(f"{media.name}: cannot be decoded to its end: {_reason(error)}") from error
    if len(chosen) < frames:
        raise ClipError(f"{media.name}: {_shortage(frames, fps or 1.0, len(chosen))}")
    return torch.from_numpy(np.stack(chosen)).permute(0, 3, 1, 2).contiguous()


def write_sample(path: Path, video: torch.Tensor, fps: float | None) -> Path:
    """Write uint8 (F, H, W, 3) to `path` with .png added for one frame, else .mp4; returns what was written."""
    if len(video) > 1:
        whole = path.with_name(f"{path.name}.mp4")
        write_video(whole, video, fps or 8.0)
        return whole
    whole = path.with_name(f"{path.name}.png")
    whole.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    Image.fromarray(video[0].numpy()).save(partial, format="PNG")
    partial.replace(whole)
    return whole


def write_video(path: Path, video: torch.Tensor, fps: float) -> None:
    """Write uint8 (F, H, W, 3) as H.264 that browsers and players take; H and W must be even.

    Equal frames give equal bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(partial, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=_H264)
        stream.thread_count = 1
        stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], "yuv420p"
        for pixels in video.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    partial.replace(path)


@dataclass(frozen=True)
class VideoHeader:
    """What a file says of itself; `seconds` is None where it does not say."""

    fps: float | None
    seconds: float | None
    height: int
    width: int


def read_header(media: Media | Path) -> VideoHeader:
    """The first video stream's header, without decoding; raises `ClipError` if there is none."""
    media = as_media(media)
    try:
        with av.open(media.source(), "r") as container:
            stream = _video_stream(container)
            rate, duration, base = stream.average_rate, stream.duration, stream.time_base
            seconds = float(duration * base) if duration and base else None
            return VideoHeader(float(rate) if rate else None, seconds, stream.height, stream.width)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise ClipError(f"{media.name}: cannot be opened as a video: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """FFmpeg's and the system's errors without their numbers, and what to do."""
    return f"{getattr(error, 'strerror', None) or error}; encode it anew or remove it"


def too_short(header: VideoHeader, *, frames: int, fps: float) -> str | None:
    """Why a clip with this header surely cannot give `frames` at `fps`; None if decoding must tell.

    Generous by one frame: some files leave the last frame's time out of their duration.
    """
    if header.seconds is None or header.fps is None:
        return None
    gives = _count_until(header.seconds + 0.5 / header.fps, fps, 0, frames)
    return _shortage(frames, fps, gives) if gives < frames else None


def _shortage(frames: int, fps: float, gives: int) -> str:
    return (
        f"too short: {frames} frames at {fps:g} fps are asked for, it gives at most {gives}; "
        "lower data.frames, raise data.fps or remove it"
    )


def _choose(media: Media, frames: int, height: int, width: int, fps: float) -> Iterator[np.ndarray]:
    """Up to `frames` resized frames, each the nearest in time to k / fps seconds."""
    taken, interval = 0, 0.0
    shown: av.VideoFrame | None = None
    shown_at, stretch = 0.0, 1.0
    for frame, seconds, stretch in _decode(media):
        if shown is not None:
            interval = seconds - shown_at
            count = _count_until(shown_at + interval / 2, fps, taken, frames)
            yield from _repeat(shown, count, stretch, height, width)
            taken += count
        if taken == frames:
            return
        shown, shown_at = frame, seconds
    if shown is not None:
        count = _count_until(shown_at + interval / 2, fps, taken, frames)
        yield from _repeat(shown, count, stretch, height, width)


def _count_until(end: float, fps: float, taken: int, frames: int) -> int:
    """How many of the wanted times k / fps, from k = taken on, come before `end` seconds."""
    # The small shift lets a time on the border belong to the earlier frame in spite of rounding.
    return max(0, min(frames, math.floor(end * fps + 1e-6) + 1) - taken)


def _repeat(
    frame: av.VideoFrame, count: int, stretch: float, height: int, width: int
) -> Iterator[np.ndarray]:
    if count:
        pixels = _resize(frame, stretch, height, width)
        yield from (pixels for _ in range(count))


def _decode(media: Media) -> Iterator[tuple[av.VideoFrame, float, float]]:
    """Every frame in the order of display, with its seconds since the first one and its pixels' aspect."""
    with av.open(media.source(), "r") as container:
        stream = _video_stream(container)
        stream.thread_type = "AUTO"
        stretch = float(stream.sample_aspect_ratio or 1)
        start: float | None = None
        for frame in container.decode(stream):
            if frame.time is None:
                raise ValueError("a frame has no time stamp")
            if frame.is_corrupt:
                raise ValueError(f"the frame at {frame.time:.2f} s is damaged")
            start = frame.time if start is None else start
            yield frame, frame.time - start, stretch


def _video_stream(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise ValueError("it has no video stream")
    return container.streams.video[0]


def _read_image(media: Media, height: int, width: int) -> np.ndarray:
    """uint8 (H, W, 3), upright; transparent parts are white."""
    with Image.open(media.source()) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would cut at 255
            levels = np.asarray(image, np.float32) / 257
            image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return _cover(image.convert("RGB"), 1.0, height, width)


def _resize(frame: av.VideoFrame, stretch: float, height: int, width: int) -> np.ndarray:
    """uint8 (H, W, 3): scaled to cover, cropped at the centre, upright."""
    image = frame.to_image()
    if frame.rotation % 180:
        stretch = 1 / stretch
    if frame.rotation % 360:
        image = image.rotate(frame.rotation, expand=True)  # degrees counter-clockwise, as PyAV's
    return _cover(image, stretch, height, width)


def _cover(image: Image.Image, stretch: float, height: int, width: int) -> np.ndarray:
    # In square pixels the picture is `stretch` times as wide as it is stored.
    scale = max(width / (image.width * stretch), height / image.height)
    kept_width, kept_height = width / scale / stretch, height / scale
    left, top = (image.width - kept_width) / 2, (image.height - kept_height) / 2
    box = (left, top, left + kept_width, top + kept_height)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box))
