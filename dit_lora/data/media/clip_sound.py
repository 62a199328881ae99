"""The sound of a clip: exactly the span of the frames that are taken, at the rate and with the channels that a model wants.

Shapes: N samples of sound.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import av
import numpy as np
import torch

from dit_lora.data.media.decode import first_time
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, read_media
from dit_lora.data.media.opened import open_media
from dit_lora.data.media.sound import SoundFormat
from dit_lora.data.media.sound_stream import SLACK, no_sound, sound_frames, sound_too_short
from dit_lora.data.media.video import ClipError, reason
from dit_lora.data.media.video_header import VideoHeader, video_stream

# Changes whenever the same file and arguments would give another waveform; part of each clip's cache key.
SOUND_VERSION = "pyav-1: by time stamps, swresample's rate, mono repeated, stereo averaged"

_JUMP = 0.05
"""Seconds between a packet's time and the end of the one before, from which on it is a gap: Matroska rounds to 1 ms."""
_MARGIN = 0.1
"""Seconds decoded beyond either end of the span, for the resampler's filter."""
# Integers of 32 bits: for them, FFmpeg scales the channels that it mixes so that none can exceed the range.
_FORMAT = "s32p"
_FULL = 2.0**31


def unusable_sound(
    header: VideoHeader, *, frames: int, fps: float, start: float = 0.0
) -> str | None:
    """Return why a clip surely cannot give the sound of these frames; None if decoding must tell."""
    if not header.has_sound:
        return no_sound(header.is_image)
    # Headers round, and count a packet more or less.
    ends = header.sound_ends
    return None if ends is None else sound_too_short(ends + SLACK, frames, fps, start)


def read_sound(
    media: Media, how: SoundFormat, *, frames: int, fps: float, start: float = 0.0
) -> torch.Tensor:
    """Return the sound from `start` seconds after the first frame to the end of the last one taken, float32 (channels, N).

    Values are from -1 to 1. Where the file has none before or between, it is silent. It is decoded from the file's beginning
    to the span's end, since what a decoder gives depends on the packets before; where the last call was for the same file and
    no later span, from where that ended, which is the same to the last bit (`close_sound` closes it). Raises `ClipError` if there is no sound, or it
    ends before the last frame; `UnreadableError` if the file is away.
    """
    if is_image(media):
        raise ClipError(f"{media.name}: {no_sound(True)}")
    errors = (av.error.FFmpegError, OSError, ValueError)
    try:
        pieces, ends = read_media(
            media, lambda: _pieces(media, start, start + frames / fps), errors
        )
    except errors as error:
        raise ClipError(f"{media.name}: its sound cannot be decoded: {reason(error)}") from error
    if ends is None:
        raise ClipError(f"{media.name}: {no_sound(False)}")
    short = sound_too_short(ends, frames, fps, start)
    if short:
        raise ClipError(f"{media.name}: {short}")
    waveform = np.zeros((how.channels, how.samples(frames, fps)), np.float32)
    for seconds, piece in pieces:
        try:
            _put(waveform, _resampled(piece, how), round((seconds - start) * how.rate))
        except (av.error.FFmpegError, ValueError) as error:
            raise ClipError(
                f"{media.name}: its sound cannot be resampled: {reason(error)}"
            ) from error
    return torch.from_numpy(waveform)


_Piece = tuple[float, list[av.AudioFrame]]
"""Sound without a gap: its first frame's seconds since the first picture, and its frames."""


def close_sound() -> None:
    """Close the clip that stays open between windows, of this thread."""
    _LAST.reading = None


@dataclass(frozen=True)
class _Timed:
    """A frame of sound with its times in seconds since the first picture."""

    frame: av.AudioFrame
    seconds: float
    ends: float
    jumps: bool
    """True if it does not follow the frame before."""


