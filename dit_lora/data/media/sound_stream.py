"""The sound in a container: its frames, what its header says of it, and what is wrong with it.

Nothing here needs torch, so that the audit's processes start quickly.
"""

from collections.abc import Iterator
from fractions import Fraction

import av

SLACK = 0.1
"""Seconds that sound may end before the last frame begins; they become silence, as encoders cut off a packet."""


def sound_frames(container: av.container.InputContainer) -> Iterator[av.AudioFrame]:
    """Yield the frames of the first sound that FFmpeg can decode; raises `ValueError` where one is damaged."""
    stream = sound_stream(container)
    for frame in () if stream is None else container.decode(stream):
        if frame.is_corrupt:
            raise ValueError(f"the sound at {frame.time or 0:.2f} s is damaged")
        if frame.samples:
            yield frame


def sound_stream(container: av.container.InputContainer) -> av.AudioStream | None:
    """Return the first sound that FFmpeg can decode; None if there is none."""
    streams = container.streams.audio
    return next((one for one in streams if one.codec_context is not None), None)


def sound_ends(container: av.container.InputContainer, video: av.VideoStream) -> float | None:
    """Return how many seconds after the first picture the sound ends; None where the file does not say."""
    sound = sound_stream(container)
    if sound is None or not sound.duration or sound.time_base is None:
        return None
    ends = ((sound.start_time or 0) + sound.duration) * sound.time_base
    shown = (video.start_time or 0) * (video.time_base or Fraction(0))
    return float(ends - shown)


def no_sound(is_picture: bool) -> str:
    """Return why a sample without sound cannot be used."""
    what = "it is a picture" if is_picture else "it has no sound"
    return f"no_sound: {what}, and data.sound trains the sound of every clip; remove it, or set data.sound to false"


def sound_too_short(ends: float, frames: int, fps: float, start: float = 0.0) -> str | None:
    """Return why sound that ends so many seconds after the first frame is too short; None if it is not."""
    last = start + (frames - 1) / fps
    if ends >= last - SLACK:
        return None
    return (
        f"sound_too_short: its sound ends at {max(ends, 0):.2f} s and the last of its {frames} frames is taken at {last:.2f} s; "
        "lower data.frames or remove it"
    )
