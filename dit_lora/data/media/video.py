"""Reads and writes videos and images: frames chosen by time stamp, resized with their aspect ratio kept.

Shapes: F frames, H and W pixels.
"""

import os
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image

from dit_lora.data.media.decode import ArbitraryFrameTimes, RegularFrameTimes, iter_nearest_frames
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, read_media, to_media
from dit_lora.data.media.opened import get_error_message, open_media
from dit_lora.data.media.pictures import (
    DECODE_ERRORS,
    open_image,
    read_image_size,
    scale_to_cover,
    stack_pictures,
    to_upright_image,
)
from dit_lora.data.media.video_header import VideoHeader, read_container_header
from dit_lora.errors import DitLoraError

if TYPE_CHECKING:  # pages that only show clips start without torch
    import torch

    from dit_lora.data.media.sound import Sound

# Part of each clip's cache key; change it whenever the same file and arguments would give other pixels.
DECODE_VERSION = "pyav-2: nearest time stamp, square pixels, Lanczos to cover, centre crop"

# With x264's macroblock tree, or more than one thread, equal frames differed by some grey levels (docs/log.md).
_H264_OPTIONS = {"crf": "17", "x264-params": "mbtree=0"}

# Matrix, primaries and transfer characteristics (ITU-T H.273).
_COLOURS_HD = (Colorspace.ITU709, ColorPrimaries.BT709, ColorTrc.BT709)
_COLOURS_SD = (Colorspace.SMPTE170M, ColorPrimaries.SMPTE170M, ColorTrc.SMPTE170M)


class ClipError(DitLoraError):
    """Raised if a clip cannot give the requested frames; the message names the file and the reason."""


def read_frames(
    media: Media | Path, *, frames: int, height: int, width: int, fps: float | None, start: float = 0.0
) -> "torch.Tensor":
    """Read a clip's frames nearest to start, start + 1/fps, ... seconds after the first one, uint8 (F, 3, H, W).

    An image is one frame, and so is a clip without `fps`. Frames are scaled to cover height x width and cropped
    at the centre. Memory holds only the chosen frames. Decodes with at most as many threads as PyTorch has.

    Raises:
        ClipError: The file is too short, or cannot be read as far as needed.
        UnreadableError: The file cannot be reached.
    """
    import torch

    media, times = to_media(media), RegularFrameTimes(frames, fps or 1.0, start)
    chosen = decode_pictures(media, times, partial(scale_to_cover, height=height, width=width))
    if len(chosen) < frames:
        raise ClipError(f"{media.name}: {_describe_shortage(times, len(chosen))}")
    return torch.from_numpy(stack_pictures(chosen))


def decode_pictures(
    media: Media,
    target_times: RegularFrameTimes | ArbitraryFrameTimes,
    fit: Callable[[Image.Image, float], np.ndarray],
) -> list[np.ndarray]:
    """Decode the frames of a clip nearest to the requested times; an image is one frame, regardless of the times.

    `fit` converts an upright picture, given its pixel aspect ratio (width by height), to uint8 (H, W, 3). There
    are fewer pictures than times if the video ends early.

    Raises:
        ClipError: The file cannot be read as far as needed.
        UnreadableError: The file cannot be reached.
    """

    def decode(should_seek: bool) -> list[np.ndarray]:
        chosen: list[np.ndarray] = []
        for nearest in iter_nearest_frames(media, target_times, should_seek=should_seek):
            chosen += [fit(*to_upright_image(nearest.frame, nearest.pixel_aspect))] * nearest.num_times
        return chosen

    def read() -> list[np.ndarray]:
        if is_image(media):
            try:
                image = open_image(media)
            except DECODE_ERRORS as error:
                # Pillow's errors are of many classes; `errors` below has only this one.
                raise ValueError(str(error) or type(error).__name__) from error
            return [fit(image, 1.0)]
        try:
            return decode(should_seek=True)
        except (av.error.FFmpegError, ValueError):
            # Seeking failed or is unreliable in this file: decode from the beginning.
            return decode(should_seek=False)

    errors = (av.error.FFmpegError, OSError, ValueError)
    try:
        return read_media(media, read, errors)
    except errors as error:
        raise ClipError(f"{media.name}: cannot be decoded to its end: {describe_media_error(error)}") from error


