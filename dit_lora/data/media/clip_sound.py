"""Sound of a clip: exactly the span of its chosen frames, with the sample rate and channels of the model.

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

# Part of each clip's cache key; change it whenever the same file and arguments would give another waveform.
SOUND_VERSION = "pyav-1: by time stamps, swresample's rate, mono repeated, stereo averaged"

_JUMP = 0.05
"""Seconds between the end of a packet and the start of the next that count as a gap; Matroska rounds to 1 ms."""
_MARGIN = 0.1
"""Seconds that are decoded beyond both ends of the span, for the resampler's filter."""
# 32-bit integers: when FFmpeg mixes channels in this format, it scales them so that the result cannot overflow.
_FORMAT = "s32p"
_FULL = 2.0**31


def unusable_sound(
    header: VideoHeader, *, frames: int, fps: float, start: float = 0.0
) -> str | None:
    """Why a clip certainly cannot give the sound of these frames; None if only decoding can tell."""
    if not header.has_sound:
        return no_sound(header.is_image)
    # Headers are rounded, and may be off by one packet.
    end_s = header.sound_ends
    return None if end_s is None else sound_too_short(end_s + SLACK, frames, fps, start)


def read_sound(
    media: Media, how: SoundFormat, *, frames: int, fps: float, start: float = 0.0
) -> torch.Tensor:
    """Sound from `start` seconds after the first frame to the end of the last chosen frame, float32 (channels, N).

    Values are from -1 to 1, and 0 where the file has no sound before or between. The file is decoded from its
    beginning to the end of the span, because the output of a decoder depends on earlier packets. If the last
    call was for the same file and no later span, decoding continues from there, with bit-identical results;
    `close_sound` closes that file.

    Raises:
        ClipError: There is no sound, or it ends before the last frame.
        UnreadableError: The file cannot be reached.
    """
    if is_image(media):
        raise ClipError(f"{media.name}: {no_sound(True)}")
    errors = (av.error.FFmpegError, OSError, ValueError)
    try:
        # In a run, this waits for storage that cannot be reached.
        pieces, end_s = read_media(
            media, lambda: _pieces(media, start, start + frames / fps), errors
        )
    except errors as error:
        raise ClipError(f"{media.name}: its sound cannot be decoded: {reason(error)}") from error
    if end_s is None:
        raise ClipError(f"{media.name}: {no_sound(False)}")
    short = sound_too_short(end_s, frames, fps, start)
    if short:
        raise ClipError(f"{media.name}: {short}")
    # Parts without sound stay silent.
    waveform = np.zeros((how.channels, how.samples(frames, fps)), np.float32)
    # Pieces may begin before or end after the span; `_put` cuts them.
    for seconds, piece in pieces:
        try:
            _put(waveform, _resampled(piece, how), round((seconds - start) * how.rate))
        except (av.error.FFmpegError, ValueError) as error:
            raise ClipError(
                f"{media.name}: its sound cannot be resampled: {reason(error)}"
            ) from error
    return torch.from_numpy(waveform)


_Piece = tuple[float, list[av.AudioFrame]]
"""Sound without a gap: the time of its first frame, in seconds since the first picture, and its frames."""


def close_sound() -> None:
    """Close the clip that this thread keeps open between windows."""
    _LAST.reading = None


@dataclass(frozen=True)
class _Timed:
    """A sound frame with its start and end, in seconds since the first picture."""

    frame: av.AudioFrame
    seconds: float
    ends: float
    jumps: bool
    """True if there is a gap before it."""


