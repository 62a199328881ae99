"""Finds the frames of a video nearest to given times, with as little decoding as possible.

The result is defined by decoding from the beginning. Two things make it cheaper: decoding starts at the key
frame before the first time, and stops when the last frame is certain. If the file gives reason to doubt that
the result is the same (a seek that ends elsewhere, errors), it is decoded from the beginning instead.
"""

import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TypeAlias

import av
from av.video.frame import PictureType

from dit_lora.data.media.media import Media
from dit_lora.data.media.opened import FrameLimit, open_media
from dit_lora.data.media.video_header import decode_first_frame, find_video_stream, get_frame_time

_MAX_THREADS = 4
"""Maximum number of decoder threads: each decodes one frame ahead, which is wasted at the end."""
_MIN_LAST_FRAME_S = 1.0
"""Minimum seconds for which the last frame is used: the stated length may be that of the sound, which is longer."""

# PyAV's class is generic only for type checkers.
_Packet: TypeAlias = "av.Packet[av.VideoStream]"


@dataclass(frozen=True)
class RegularFrameTimes:
    """Regular times at which frames are chosen: start, start + 1/fps, ... in seconds since the first frame."""

    count: int
    fps: float
    start: float = 0.0

    def count_frame_times_until(self, seconds: float) -> int:
        """Number of the requested times that are not after `seconds`."""
        # The small addend makes a time on the border belong to the earlier frame in spite of rounding.
        passed = math.floor((seconds - self.start) * self.fps + 1e-6) + 1
        return max(0, min(self.count, passed))

    def compute_last_duration(self, frame: av.VideoFrame, interval: float) -> float:
        """Seconds for which a clip's last frame is the nearest; `interval` is the time since the previous frame."""
        return interval / 2

    def decode_from_key_frames(
        self, container: av.container.InputContainer, stream: av.VideoStream
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """Decode from the key frame before the first time; yields the nearest frames and their number of times."""
        origin = get_first_time(container, stream)
        # Times count from the first frame, time stamps from the container's own zero.
        target = _to_time_base_ticks(stream, origin + self.start)
        return _pick_nearest_frames(
            _check_times_ascend(_decode_from_key_frame(container, stream, origin, target)), self
        )


@dataclass(frozen=True)
class ArbitraryFrameTimes:
    """Arbitrary ascending times at which frames are chosen, in seconds since the first frame."""

    seconds: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of requested times."""
        return len(self.seconds)

    @property
    def start(self) -> float:
        """Last of the requested times: if it is not after the first frame, no seek is needed."""
        return self.seconds[-1]

    def count_frame_times_until(self, seconds: float) -> int:
        """Number of the requested times that are not after `seconds`."""
        return bisect_right(self.seconds, seconds + 1e-6)

    def compute_last_duration(self, frame: av.VideoFrame, interval: float) -> float:
        """Seconds for which a clip's last frame is used: as long as it is shown, and at least `_MIN_LAST_FRAME_S`."""
        # Not every container states how long a frame is shown.
        display_time = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else 0
        return max(interval, display_time, _MIN_LAST_FRAME_S)

    def decode_from_key_frames(
        self, container: av.container.InputContainer, stream: av.VideoStream
    ) -> Iterator[tuple[av.VideoFrame, int]]:
        """Decode from the key frame before each group of times; yields the nearest frames and their number of times.

        Frames between the last time after one key frame and the next key frame are skipped.
        """
        origin = get_first_time(container, stream)

        def find_key_frame(seconds: float) -> int:
            return _seek_key_frame(container, stream, _to_time_base_ticks(stream, origin + seconds))[0]

        # Times after the same key frame are decoded together.
        groups = [
            (target, ArbitraryFrameTimes(tuple(times))) for target, times in groupby(self.seconds, key=find_key_frame)
        ]
        for target, times in groups:
            yield from _pick_nearest_frames(
                _check_times_ascend(_decode_from_key_frame(container, stream, origin, target)), times
            )


@dataclass(frozen=True)
class NearestFrame:
    """A decoded frame, and how many consecutive requested times it is the nearest to."""

    frame: av.VideoFrame
    num_times: int
    pixel_aspect: float
    """Ratio of a stored pixel's width to its height."""


def iter_nearest_frames(
    media: Media, target_times: RegularFrameTimes | ArbitraryFrameTimes, *, should_seek: bool = True
) -> Iterator[NearestFrame]:
    """Yield the frames nearest to the requested times, in order; there are fewer if the video ends early.

    These are the frames that decoding from the beginning gives; seeking only saves time. With `should_seek`, this may
    raise `ValueError` or `av.error.FFmpegError` after some frames even if decoding from the beginning
    (`should_seek=False`) gives them all.
    """
    with open_media(media) as container:
        stream = find_video_stream(container)
        stream.codec_context.thread_count = _count_threads()
        stream.codec_context.thread_type = "AUTO"
        stretch = float(stream.sample_aspect_ratio or 1)
        # AVI stores no times, and those that FFmpeg guesses for H.264 run backwards, so do not seek.
        guessed = (container.format.name, stream.codec_context.name) == ("avi", "h264")
        if should_seek and target_times.start > 0 and not guessed:
            chosen = target_times.decode_from_key_frames(container, stream)
        else:
            chosen = _pick_nearest_frames(_iter_timed_frames(container.decode(stream)), target_times)
        for frame, times in chosen:
            yield NearestFrame(frame, times, stretch)


def _count_threads() -> int:
    """Threads of a decoder: as many as torch has in this process, one in DataLoader workers and torchrun ranks."""
    # Not imported here: audits and pages, which only decode, would wait seconds for it.
    torch = sys.modules.get("torch")
    num_threads = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
    return min(num_threads, _MAX_THREADS)


def _pick_nearest_frames(
    frames: Iterable[tuple[float, av.VideoFrame]], target_times: RegularFrameTimes | ArbitraryFrameTimes
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Yield the frames that are nearest to requested times, each with its number of times."""
    num_served, interval, limit = 0, 0.0, FrameLimit()
    previous: av.VideoFrame | None = None
    previous_at = 0.0
    for seconds, frame in frames:
        limit.count_frame()
        if previous is not None:
            interval = seconds - previous_at
            # A frame is the nearest until half-way to the next one, so it can be yielded once the next one is known.
            times = target_times.count_frame_times_until(previous_at + interval / 2) - num_served
            if times > 0:
                yield previous, times
                num_served += times
        # All times have a frame, so the rest is not decoded.
        if num_served == target_times.count:
            return
        previous, previous_at = frame, seconds
    if previous is not None:
        # The end of the file: the last frame serves the remaining times that it is near enough to.
        last_duration = target_times.compute_last_duration(previous, interval)
        times = target_times.count_frame_times_until(previous_at + last_duration) - num_served
        if times > 0:
            yield previous, times


def _iter_timed_frames(frames: Iterable[av.VideoFrame]) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield each decoded frame with its time in seconds since the first one."""
    start: float | None = None
    for frame in frames:
        seconds = get_frame_time(frame)
        start = seconds if start is None else start
        yield seconds - start, frame


def _check_times_ascend(frames: Iterable[tuple[float, av.VideoFrame]]) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield decoded frames unchanged; raises `ValueError` if their times run backwards."""
    previous = -math.inf
    for seconds, frame in frames:
        if seconds < previous:
            raise ValueError("time runs backwards")
        yield seconds, frame
        previous = seconds


def get_first_time(container: av.container.InputContainer, stream: av.VideoStream) -> float:
    """Time stamp of a video's first frame, in seconds."""
    return get_frame_time(decode_first_frame(container, stream))


def _to_time_base_ticks(stream: av.VideoStream, seconds: float) -> int:
    if stream.time_base is None:
        raise ValueError("no time base")
    # Rounding must not move the time to just before a key frame at exactly this time.
    return math.floor(seconds / stream.time_base + 1e-3)


def _decode_from_key_frame(
    container: av.container.InputContainer, stream: av.VideoStream, origin: float, target: int
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield each frame from the last key frame not after `target` on, with its seconds since `origin`."""
    head, packets = _seek_key_frame(container, stream, target)
    count = 0
    for frame in chain.from_iterable(packet.decode() for packet in packets):
        if count == 0 and not (
            # Only a real key frame, decoded first, gives the same pictures as decoding from the beginning.
            frame.pts == head and frame.key_frame and frame.pict_type == PictureType.I
        ):
            raise ValueError("the key frame is none that decoding can start at")
        yield get_frame_time(frame) - origin, frame
        count += 1
    if count < 2:
        raise ValueError("how long the last frame is shown depends on the one before it")


def _seek_key_frame(
    container: av.container.InputContainer, stream: av.VideoStream, target: int
) -> tuple[int, Iterator[_Packet]]:
    """Seek to the last key frame not after `target`; returns its time in ticks, and the packets from it on."""
    aim = target
    for _ in range(3):
        # FFmpeg seeks to a key frame at or before the aim.
        container.seek(aim, stream=stream)
        packets = container.demux(stream)
        head = next(packets)
        if head.pts is None or not head.is_keyframe:
            break
        if head.pts <= target:
            return head.pts, chain([head], packets)
        # MP4 is searched by decoding times, which are before the presentation times, so try an earlier time.
        aim = (head.pts if head.dts is None else head.dts) - 1
    raise ValueError("the search for the key frame failed")
