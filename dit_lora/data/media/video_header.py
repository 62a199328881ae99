"""Header of a video, read together with its first frame: the one reader that the audit, buckets and training share.

Nothing here needs torch, so that the audit's processes start quickly.
"""

from dataclasses import dataclass

import av
from av.stream import Disposition

from dit_lora.data.media.display import Orientation
from dit_lora.data.media.opened import oversize
from dit_lora.data.media.sound_stream import sound_ends, sound_stream


@dataclass(frozen=True)
class VideoHeader:
    """Header of a video or image; a field is None where the file does not say."""

    fps: float | None
    seconds: float | None
    frames: int | None
    height: int
    """Height in pixels as shown: upright, and square."""
    width: int
    is_image: bool = False
    has_sound: bool = False
    sound_ends: float | None = None
    """Seconds from the first picture to the end of the sound."""


def read_container(container: av.container.InputContainer) -> VideoHeader:
    """Read the header of the first video stream, and its first frame, which knows size and orientation.

    Raises `av.error.FFmpegError` or `ValueError` if there is no first frame that training could take.
    """
    stream = video_stream(container)
    stream.codec_context.thread_count = 1
    frame = first_frame(container, stream)
    height, width = frame.height, round(frame.width * float(stream.sample_aspect_ratio or 1))
    if Orientation.from_frame(frame).is_on_its_side:
        height, width = width, height
    seconds = None
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    # Matroska has a duration of the file only; with sound, that is the longest stream's.
    elif container.duration:
        seconds = container.duration / av.time_base
    fps = float(stream.average_rate) if stream.average_rate else None
    return VideoHeader(
        fps,
        seconds,
        num_shown_frames(stream),
        height,
        width,
        has_sound=sound_stream(container) is not None,
        sound_ends=sound_ends(container, stream),
    )


def video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """Return the first video stream that is no cover picture; raise `ValueError` if none can be decoded."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise ValueError("its video stream is of a codec that FFmpeg does not know")
            too_large = oversize(stream.height, stream.width)
            if too_large:
                raise ValueError(too_large)
            return stream
    raise ValueError("it has no video stream")


def first_frame(container: av.container.InputContainer, stream: av.VideoStream) -> av.VideoFrame:
    """Decode the first frame that is shown, from a container that was just opened.

    Frames that an edit list hides, which a clip cut without re-encoding needs for its decoding, are decoded and passed over.
    """
    frame = next(container.decode(stream), None)
    if frame is None:
        raise ValueError("no frame comes out of it")
    frame_time(frame)
    return frame


def frame_time(frame: av.VideoFrame) -> float:
    """Return a frame's time stamp in seconds; raise `ValueError` if it has none or is damaged."""
    if frame.time is None:
        raise ValueError("a frame has no time stamp")
    if frame.is_corrupt:
        raise ValueError(f"the frame at {frame.time:.2f} s is damaged")
    return frame.time


def num_shown_frames(stream: av.VideoStream) -> int | None:
    """Return the number of frames by the header, without those that an edit list hides; None if it does not say."""
    if not stream.frames:
        return None
    hidden = sum(entry.is_discard for entry in stream.index_entries)
    return stream.frames - hidden