def write_sample(path: Path, video: "torch.Tensor", fps: float | None, sound: "Sound | None" = None) -> Path:
    """Write a generated sample, uint8 (F, H, W, 3), to `path` plus .png for one frame, else .mp4; returns that path.

    A single frame is written without sound.
    """
    if len(video) > 1:
        target = path.with_name(f"{path.name}.mp4")
        write_video(target, video, fps or 8.0, sound)
        return target
    target = path.with_name(f"{path.name}.png")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary file and rename it, so that nobody reads an incomplete file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    Image.fromarray(video[0].numpy()).save(partial, format="PNG")
    partial.replace(target)
    return target


def write_video(path: Path, video: "torch.Tensor", fps: float, sound: "Sound | None" = None) -> None:
    """Write uint8 (F, H, W, 3) as H.264 and sound as AAC, which browsers and players support; H and W must be even.

    Colours are tagged, and converted with the tagged matrix: BT.709 for HD, else BT.601, as players assume
    without tags. Equal frames and sound give equal bytes. Raises `DitLoraError` for sound that is not finite.
    """
    from dit_lora.data.media.sound import encode_sound, find_sound_fault

    fault = find_sound_fault(sound)
    if fault:
        raise DitLoraError(f"{path.name}: its {fault}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    # NTSC frame rates are multiples of 1000/1001.
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(partial, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options=_H264_OPTIONS)
        # One thread, so that equal frames give equal bytes.
        stream.thread_count = 1
        height, width = video.shape[1:3]
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        # From these sizes on, players such as mpv and browsers assume BT.709 for an untagged picture.
        colours = _COLOURS_HD if width >= 1280 or height > 576 else _COLOURS_SD
        codec = stream.codec_context
        codec.colorspace, codec.color_primaries, codec.color_trc = colours
        codec.color_range = ColorRange.MPEG
        # Streams must be added before the first packet is written.
        packets = [] if sound is None else encode_sound(container, sound)
        for pixels in video.numpy():
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=colours[0], dst_color_range=ColorRange.MPEG)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        container.mux(packets)
    partial.replace(path)


def read_header(media: Media | Path) -> VideoHeader:
    """Read the header of an image, or of a video's first stream together with its first frame.

    Raises:
        ClipError: The file has no header, or the video no first frame.
        UnreadableError: The file cannot be reached.
    """
    media = to_media(media)

    def read() -> VideoHeader:
        if is_image(media):
            # An image has neither a frame rate nor a duration.
            return VideoHeader(None, None, 1, *read_image_size(media), is_image=True)
        with open_media(media) as container:
            return read_container_header(container)

    errors = (av.error.FFmpegError, *DECODE_ERRORS)
    try:
        return read_media(media, read, errors)
    except errors as error:
        # The error alone does not tell which reader failed.
        kind = "an image" if is_image(media) else "a video"
        raise ClipError(f"{media.name}: cannot be opened as {kind}: {describe_media_error(error)}") from error


def describe_media_error(error: Exception) -> str:
    """Message of an error of FFmpeg or the system without its error number, and what to do."""
    return f"{get_error_message(error)}; encode it again or remove it"


def explain_missing_frames(header: VideoHeader, *, frames: int, fps: float, start: float = 0.0) -> str | None:
    """Why this clip certainly cannot give `frames` at `fps` from `start` on; None if only decoding can tell.

    It allows one frame more than stated, because some files do not count the last frame's duration.
    """
    if header.seconds is None or header.fps is None:
        return None
    times = RegularFrameTimes(frames, fps, start)
    # The header may not count the last frame, which is used for half of its duration.
    num_available = times.count_frame_times_until(header.seconds + 0.5 / header.fps)
    return _describe_shortage(times, num_available) if num_available < frames else None


def _describe_shortage(target_times: RegularFrameTimes, num_frames: int) -> str:
    after = f" from {target_times.start:g} s on" if target_times.start else ""
    return (
        f"too short: {target_times.count} frames at {target_times.fps:g} fps{after} are needed, and it "
        f"has at most {num_frames}; lower data.frames, raise data.fps or remove it"
    )
