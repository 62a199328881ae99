"""Measures one video; every frame is decoded once, in one thread."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter
from PIL import Image

from dit_lora.data.audit.image_probe import THUMBNAIL_QUALITY, THUMBNAIL_WIDTH, Failures
from dit_lora.data.audit.measure import SMALL_SIDE, PictureMeasures
from dit_lora.data.audit.outline import PictureOutline
from dit_lora.data.audit.sound import measure_sound
from dit_lora.data.media.display import Orientation
from dit_lora.data.media.media import Media
from dit_lora.data.media.opened import FrameLimit, encode_jpeg, find_size_problem, get_error_message, open_media
from dit_lora.data.media.video_header import count_visible_frames, read_container_header

_MAX_SAMPLES = 8
"""Number of sampled frames at which every other one is dropped and the sampling stride doubles."""
_THUMBNAIL_FRAMES = 4
# Maximum height of a thumbnail in pixels: a 9:16 picture at a quarter of the thumbnail's width.
_MAX_THUMBNAIL_HEIGHT = 142
_MAX_ERRORS = 20
# Tolerance as a share of the usual interval; larger than any container's rounding at 24 to 60 fps.
_INTERVAL_TOLERANCE = 0.25
_DECODE_ERRORS = (av.error.FFmpegError, OSError, ValueError, MemoryError)
# Transfer characteristics and colour primaries of ITU-T H.273.
_HDR_CURVES = {16: "PQ", 18: "HLG"}
_BT2020 = 9
# FFmpeg's AVCOL_RANGE_JPEG.
_FULL_RANGE = 2


def measure_video(media: Media, heartbeat: Callable[[], None]) -> tuple[Failures, dict[str, Any], bytes | None]:
    """Measure a video file: failures that make it unusable, measurements, and a JPEG thumbnail.

    The thumbnail is None if the file cannot be decoded.
    """
    facts: dict[str, Any] = {}
    try:
        with open_media(media) as container:
            facts["container"] = container.format.name
            # A sound file may contain its cover as a video stream; only other streams are videos.
            streams = _list_video_streams(container)
            if not streams:
                cover = bool(container.streams.video)
                message = "its only picture is a cover image" if cover else "it has only sound"
                fault = message if cover or container.streams.audio else "it has no video stream"
                return [("no_video_stream", fault)], facts, None
            stream = streams[0]
            if stream.codec_context is None:
                return [("unreadable", "FFmpeg has no decoder for its video")], facts, None
            facts |= _read_header(container, stream)
            too_large = find_size_problem(facts["height"], facts["width"])
            if too_large:
                return [("corrupt", too_large)], facts, None
            frames = _FrameMeasures(float(stream.average_rate or 0), float(stream.sample_aspect_ratio or 1))
            frames.decode(container, stream, heartbeat)
    except _DECODE_ERRORS as error:
        return [("unreadable", f"it cannot be opened as a video: {get_error_message(error)}")], facts, None
    if not frames.times:
        # A stream without frames may end without any error.
        return frames.failures or [("no_frames", "no frame comes out of it")], facts, None
    # Training opens files with `read_container_header`, so a file that it refuses is refused here too.
    try:
        with open_media(media) as container:
            read_container_header(container)
    except _DECODE_ERRORS as error:
        if not frames.failures:
            frames.failures.append(("unreadable", f"its first frame: {get_error_message(error)}"))
    facts |= frames.compute_measurements()
    facts["sound"] = measure_sound(media, frames.times[0], heartbeat)
    return frames.failures, facts, frames.encode_thumbnail()


def _list_video_streams(container: av.container.InputContainer) -> list[av.VideoStream]:
    """List a container's video streams, without cover pictures."""
    return [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]


def _read_header(container: av.container.InputContainer, stream: av.VideoStream) -> dict[str, Any]:
    seconds: float | None = None
    if stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    # With sound, the container's duration is that of its longest stream, which may be the sound.
    elif container.duration and not container.streams.audio:
        seconds = container.duration / av.time_base
    return {
        "codec": stream.codec_context.name,
        "height": stream.height,
        "width": stream.width,
        "header_frames": count_visible_frames(stream),
        "header_seconds": seconds,
        "header_start": max(0.0, (container.start_time or 0) / av.time_base),
        "header_fps": float(stream.average_rate) if stream.average_rate else None,
        "streams": len(_list_video_streams(container)),
        "pixel_aspect": float(stream.sample_aspect_ratio or 1),
        # Only this tag tells that a VP8 or VP9 stream in WebM has transparency.
        "alpha": stream.metadata.get("alpha_mode") == "1",
    }