class _Reading:
    """Sound of one clip, decoded once from its beginning, for consecutive windows."""

    def __init__(self, media: Media) -> None:
        self.media, self.stamp = media, media.stamp()
        with open_media(media) as container:
            # All times count from the first picture, as those of the frames do.
            self._origin = first_time(container, video_stream(container))
        self._decoded = self._timed()
        self._kept: deque[_Timed] = deque()
        """Frames that this window or a later one may need, and the one after them."""
        self._ends: float | None = None
        """End of the last frame that was dropped."""
        self._window = (-math.inf, -math.inf)

    def serves(self, media: Media, start: float, end: float) -> bool:
        """Whether a window is of this clip, and neither begins nor ends before the previous one."""
        before = self._window
        is_same_file = media == self.media and media.stamp() == self.stamp
        return is_same_file and start >= before[0] and end >= before[1]

    def pieces(self, start: float, end: float) -> tuple[list[_Piece], float | None]:
        """Sound near a span, and the end of the decoded sound in seconds (None without sound)."""
        self._window = (start, end)
        # Drop the frames before the window: later windows begin no earlier.
        while self._kept and self._kept[0].ends <= start - _MARGIN:
            self._ends = self._kept.popleft().ends
        pieces: list[_Piece] = []
        end_s = self._ends
        for timed in self._from_kept():
            end_s = timed.ends
            # The span is complete; the frame stays in the buffer for the next window.
            if timed.seconds >= end + _MARGIN:
                break
            if timed.ends <= start - _MARGIN:
                continue
            # A gap begins a new piece, since the resampler must not join the two sides.
            if timed.jumps or not pieces:
                pieces.append((timed.seconds, []))
            pieces[-1][1].append(timed.frame)
        return pieces, end_s

    def _from_kept(self) -> Iterator[_Timed]:
        """Yield the frames that were kept, then decode more, and keep those that are not before the window."""
        yield from tuple(self._kept)
        for timed in self._decoded:
            if self._kept or timed.ends > self._window[0] - _MARGIN:
                self._kept.append(timed)
            else:
                self._ends = timed.ends
            yield timed

    def _timed(self) -> Iterator[_Timed]:
        """Yield every sound frame with its times."""
        end_s: float | None = None
        with open_media(self.media) as container:
            for frame in sound_frames(container):
                if frame.time is None:
                    if end_s is None:
                        raise ValueError("its sound has no time stamps")
                    seconds = end_s
                else:
                    seconds = frame.time - self._origin
                length = frame.samples / frame.sample_rate
                # Without a gap, use the end of the previous frame: it is more exact than a rounded time stamp.
                jumps = end_s is None or abs(seconds - end_s) > _JUMP
                if not jumps and end_s is not None:
                    seconds = end_s
                end_s = seconds + length
                yield _Timed(frame, seconds, end_s, jumps)


class _Last(threading.local):
    """Per thread, the clip that was read last: a long clip has many windows, which are read in order."""

    reading: _Reading | None = None


_LAST = _Last()


def _pieces(media: Media, start: float, end: float) -> tuple[list[_Piece], float | None]:
    """Sound near a span, and the end of the decoded sound in seconds (None without sound)."""
    reading, _LAST.reading = _LAST.reading, None
    # Another file, or an earlier window: begin again.
    if reading is None or not reading.serves(media, start, end):
        reading = _Reading(media)
    result = reading.pieces(start, end)
    # Only if nothing was raised: otherwise the next window decodes from the beginning and meets the same fault.
    _LAST.reading = reading
    return result


def _resampled(frames: list[av.AudioFrame], how: SoundFormat) -> np.ndarray:
    """Samples of consecutive frames in the wanted format, float32 (channels, N)."""
    num_channels = frames[0].layout.nb_channels
    # Mono to stereo is done below and not by FFmpeg, which would lower the volume.
    layout = "mono" if num_channels == 1 else "stereo"
    resampler = av.AudioResampler(format=_FORMAT, layout=layout, rate=how.rate)
    resampled = []
    for frame in frames:
        # The frames of a piece have no gaps between them, so their time stamps are not needed.
        frame.pts = None
        resampled += resampler.resample(frame)
    # Flush the samples that the filter still holds.
    resampled += resampler.resample(None)
    samples = np.concatenate([piece.to_ndarray() for piece in resampled], axis=1) / _FULL
    # Stereo to mono is the mean of both channels.
    if len(samples) > how.channels == 1:
        samples = samples.mean(axis=0, keepdims=True)
    # Mono to stereo repeats the channel.
    return np.broadcast_to(samples, (how.channels, samples.shape[1])).astype(np.float32)


def _put(waveform: np.ndarray, piece: np.ndarray, at: int) -> None:
    """Write a piece into a waveform at a position, which may be negative."""
    # Cut off what comes before the waveform.
    piece, at = piece[:, max(0, -at) :], max(0, at)
    length = min(piece.shape[1], waveform.shape[1] - at)
    if length > 0:
        waveform[:, at : at + length] = piece[:, :length]
