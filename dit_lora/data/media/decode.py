"""The frames of a video nearest to given times, with no more decoding than the answer needs.

The answer is defined by decoding from the beginning. Two things make it cheaper: decoding starts at the key
frame before the first wanted time, and stops when the last wanted frame is certain. Where the file gives
reason to doubt that the answer stays the same (a search that lands elsewhere, errors), it is decoded from
the beginning instead.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TypeAlias

import av
import torch
from av.video.frame import PictureType

from dit_lora.data.media.media import Media
from dit_lora.data.media.opened import FrameLimit, open_media
from dit_lora.data.media.video_header import first_frame, frame_time, video_stream

_MOST_THREADS = 4
"""The most threads of a decoder: each decodes one frame ahead, in vain for the last ones."""

_TAIL = 1.0
"""Least number of seconds that the last frame stands for, where times come from the length that a file says it has.

Its sound may be longer than its pictures.
"""

# PyAV's class is generic for type checkers only.
_Packet: TypeAlias = "av.Packet[av.VideoStream]"


@dataclass(frozen=True)
class WantedTimes:
    """The times start, start + 1/fps, start + 2/fps ..., in seconds since the first frame."""

    count: int
    fps: float
    start: float = 0.0

    def until(self, seconds: float) -> int:
        """Return how many of the times are not after `seconds`."""
        # The small shift lets a time on the border belong to the earlier frame in spite of rounding.
        passed = math.floor((seconds - self.start) * self.fps + 1e-6) + 1
        return max(0, min(self.count, passed))

    def last_stands(self, frame: av.VideoFrame, interval: float) -> float:
        """Return the seconds for which the last frame is the nearest; `interval` lies between it and the one before."""
        return interval / 2

    def from_key_frames(
        self, container: av.container.InputContainer, stream: av.VideoStream
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """Decode from the key frame before the first time; yield the nearest frames, each with its number of times."""
        origin = first_time(container, stream)
        target = _tick(stream, origin + self.start)
        return _pick(_forwards(_from_key_frame(container, stream, origin, target)), self)


@dataclass(frozen=True)
class Instants:
    """Any times, ascending, in seconds since the first frame."""

    seconds: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.seconds)

    @property
    def start(self) -> float:
        """The last time: if it is not after the first frame, there is nothing to search for."""
        return self.seconds[-1]

    def until(self, seconds: float) -> int:
        """Return how many of the times are not after `seconds`."""
        return bisect_right(self.seconds, seconds + 1e-6)

    def last_stands(self, frame: av.VideoFrame, interval: float) -> float:
        """Return the seconds that the last frame stands for: as long as it is shown, and at least `_TAIL`."""
        shown = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else 0
        return max(interval, shown, _TAIL)

    def from_key_frames(
        self, container: av.container.InputContainer, stream: av.VideoStream
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """Decode from the key frame before each group of times; yield what `Wanted.from_key_frames` yields.

        Frames between the last time after one key frame and the next key frame are passed over.
        """
        origin = first_time(container, stream)

        def head(seconds: float) -> int:
            return _search(container, stream, _tick(stream, origin + seconds))[0]

        # Times after one key frame are decoded together.
        groups = [
            (target, Instants(tuple(times))) for target, times in groupby(self.seconds, key=head)
        ]
        for target, times in groups:
            frames = _from_key_frame(container, stream, origin, target)
            yield from _pick(_forwards(frames), times)


@dataclass(frozen=True)
class Nearest:
    """A frame, and how many of the wanted times in a row it is the nearest to."""

    frame: av.VideoFrame
    times: int
    stretch: float
    """Ratio of a stored pixel's width to its height."""


