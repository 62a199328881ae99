"""Reads a video's header together with its first frame; shared by the audit, buckets and training.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

from dataclasses import dataclass

import av
from av.stream import Disposition

from dit_lora.data.media.display import Orientation
from dit_lora.data.media.opened import find_size_problem
from dit_lora.data.media.sound_stream import find_sound_stream, read_sound_end


@dataclass(frozen=True)
class VideoHeader:
    """Header of a video or image; a field is None if the file does not state it."""

    fps: float | None
    seconds: float | None
    frames: int | None
    height: int
    """Height as shown, in square pixels, upright; `width` likewise."""
    width: int
    is_image: bool = False
    has_sound: bool = False
    sound_ends: float | None = None
    """End of the sound, in seconds after the first picture."""


def read_container_header(container: av.container.InputContainer) -> VideoHeader:
    """Read the header of a container's first video stream, and its first frame for the real size and orientation.

    Raises `av.error.FFmpegError` or `ValueError` if there is no first frame that training could use.
    """
    stream = find_video_stream(container)
    # More threads would decode frames ahead that nobody needs.
    stream.codec_context.thread_count = 1
    frame = decode_first_frame(container, stream)
    height, width = frame.height, round(frame.width * float(stream.sample_aspect_ratio or 1))
    if Orientation.from_frame(frame).swaps_height_and_width:
        height, width = width, height
    seconds = None
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    # Matroska states only the duration of the file, which is that of its longest stream.
    elif container.duration:
        seconds = container.duration / av.time_base
    fps = float(stream.average_rate) if stream.average_rate else None
    num_frames = count_visible_frames(stream)
    has_sound, sound_ends = find_sound_stream(container) is not None, read_sound_end(container, stream)
    return VideoHeader(fps, seconds, num_frames, height, width, has_sound=has_sound, sound_ends=sound_ends)


def find_video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """First video stream of a container other than cover pictures; raises `ValueError` if none can be decoded."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise ValueError("its video stream is of a codec that FFmpeg does not know")
            too_large = find_size_problem(stream.height, stream.width)
            if too_large:
                raise ValueError(too_large)
            return stream
    raise ValueError("it has no video stream")


def decode_first_frame(container: av.container.InputContainer, stream: av.VideoStream) -> av.VideoFrame:
    """Decode the first frame that is shown, from a container that was just opened.

    Frames hidden by an edit list are decoded and skipped; clips cut without re-encoding need them for decoding.
    """
    frame = next(container.decode(stream), None)
    if frame is None:
        raise ValueError("no frame comes out of it")
    # Raises if the frame has no time stamp or is damaged.
    get_frame_time(frame)
    return frame


def get_frame_time(frame: av.VideoFrame) -> float:
    """Time stamp of a decoded frame in seconds; raises `ValueError` if it has none, or is damaged."""
    if frame.time is None:
        raise ValueError("a frame has no time stamp")
    if frame.is_corrupt:
        raise ValueError(f"the frame at {frame.time:.2f} s is damaged")
    return frame.time


def count_visible_frames(stream: av.VideoStream) -> int | None:
    """Number of a video's frames by its header, without those hidden by an edit list; None if it is not stated."""
    if not stream.frames:
        return None
    # An edit list marks the index entries of hidden frames as discarded.
    return stream.frames - sum(entry.is_discard for entry in stream.index_entries)
