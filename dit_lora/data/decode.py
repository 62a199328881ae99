"""The frames of a video nearest to given times, with no more decoding than the answer needs.

The answer is defined by decoding from the beginning. Three things make it cheaper: decoding starts at the key frame
before the first wanted time; H.264 frames that no other refers to and no time is nearest to are not decoded; and it
stops when the last wanted frame is certain. Where the file gives reason to doubt that the answer stays the same
(a search that lands elsewhere, frames that do not come out, errors), it is decoded from the beginning instead.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import av
import torch
from av.stream import Disposition
from av.video.frame import PictureType

from dit_lora.data.media import Media

_MOST_THREADS = 4
"""Each thread decodes one frame ahead, in vain for the last ones."""

_LOOK_AHEAD = 32
"""Packets; a frame of H.264 comes at most 16 after one that is shown later."""

_Packet: TypeAlias = "av.Packet[av.VideoStream]"  # at run time, no generic class


class _DoubtError(ValueError):
    """Decoding from the beginning might give something else."""


@dataclass(frozen=True)
class Wanted:
    """The times start, start + 1/fps, start + 2/fps ..., in seconds since the first frame."""

    count: int
    fps: float
    start: float = 0.0

    def until(self, seconds: float) -> int:
        """How many come before `seconds`."""
        # The small shift lets a time on the border belong to the earlier frame in spite of rounding.
        passed = math.floor((seconds - self.start) * self.fps + 1e-6) + 1
        return max(0, min(self.count, passed))


@dataclass(frozen=True)
class Nearest:
    """A frame, and how many of the wanted times in a row it is the nearest to."""

    frame: av.VideoFrame
    times: int
    stretch: float
    """Width of a stored pixel to its height."""


def nearest_frames(media: Media, wanted: Wanted, *, quick: bool = True) -> Iterator[Nearest]:
    """In order; fewer times than wanted if the video ends before.

    A `quick` one may raise `ValueError` or `av.error.FFmpegError` after the first frames where one that is not
    gives them all.
    """
    with open_container(media) as container:
        stream = video_stream(container)
        # What one process may use: DataLoader's workers and torchrun's ranks have one thread each.
        stream.codec_context.thread_count = min(torch.get_num_threads(), _MOST_THREADS)
        stream.codec_context.thread_type = "AUTO"
        stretch = float(stream.sample_aspect_ratio or 1)
        if not quick or (container.format.name, stream.codec_context.name) == ("avi", "h264"):
            frames = _timed(
                container.decode(stream)
            )  # AVI stores no times; those guessed run backwards
        elif wanted.start > 0:
            frames = _forwards(_from_key_frame(container, stream, wanted))
        else:
            frames = _forwards(_timed(_decode_thrifty(container.demux(stream), stream, wanted)))
        for frame, times in _pick(frames, wanted):
            yield Nearest(frame, times, stretch)


def open_container(media: Media) -> av.container.InputContainer:
    """Metadata may be in any encoding. Raises `OSError` or `av.error.FFmpegError`."""
    return av.open(media.source(), "r", metadata_errors="replace")


def video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """Its first one that is no cover picture; raises `ValueError` if there is none that can be decoded."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise ValueError("its video stream is of a codec that FFmpeg does not know")
            return stream
    raise ValueError("it has no video stream")


def first_rotation(container: av.container.InputContainer, stream: av.VideoStream) -> int:
    """Degrees counter-clockwise by which the first frame is to be turned; decodes that one only."""
    stream.codec_context.thread_count = 1
    for packet in container.demux(stream):
        # Flushed, the decoder does not wait for the frames that may be shown before.
        for frame in (*packet.decode(), *stream.decode(None)):
            return frame.rotation
    return 0


