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

from dit_lora.data.media.decode import get_first_time
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, read_media
from dit_lora.data.media.opened import open_media
from dit_lora.data.media.sound import SoundFormat
from dit_lora.data.media.sound_stream import MAX_SHORTFALL_S, explain_no_sound, explain_short_sound, iter_audio_frames
from dit_lora.data.media.video import ClipError, describe_media_error
from dit_lora.data.media.video_header import VideoHeader, find_video_stream

# Part of each clip's cache key; change it whenever the same file and arguments would give another waveform.
SOUND_VERSION = "pyav-1: by time stamps, swresample's rate, mono repeated, stereo averaged"

_MIN_GAP_S = 0.05
"""Seconds between the end of a packet and the start of the next that count as a gap; Matroska rounds to 1 ms."""
_MARGIN_S = 0.1
"""Seconds that are decoded beyond both ends of the span, for the resampler's filter."""
# 32-bit integers: when FFmpeg mixes channels in this format, it scales them so that the result cannot overflow.
_SAMPLE_FORMAT = "s32p"
_FULL_SCALE = 2.0**31


def find_sound_problem(header: VideoHeader, *, frames: int, fps: float, start: float = 0.0) -> str | None:
    """Why a clip certainly cannot give the sound of these frames; None if only decoding can tell."""
    if not header.has_sound:
        return explain_no_sound(header.is_image)
    # Headers are rounded, and may be off by one packet.
    end_s = header.sound_ends
    return None if end_s is None else explain_short_sound(end_s + MAX_SHORTFALL_S, frames, fps, start)


def read_sound(
    media: Media, sound_format: SoundFormat, *, frames: int, fps: float, start: float = 0.0
) -> torch.Tensor:
    """Read a clip's sound from `start` seconds after the first frame to the end of the last chosen frame.

    The result is float32 (channels, N). Values are from -1 to 1, and 0 where the file has no sound before or between.
    The file is decoded from its beginning to the end of the span, because the output of a decoder depends on earlier
    packets. If the last call was for the same file and no later span, decoding continues from there, with
    bit-identical results; `close_sound` closes that file.

    Raises:
        ClipError: There is no sound, or it ends before the last frame.
        UnreadableError: The file cannot be reached.
    """
    if is_image(media):
        raise ClipError(f"{media.name}: {explain_no_sound(True)}")
    errors = (av.error.FFmpegError, OSError, ValueError)
    try:
        # In a run, this waits for storage that cannot be reached.
        pieces, end_s = read_media(media, lambda: _read_pieces(media, start, start + frames / fps), errors)
    except errors as error:
        raise ClipError(f"{media.name}: its sound cannot be decoded: {describe_media_error(error)}") from error
    if end_s is None:
        raise ClipError(f"{media.name}: {explain_no_sound(False)}")
    short = explain_short_sound(end_s, frames, fps, start)
    if short:
        raise ClipError(f"{media.name}: {short}")
    # Parts without sound stay silent.
    waveform = np.zeros((sound_format.channels, sound_format.count_samples(frames, fps)), np.float32)
    for seconds, piece in pieces:
        try:
            samples = _resample(piece, sound_format)
            position = round((seconds - start) * sound_format.rate)
            # Pieces may begin before or end after the span: cut off both ends.
            samples, position = samples[:, max(0, -position) :], max(0, position)
            length = min(samples.shape[1], waveform.shape[1] - position)
            if length > 0:
                waveform[:, position : position + length] = samples[:, :length]
        except (av.error.FFmpegError, ValueError) as error:
            raise ClipError(f"{media.name}: its sound cannot be resampled: {describe_media_error(error)}") from error
    return torch.from_numpy(waveform)


_Piece = tuple[float, list[av.AudioFrame]]
"""Sound without a gap: the time of its first frame, in seconds since the first picture, and its frames."""


def close_sound() -> None:
    """Close the clip whose sound decoder this thread keeps open between windows."""
    _LAST_READER.reader = None


@dataclass(frozen=True)
class _TimedFrame:
    """A decoded sound frame with its start and end, in seconds since the first picture."""

    frame: av.AudioFrame
    start_s: float
    end_s: float
    has_gap_before: bool


