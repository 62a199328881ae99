"""The sound in a container: its frames, and what its header says of it.

Nothing here needs torch, so that the audit's processes start quickly.
"""

from collections.abc import Iterator
from fractions import Fraction

import av


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
