"""The sound of a clip: exactly the span of the frames that are taken, at the rate and with the channels that a model wants.

Shapes: N samples of sound.
"""

import av
import numpy as np
import torch

from dit_lora.data.media.decode import first_time, video_stream
from dit_lora.data.media.media import Media, is_image, require_readable
from dit_lora.data.media.opened import open_media
from dit_lora.data.media.sound import SoundFormat
from dit_lora.data.media.sound_stream import SLACK, no_sound, sound_frames, sound_too_short
from dit_lora.data.media.video import ClipError, VideoHeader, reason

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
    to the span's end: what a decoder gives depends on the packets before. Raises `ClipError` if there is no sound, or it
    ends before the last frame; `UnreadableError` where that is the disk's fault.
    """
    if is_image(media):
        raise ClipError(f"{media.name}: {no_sound(True)}")
    try:
        pieces, ends = _pieces(media, start, start + frames / fps)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        require_readable(media)
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


def _pieces(media: Media, start: float, end: float) -> tuple[list[_Piece], float | None]:
    """Return the sound near a span, and when the sound decoded ends; None where there is none."""
    with open_media(media) as container:
        origin = first_time(container, video_stream(container))
    pieces: list[_Piece] = []
    ends: float | None = None
    with open_media(media) as container:
        for frame in sound_frames(container):
            if frame.time is None:
                if ends is None:
                    raise ValueError("its sound has no time stamps")
                seconds = ends
            else:
                seconds = frame.time - origin
            length = frame.samples / frame.sample_rate
            jumps = ends is None or abs(seconds - ends) > _JUMP
            if not jumps and ends is not None:
                seconds = ends
            ends = seconds + length
            if seconds >= end + _MARGIN:
                break
            if ends <= start - _MARGIN:
                continue
            if jumps or not pieces:
                pieces.append((seconds, []))
            pieces[-1][1].append(frame)
    return pieces, ends


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