class _SoundReader:
    """Decodes the sound of one clip once from its beginning, for consecutive windows."""

    def __init__(self, media: Media) -> None:
        self.media, self.stamp = media, media.get_file_stamp()
        with open_media(media) as container:
            # All times count from the first picture, as those of the frames do.
            self._first_picture_s = get_first_time(container, find_video_stream(container))
        self._frame_iterator = self._decode_frames()
        self._buffer: deque[_TimedFrame] = deque()
        """Frames that this window or a later one may need, and the one after them."""
        self._dropped_end_s: float | None = None
        """End of the last frame that was dropped."""
        self._window = (-math.inf, -math.inf)

    def can_read_next_window(self, media: Media, start: float, end: float) -> bool:
        """True if a window is of this clip, and neither begins nor ends before the previous one."""
        before = self._window
        is_same_file = media == self.media and media.get_file_stamp() == self.stamp
        return is_same_file and start >= before[0] and end >= before[1]

    def read_audio_pieces(self, start: float, end: float) -> tuple[list[_Piece], float | None]:
        """Decoded sound near a time span, and the end of the decoded sound in seconds (None without sound)."""
        self._window = (start, end)
        # Drop the frames before the window: later windows begin no earlier.
        while self._buffer and self._buffer[0].end_s <= start - _MARGIN_S:
            self._dropped_end_s = self._buffer.popleft().end_s
        pieces: list[_Piece] = []
        end_s = self._dropped_end_s
        for timed in self._iter_frames():
            end_s = timed.end_s
            # The span is complete; the frame stays in the buffer for the next window.
            if timed.start_s >= end + _MARGIN_S:
                break
            if timed.end_s <= start - _MARGIN_S:
                continue
            # A gap begins a new piece, since the resampler must not join the two sides.
            if timed.has_gap_before or not pieces:
                pieces.append((timed.start_s, []))
            pieces[-1][1].append(timed.frame)
        return pieces, end_s

    def _iter_frames(self) -> Iterator[_TimedFrame]:
        """Yield the buffered audio frames, then newly decoded ones; buffer those that do not end before the window."""
        yield from tuple(self._buffer)
        for timed in self._frame_iterator:
            if self._buffer or timed.end_s > self._window[0] - _MARGIN_S:
                self._buffer.append(timed)
            else:
                self._dropped_end_s = timed.end_s
            yield timed

    def _decode_frames(self) -> Iterator[_TimedFrame]:
        end_s: float | None = None
        with open_media(self.media) as container:
            for frame in iter_audio_frames(container):
                if frame.time is None:
                    if end_s is None:
                        raise ValueError("its sound has no time stamps")
                    seconds = end_s
                else:
                    seconds = frame.time - self._first_picture_s
                # Without a gap, use the end of the previous frame: it is more exact than a rounded time stamp.
                jumps = end_s is None or abs(seconds - end_s) > _MIN_GAP_S
                if not jumps and end_s is not None:
                    seconds = end_s
                end_s = seconds + frame.samples / frame.sample_rate
                yield _TimedFrame(frame, seconds, end_s, jumps)


class _LastReader(threading.local):
    """Sound decoder of the clip that this thread read last: a long clip has many windows, which are read in order."""

    reader: _SoundReader | None = None


_LAST_READER = _LastReader()


def _read_pieces(media: Media, start: float, end: float) -> tuple[list[_Piece], float | None]:
    reading, _LAST_READER.reader = _LAST_READER.reader, None
    if reading is None or not reading.can_read_next_window(media, start, end):
        reading = _SoundReader(media)
    result = reading.read_audio_pieces(start, end)
    # Only if nothing was raised: otherwise the next window decodes from the beginning and meets the same fault.
    _LAST_READER.reader = reading
    return result


def _resample(frames: list[av.AudioFrame], sound_format: SoundFormat) -> np.ndarray:
    """Resample consecutive sound frames to the requested format, float32 (channels, N)."""
    num_channels = frames[0].layout.nb_channels
    # Mono to stereo is done below and not by FFmpeg, which would lower the volume.
    layout = "mono" if num_channels == 1 else "stereo"
    resampler = av.AudioResampler(format=_SAMPLE_FORMAT, layout=layout, rate=sound_format.rate)
    resampled = []
    for frame in frames:
        # The frames of a piece have no gaps between them, so their time stamps are not needed.
        frame.pts = None
        resampled += resampler.resample(frame)
    # Flush the samples that the filter still holds.
    resampled += resampler.resample(None)
    samples = np.concatenate([piece.to_ndarray() for piece in resampled], axis=1) / _FULL_SCALE
    # Stereo to mono is the mean of both channels.
    if len(samples) > sound_format.channels == 1:
        samples = samples.mean(axis=0, keepdims=True)
    # Mono to stereo repeats the channel.
    return np.broadcast_to(samples, (sound_format.channels, samples.shape[1])).astype(np.float32)