def nearest_frames(
    media: Media, wanted: WantedTimes | Instants, *, quick: bool = True
) -> Iterator[Nearest]:
    """Yield the nearest frames in the order of the times; they serve fewer times if the video ends before the last.

    With `quick`, it may raise `ValueError` or `av.error.FFmpegError` after some frames, where decoding from
    the beginning gives them all.
    """
    with open_media(media) as container:
        stream = video_stream(container)
        # DataLoader's workers and torchrun's ranks have one torch thread each, so the decoder keeps to as many.
        stream.codec_context.thread_count = min(torch.get_num_threads(), _MOST_THREADS)
        stream.codec_context.thread_type = "AUTO"
        stretch = float(stream.sample_aspect_ratio or 1)
        # AVI stores no times, and those that FFmpeg guesses for H.264 run backwards.
        guessed = (container.format.name, stream.codec_context.name) == ("avi", "h264")
        if quick and wanted.start > 0 and not guessed:
            chosen = wanted.from_key_frames(container, stream)
        else:
            chosen = _pick(_timed(container.decode(stream)), wanted)
        for frame, times in chosen:
            yield Nearest(frame, times, stretch)


def _pick(
    frames: Iterable[tuple[float, av.VideoFrame]], wanted: WantedTimes | Instants
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Yield the frames that are nearest to wanted times, each with its number of times."""
    taken, interval, limit = 0, 0.0, FrameLimit()
    shown: av.VideoFrame | None = None
    shown_at = 0.0
    for seconds, frame in frames:
        limit.take()
        if shown is not None:
            interval = seconds - shown_at
            # A frame is the nearest until half-way to the next one, so it can be yielded once that
            # one is known.
            times = wanted.until(shown_at + interval / 2) - taken
            if times > 0:
                yield shown, times
                taken += times
        # All times are served, so the rest is not decoded.
        if taken == wanted.count:
            return
        shown, shown_at = frame, seconds
    if shown is not None:
        times = wanted.until(shown_at + wanted.last_stands(shown, interval)) - taken
        if times > 0:
            yield shown, times


def _timed(frames: Iterable[av.VideoFrame]) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield each frame with its seconds since the first one."""
    start: float | None = None
    for frame in frames:
        seconds = frame_time(frame)
        start = seconds if start is None else start
        yield seconds - start, frame


def _forwards(
    frames: Iterable[tuple[float, av.VideoFrame]],
) -> Iterator[tuple[float, av.VideoFrame]]:
    previous = -math.inf
    for seconds, frame in frames:
        if seconds < previous:
            raise ValueError("time runs backwards")
        yield seconds, frame
        previous = seconds


def first_time(container: av.container.InputContainer, stream: av.VideoStream) -> float:
    """Return the time of the first frame, in seconds of the stream."""
    return frame_time(first_frame(container, stream))


def _tick(stream: av.VideoStream, seconds: float) -> int:
    """Return a time in ticks of the stream."""
    if stream.time_base is None:
        raise ValueError("no time base")
    # Rounding must not put the time just before a key frame that is at it.
    return math.floor(seconds / stream.time_base + 1e-3)


def _from_key_frame(
    container: av.container.InputContainer, stream: av.VideoStream, origin: float, target: int
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield each frame from the last key frame not after `target` on, with its seconds since `origin`."""
    head, packets = _search(container, stream, target)
    count = 0
    for frame in chain.from_iterable(packet.decode() for packet in packets):
        if count == 0 and not (
            frame.pts == head and frame.key_frame and frame.pict_type == PictureType.I
        ):
            raise ValueError("the key frame is none that decoding can start at")
        yield frame_time(frame) - origin, frame
        count += 1
    if count < 2:
        raise ValueError("how long the last frame is shown depends on the one before it")


def _search(
    container: av.container.InputContainer, stream: av.VideoStream, target: int
) -> tuple[int, Iterator[_Packet]]:
    """Return the time, in ticks, of the last key frame not after `target`, and the packets from that frame on."""
    aim = target
    for _ in range(3):
        container.seek(aim, stream=stream)
        packets = container.demux(stream)
        head = next(packets)
        if head.pts is None or not head.is_keyframe:
            break
        if head.pts <= target:
            return head.pts, chain([head], packets)
        # MP4 is searched by times of decoding, which are before the times of showing.
        aim = (head.pts if head.dts is None else head.dts) - 1
    raise ValueError("the search for the key frame failed")