def _pick(
    frames: Iterable[tuple[float, av.VideoFrame]], wanted: Wanted
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Those of the frames that are nearest to wanted times, each with their number."""
    taken, interval = 0, 0.0
    shown: av.VideoFrame | None = None
    shown_at = 0.0
    for seconds, frame in frames:
        if shown is not None:
            interval = seconds - shown_at
            times = wanted.until(shown_at + interval / 2) - taken
            if times > 0:
                yield shown, times
                taken += times
        if taken == wanted.count:
            return
        shown, shown_at = frame, seconds
    if shown is not None:
        times = wanted.until(shown_at + interval / 2) - taken
        if times > 0:
            yield shown, times


def _timed(frames: Iterable[av.VideoFrame]) -> Iterator[tuple[float, av.VideoFrame]]:
    """Each frame with its seconds since the first one."""
    start: float | None = None
    for frame in frames:
        seconds = _seconds(frame)
        start = seconds if start is None else start
        yield seconds - start, frame


def _forwards(
    frames: Iterable[tuple[float, av.VideoFrame]],
) -> Iterator[tuple[float, av.VideoFrame]]:
    previous = -math.inf
    for seconds, frame in frames:
        if seconds < previous:
            raise _DoubtError("time runs backwards")
        yield seconds, frame
        previous = seconds


def _seconds(frame: av.VideoFrame) -> float:
    if frame.time is None:
        raise ValueError("a frame has no time stamp")
    if frame.is_corrupt:
        raise ValueError(f"the frame at {frame.time:.2f} s is damaged")
    return frame.time


def _from_key_frame(
    container: av.container.InputContainer, stream: av.VideoStream, wanted: Wanted
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Each frame from the last key frame before the first wanted time on, with its seconds since the first one."""
    first = next(container.decode(stream), None)
    if first is None or stream.time_base is None:
        raise _DoubtError("no first frame")
    origin = _seconds(first)
    # Rounding must not put it just before a key frame.
    target = math.floor((origin + wanted.start) / stream.time_base + 1e-3)
    head, packets = _search(container, stream, target)
    count = 0
    for frame in _decode_thrifty(packets, stream, wanted, origin, head):
        if count == 0 and not (
            frame.pts == head and frame.key_frame and frame.pict_type == PictureType.I
        ):
            raise _DoubtError("the key frame is none that decoding can start at")
        yield _seconds(frame) - origin, frame
        count += 1
    if count < 2:
        raise _DoubtError("how long the last frame is shown depends on the one before it")


def _search(
    container: av.container.InputContainer, stream: av.VideoStream, target: int
) -> tuple[int, Iterator[_Packet]]:
    """The packets from the last key frame not after `target` on, and that one's time, in ticks of the stream."""
    aim = target
    for _ in range(3):
        container.seek(aim, stream=stream)
        packets = container.demux(stream)
        head = next(packets)
        if head.pts is None or not head.is_keyframe:
            break
        if head.pts <= target:
            return head.pts, chain([head], packets)
        # MP4's are found by when they are decoded, which is before they are shown.
        aim = (head.pts if head.dts is None else head.dts) - 1
    raise _DoubtError("the search for the key frame failed")


def _decode_thrifty(
    packets: Iterator[_Packet],
    stream: av.VideoStream,
    wanted: Wanted,
    origin: float | None = None,
    head: int | None = None,
) -> Iterator[av.VideoFrame]:
    """Decode, leaving out H.264 frames that are neither referred to nor nearest to a wanted time.

    `origin` is the first frame's time in seconds and `head` that of the key frame that `packets` begin with, in
    ticks; None if that is the first frame.
    """
    if stream.codec_context.name != "h264":
        yield from chain.from_iterable(packet.decode() for packet in packets)
        return
    base = float(stream.time_base or 1)
    due: set[int] = set()
    for packet, before, after in _with_neighbours(packets):
        unwanted = False
        if origin is not None and packet.pts and before is not None and after is not None:
            # Packets yet to be read could only bring nearer neighbours, and so narrow this further.
            low = (before + packet.pts) / 2 * base - origin - 1e-3 / wanted.fps
            high = (after + packet.pts) / 2 * base - origin + 1e-3 / wanted.fps
            unwanted = wanted.until(low) == wanted.until(high)
        stream.codec_context.skip_frame = "NONREF" if unwanted else "DEFAULT"
        if not unwanted and packet.pts is not None and not packet.is_discard:
            due.add(packet.pts)
        for frame in packet.decode():
            if frame.pts is None or frame.time is None:
                raise _DoubtError("a frame has no time stamp")
            origin = frame.time if origin is None else origin
            head = frame.pts if head is None else head
            due.discard(frame.pts)
            if any(head <= pts < frame.pts for pts in due):
                raise _DoubtError("a frame did not come out")
            yield frame


def _with_neighbours(
    packets: Iterator[_Packet],
) -> Iterator[tuple[_Packet, int | None, int | None]]:
    """Each packet with the nearest times before and after its own among the packets up to some way ahead.

    They are None for the first and last packets.
    """
    ahead: deque[_Packet] = deque()
    known: list[int] = []
    for packet in packets:
        ahead.append(packet)
        if packet.size and packet.pts is None:
            raise _DoubtError("a packet has no time stamp")
        if packet.pts is not None and not packet.is_discard:
            place = bisect_left(known, packet.pts)
            if place < len(known) and known[place] == packet.pts:
                raise _DoubtError("two packets have the same time stamp")
            known.insert(place, packet.pts)
        if len(ahead) > _LOOK_AHEAD:
            yield _between(ahead.popleft(), known)
    for packet in ahead:
        yield packet, None, None


def _between(packet: _Packet, known: Sequence[int]) -> tuple[_Packet, int | None, int | None]:
    if packet.pts is None or packet.is_discard:
        return packet, None, None
    place = bisect_left(known, packet.pts)
    before = known[place - 1] if place else None
    after = known[place + 1] if place + 1 < len(known) else None
    return packet, before, after