class _Reading:
    """The sound of one clip, decoded once from its beginning, for windows one after the other."""

    def __init__(self, media: Media) -> None:
        self.media, self.stamp = media, media.stamp()
        with open_media(media) as container:
            self._origin = first_time(container, video_stream(container))
        self._decoded = self._timed()
        self._kept: deque[_Timed] = deque()
        """The frames that this window or a later one may take, and the one after them."""
        self._ends: float | None = None
        """When the last frame that was let go ended."""
        self._window = (-math.inf, -math.inf)

    def serves(self, media: Media, start: float, end: float) -> bool:
        """Return true if a window is of this clip and begins and ends no earlier than the one before."""
        before = self._window
        same = media == self.media and media.stamp() == self.stamp
        return same and start >= before[0] and end >= before[1]

    def pieces(self, start: float, end: float) -> tuple[list[_Piece], float | None]:
        """Return the sound near a span, and when the sound decoded ends; None where there is none."""
        self._window = (start, end)
        while self._kept and self._kept[0].ends <= start - _MARGIN:
            self._ends = self._kept.popleft().ends
        pieces: list[_Piece] = []
        ends = self._ends
        for one in self._from_kept():
            ends = one.ends
            if one.seconds >= end + _MARGIN:
                break
            if one.ends <= start - _MARGIN:
                continue
            if one.jumps or not pieces:
                pieces.append((one.seconds, []))
            pieces[-1][1].append(one.frame)
        return pieces, ends

    def _from_kept(self) -> Iterator[_Timed]:
        """Yield the frames that are kept, then decode on, keeping what is not before the window."""
        yield from tuple(self._kept)
        for one in self._decoded:
            if self._kept or one.ends > self._window[0] - _MARGIN:
                self._kept.append(one)
            else:
                self._ends = one.ends
            yield one

    def _timed(self) -> Iterator[_Timed]:
        ends: float | None = None
        with open_media(self.media) as container:
            for frame in sound_frames(container):
                if frame.time is None:
                    if ends is None:
                        raise ValueError("its sound has no time stamps")
                    seconds = ends
                else:
                    seconds = frame.time - self._origin
                length = frame.samples / frame.sample_rate
                jumps = ends is None or abs(seconds - ends) > _JUMP
                if not jumps and ends is not None:
                    seconds = ends
                ends = seconds + length
                yield _Timed(frame, seconds, ends, jumps)


class _Last(threading.local):
    """The clip that was read last: a long one is cut into many windows, which are read in order."""

    reading: _Reading | None = None


_LAST = _Last()


def _pieces(media: Media, start: float, end: float) -> tuple[list[_Piece], float | None]:
    """Return the sound near a span, and when the sound decoded ends; None where there is none."""
    reading, _LAST.reading = _LAST.reading, None
    if reading is None or not reading.serves(media, start, end):
        reading = _Reading(media)
    found = reading.pieces(start, end)
    # Not where it raised: the next window begins anew, and finds the same fault.
    _LAST.reading = reading
    return found


def _resampled(frames: list[av.AudioFrame], how: SoundFormat) -> np.ndarray:
    """Return float32 (channels, N) of frames that follow each other."""
    given = frames[0].layout.nb_channels
    # Channels are mixed here where there are two at most: FFmpeg would lower one that it puts on two.
    layout = "mono" if given == 1 else "stereo"
    resampler = av.AudioResampler(format=_FORMAT, layout=layout, rate=how.rate)
    made = []
    for frame in frames:
        frame.pts = None
        made += resampler.resample(frame)
    made += resampler.resample(None)
    whole = np.concatenate([one.to_ndarray() for one in made], axis=1) / _FULL
    if len(whole) > how.channels == 1:
        whole = whole.mean(axis=0, keepdims=True)
    return np.broadcast_to(whole, (how.channels, whole.shape[1])).astype(np.float32)


def _put(waveform: np.ndarray, piece: np.ndarray, at: int) -> None:
    """Write a piece over a waveform from a position on, which may be before its beginning."""
    piece, at = piece[:, max(0, -at) :], max(0, at)
    length = min(piece.shape[1], waveform.shape[1] - at)
    if length > 0:
        waveform[:, at : at + length] = piece[:, :length]
