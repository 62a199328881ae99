"""The sound in a container: its frames, the information in its header, and its faults.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

from collections.abc import Iterator
from fractions import Fraction

import av

MAX_SHORTFALL_S = 0.1
"""Seconds by which sound may end before the last frame begins; encoders may drop a packet. They become silence."""


def iter_audio_frames(container: av.container.InputContainer) -> Iterator[av.AudioFrame]:
    """Yield the frames of the first sound stream that FFmpeg can decode; raises `ValueError` for a damaged one."""
    stream = find_sound_stream(container)
    for frame in () if stream is None else container.decode(stream):
        if frame.is_corrupt:
            raise ValueError(f"the sound at {frame.time or 0:.2f} s is damaged")
        if frame.samples:
            yield frame


def find_sound_stream(container: av.container.InputContainer) -> av.AudioStream | None:
    """First sound stream of a container that FFmpeg can decode; None if there is none."""
    return next((stream for stream in container.streams.audio if stream.codec_context is not None), None)


def read_sound_end(container: av.container.InputContainer, video: av.VideoStream) -> float | None:
    """End of a video's sound in seconds after the first picture; None if the file does not state it."""
    sound = find_sound_stream(container)
    if sound is None or not sound.duration or sound.time_base is None:
        return None
    end_time = ((sound.start_time or 0) + sound.duration) * sound.time_base
    first_picture = (video.start_time or 0) * (video.time_base or Fraction(0))
    return float(end_time - first_picture)


def explain_no_sound(is_picture: bool) -> str:
    """Message why a sample without sound cannot be used for a recipe that trains sound."""
    state = "it is a picture" if is_picture else "it has no sound"
    return f"no_sound: {state}, and data.sound needs sound in every clip; remove it, or set data.sound to false"


def explain_short_sound(end_s: float, frames: int, fps: float, start: float = 0.0) -> str | None:
    """Why a clip's sound that ends `end_s` seconds after the first frame is too short; None if it is long enough."""
    last_frame = start + (frames - 1) / fps
    if end_s >= last_frame - MAX_SHORTFALL_S:
        return None
    return (
        f"sound_too_short: its sound ends at {max(end_s, 0):.2f} s and the last of its {frames} frames is "
        f"at {last_frame:.2f} s; lower data.frames or remove it"
    )