class _FrameMeasures:
    """Collects measures of one video's frames while they are decoded."""

    def __init__(self, rate: float, pixel_aspect: float) -> None:
        self.times: list[float] = []
        self.failures: Failures = []
        self._rate = rate if math.isfinite(rate) and rate > 0 else 25.0
        self._pixel_aspect = pixel_aspect
        self._num_untimed = self._num_interlaced = 0
        self._errors: list[tuple[int, str]] = []
        self._damaged_times: list[float] = []
        self._format: dict[str, Any] = {}
        self._orientation = Orientation()
        self._pictures = PictureMeasures()
        self._thumbnails: list[np.ndarray] = []
        self._stride = 1
        self._to_small, self._to_luma, self._to_thumbnail = (VideoReformatter() for _ in range(3))

    def decode(
        self, container: av.container.InputContainer, stream: av.VideoStream, heartbeat: Callable[[], None]
    ) -> None:
        """Decode a video to the end of the file, continuing after errors; collects measurements and failures."""
        # One thread, because the audit runs one process per core.
        stream.thread_type, stream.thread_count = "NONE", 1
        limit = FrameLimit()
        for frame in self._iter_frames(container, stream, heartbeat):
            try:
                # The limit stops small files that claim a huge number of frames.
                limit.count_frame()
            except ValueError as error:
                self.failures.append(("corrupt", str(error)))
                break
            self._measure_frame(frame)
        self._report_errors()

    def _iter_frames(
        self, container: av.container.InputContainer, stream: av.VideoStream, heartbeat: Callable[[], None]
    ) -> Iterator[av.VideoFrame]:
        """Yield a video's decoded frames; errors are collected with the number of frames before them."""
        packets = container.demux(stream)
        while len(self._errors) < _MAX_ERRORS:
            try:
                # After an error of the container there are no more packets; a decoder can continue after one.
                packet = next(packets, None)
            except _DECODE_ERRORS as error:
                self._errors.append((len(self.times), get_error_message(error)))
                return
            heartbeat()
            if packet is None:
                return
            try:
                yield from packet.decode()
            except _DECODE_ERRORS as error:
                self._errors.append((len(self.times), get_error_message(error)))

    def _measure_frame(self, frame: av.VideoFrame) -> None:
        number = len(self.times)
        # Without a time stamp, assume the average rate of the stream.
        self._num_untimed += frame.time is None
        self.times.append(number / self._rate if frame.time is None else frame.time)
        if frame.is_corrupt:
            self._damaged_times.append(self.times[-1] - self.times[0])
        self._num_interlaced += frame.interlaced_frame
        if number == 0:
            # Assume the same display matrix and pixel format for the rest of the video.
            self._orientation = Orientation.from_frame(frame)
            self._format = _describe_format(frame)
        self._pictures.add(self._scale_frame(self._to_small, frame, SMALL_SIDE, SMALL_SIDE))
        if number % self._stride:
            return
        luma = self._to_luma.reformat(frame, format="gray").to_ndarray()
        # Every other pixel of a large frame is enough to measure its levels.
        self._pictures.add_luma_levels(luma[::2, ::2] if luma.size > 4 * SMALL_SIDE**2 else luma)
        self._thumbnails.append(self._scale_frame(self._to_thumbnail, frame, *self._compute_thumbnail_size(frame)))
        # Keep every other sample and double the stride: the samples still cover the video evenly.
        if len(self._thumbnails) == _MAX_SAMPLES:
            self._thumbnails, self._stride = self._thumbnails[::2], 2 * self._stride

    @staticmethod
    def _scale_frame(reformatter: VideoReformatter, frame: av.VideoFrame, height: int, width: int) -> np.ndarray:
        """Scale a video frame to RGB, uint8 (height, width, 3), each pixel the mean of its area."""
        scaled = reformatter.reformat(
            frame, width=width, height=height, format="rgb24", interpolation=Interpolation.AREA
        )
        return scaled.to_ndarray()

    def _compute_thumbnail_size(self, frame: av.VideoFrame) -> tuple[int, int]:
        """Height and width of a thumbnail in pixels, before it is rotated upright."""
        height, width = frame.height, frame.width * self._pixel_aspect
        # Width and height as shown, after the rotation.
        across, down = (height, width) if self._orientation.swaps_height_and_width else (width, height)
        # Both sides must fit: four frames share the width, and tall frames are limited by the height.
        scale = min(THUMBNAIL_WIDTH / _THUMBNAIL_FRAMES / across, _MAX_THUMBNAIL_HEIGHT / down)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def _report_errors(self) -> None:
        if self._damaged_times:
            message = f"{len(self._damaged_times)} damaged frames, the first at {self._damaged_times[0]:.2f} s"
            self.failures.append(("corrupt", message))
        elif self._errors:
            frame, reason = self._errors[0]
            count = len(self.times)
            # An error after the last frame means that the file ends early.
            if frame == count > 0:
                self.failures.append(("truncated", f"decoding ends after {count} frames: {reason}"))
            else:
                self.failures.append(("corrupt", f"decoding fails after {frame} frames: {reason}"))
        if self._num_untimed:
            message = f"{self._num_untimed} of {len(self.times)} frames have no time stamp"
            self.failures.append(("no_time_stamps", message))

    def compute_measurements(self) -> dict[str, Any]:
        seconds = np.array(self.times) - self.times[0]
        intervals = np.diff(seconds)
        final_interval = float(intervals[-1]) if len(intervals) else 0.0
        usual_interval = float(np.median(intervals)) if len(intervals) else 1 / self._rate
        # Compare each interval with the median one; containers round time stamps.
        irregular = np.abs(intervals - usual_interval) > _INTERVAL_TOLERANCE * usual_interval
        # Lengths of stretches need times that do not run backwards; the count of those that do is a fact of its own.
        forward = np.maximum.accumulate(seconds)
        boundaries = [*forward.tolist(), float(forward[-1] + max(0.0, usual_interval))]
        span = float(seconds[-1])
        return {
            **self._format,
            "frames": len(seconds),
            "seconds": round(boundaries[-1], 3),
            "fps": float(f"{(len(seconds) - 1) / span:.6g}") if span > 0 else self._rate,
            "last_at": float(seconds[-1]),
            "last_interval": final_interval,
            "irregular": round(float(irregular.mean()), 4) if len(intervals) else 0.0,
            "shortest_interval": round(float(intervals.min()), 4) if len(intervals) else final_interval,
            "longest_interval": round(float(intervals.max()), 4) if len(intervals) else final_interval,
            "backwards": int((intervals < 0).sum()),
            "rotation": 90 * self._orientation.quarter_turns,
            "mirrored": self._orientation.is_mirrored,
            "interlaced": self._num_interlaced > len(seconds) / 2,
            **self._pictures.compute_measurements(boundaries),
            "outlines": [PictureOutline.from_picture(picture).text for picture in self._select_thumbnails()],
        }

    def _select_thumbnails(self) -> list[np.ndarray]:
        """Small upright pictures of up to `_THUMBNAIL_FRAMES` frames, evenly spaced over the video."""
        count = min(_THUMBNAIL_FRAMES, len(self._thumbnails))
        chosen = np.linspace(0, len(self._thumbnails) - 1, count).round().astype(int)
        return [self._orientation.apply(self._thumbnails[k]) for k in chosen]

    def encode_thumbnail(self) -> bytes:
        pictures = self._select_thumbnails()
        # Pictures can be joined only at equal heights; rounding may differ by a pixel.
        height = min(picture.shape[0] for picture in pictures)
        joined = np.concatenate([picture[:height] for picture in pictures], axis=1)
        return encode_jpeg(Image.fromarray(joined), THUMBNAIL_QUALITY)


def _describe_format(frame: av.VideoFrame) -> dict[str, Any]:
    pixels = frame.format
    name, primaries = pixels.name, int(frame.color_primaries)
    curve = _HDR_CURVES.get(int(frame.color_trc), "BT.2020" if primaries == _BT2020 else None)
    # RGB and grey pictures have no chroma, and are full range without being odd.
    colour = not pixels.is_rgb and len(pixels.components) >= 3
    facts = {
        "pixel_format": name,
        "bits": max((part.bits for part in pixels.components), default=8),
        "hdr": curve,
        "palette": pixels.has_palette,
        "full_chroma": colour and "444" in name,
        "full_range": colour and (name.startswith("yuvj") or frame.color_range == _FULL_RANGE),
    }
    if any(part.is_alpha for part in pixels.components):
        facts["alpha"] = True
    return facts
