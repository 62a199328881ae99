"""Clips that are odd or bad by their container, streams, codec, time stamps or size, and clean ones."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from benchmarks.faults.media.encode import FPS, FRAMES, HEIGHT, WIDTH, Video, encode, moving
from benchmarks.faults.media.kind import media_kind, rejected, warned

# FFmpeg's numbers of ITU-T H.273, which mp4 and H.264 write.
_BT2020 = {"color_primaries": 9, "colorspace": 9}
_PQ, _HLG, _BT2020_10 = {"color_trc": 16}, {"color_trc": 18}, {"color_trc": 14}
# x265 4.1 writes beyond its buffers if a picture is 32 x 48, and prints to stderr by itself.
_HEVC_SIZE = {"height": 64, "width": 96}
_HEVC = {"x265-params": "log-level=none"}
_STEADY = 1000 // FPS  # milliseconds a frame


def _as(codec: str = "libx264", **options: Any) -> Callable[[Path], None]:
    """A writer of a moving picture with this codec and these encoder options."""
    return lambda path: encode(path, moving(path.stem), codec, **options)


def _encoded(picture: Callable[[str], Video], codec: str = "libx264") -> Callable[[Path], None]:
    """A writer of the given picture, with default encoder options."""
    return lambda path: encode(path, picture(path.stem), codec)


def _sized(height: int, width: int, **options: Any) -> Callable[[Path], None]:
    return lambda path: encode(path, moving(path.stem, height=height, width=width), **options)


def _with_alpha(name: str) -> Video:
    """A moving picture with an alpha channel, so that parts of it are transparent."""
    video = moving(name)
    alpha = moving(f"alpha of {name}")[..., :1]
    return np.concatenate([video, alpha], axis=-1)


def _see_through(codec: str, pixels: str) -> Callable[[Path], None]:
    return lambda path: encode(path, _with_alpha(path.stem), codec, pixels=pixels)


def _times(*milliseconds: int, **options: Any) -> Callable[[Path], None]:
    return lambda path: encode(path, moving(path.stem, len(milliseconds)), times=milliseconds, **options)


def _shifted(start: int, **options: Any) -> Callable[[Path], None]:
    return _times(*(start + number * _STEADY for number in range(FRAMES)), **options)


def two_streams(path: Path) -> None:
    """Write two different pictures into one file."""
    with av.open(path, "w") as container:
        streams = []
        for name in ("first", "second"):
            stream = container.add_stream("libx264", rate=FPS)
            stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
            streams.append((stream, moving(name)))
        for stream, video in streams:
            for picture in video:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())


def sound(path: Path, cover: bool = False) -> None:
    """Write a tone of 0.6 s, on request with a picture of the album."""
    rate, length = 16_000, 1024
    with av.open(path, "w") as container:
        stream = container.add_stream("aac", rate=rate)
        picture = container.add_stream("mjpeg") if cover else None
        if picture is not None:
            picture.height, picture.width, picture.pix_fmt = HEIGHT, WIDTH, "yuvj420p"
            # As a cover: a picture that is attached is no video stream, though it looks like one.
            picture.disposition = av.stream.Disposition.attached_pic
        tone = 0.1 * np.sin(np.arange(length, dtype=np.float32) / 5)[None]
        for number in range(10):
            frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, number * length
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if picture is not None:
            image = av.VideoFrame.from_ndarray(moving(path.stem, 1)[0], format="rgb24")
            image.pts = 0
            container.mux(picture.encode(image))
            container.mux(picture.encode())


def interlaced(path: Path) -> None:
    """Write two fields a frame, the upper first."""
    options = {"flags": "+ildct+ilme", "x264-params": "tff=1"}
    encode(path, moving(path.stem), options=options)


def promising_more(path: Path) -> None:
    """Write an AVI whose headers count three times as many frames as it holds."""
    encode(path, moving(path.stem), "mpeg4")
    data = bytearray(path.read_bytes())
    # dwTotalFrames of the main header and dwLength of the stream's, each after a tag and a size of 8 bytes.
    for offset in (data.index(b"avih") + 8 + 16, data.index(b"strh") + 8 + 32):
        data[offset : offset + 4] = (3 * FRAMES).to_bytes(4, "little")
    del data[data.rindex(b"idx1") :]  # else FFmpeg counts there
    path.write_bytes(data)


def longer_in_words(path: Path) -> None:
    """Write a Matroska file that says 6 s and holds 2 s."""
    encode(path, moving(path.stem))
    data = bytearray(path.read_bytes())
    at = data.index(b"\x44\x89\x88") + 3  # Duration, a float of 8 bytes
    data[at : at + 8] = np.array(6000.0, ">f8").tobytes()
    path.write_bytes(data)


KINDS = (
    media_kind("a clean mp4", "clean.mp4", _as()),
    media_kind("a clean webm", "clean.webm", _as("libvpx-vp9")),
    media_kind("a clean mov", "clean.mov", _as("mpeg4")),
    media_kind("a clean mkv", "clean.mkv", _as()),
    media_kind("a clean Motion JPEG", "clean.avi", _as("mjpeg", pixels="yuvj420p")),
    media_kind("an odd size", "odd.webm", _sized(35, 51, codec="libvpx-vp9")),
    media_kind("a clip that starts late", "late.mkv", _shifted(10_000)),
    rejected("sound only", "sound.mp4", sound, "no_video_stream"),
    rejected("sound with a cover", "cover.mp4", lambda path: sound(path, cover=True), "no_video_stream"),
    rejected("one frame", "one.mp4", _encoded(lambda name: moving(name, 1)), "too_short"),
    rejected("a frame too few", "eight.mp4", _encoded(lambda name: moving(name, 8)), "too_short"),
    rejected("2 x 2 pixels", "two.mp4", _sized(2, 2), "too_small"),
    warned("half the size", "half.mp4", _sized(16, 24), "upscaled"),
    warned("a much wider picture", "wide.mp4", _sized(32, 128), "cropped"),
    warned("H.264 of 10 bits", "h264.mp4", _as(pixels="yuv420p10le"), "ten_bit"),
    warned(
        "HEVC of 10 bits",
        "hevc.mp4",
        _sized(**_HEVC_SIZE, codec="libx265", pixels="yuv420p10le", options=_HEVC),
        "ten_bit",
    ),
    warned("PQ", "pq.mp4", _as(pixels="yuv420p10le", tags=_BT2020 | _PQ), "hdr"),
    warned("HLG", "hlg.mp4", _as(pixels="yuv420p10le", tags=_BT2020 | _HLG), "hdr"),
    warned("BT.2020 in 8 bits", "wide.mp4", _as(tags=_BT2020 | _BT2020_10), "hdr"),
    warned(
        "a rotation flag",
        "turned.mp4",
        _sized(WIDTH, HEIGHT, display=lambda stream: stream.set_display_rotation(90)),
        "rotated",
    ),
    warned(
        "a variable frame rate",
        "vfr.mp4",
        _times(0, 40, 80, 330, 370, 620, 660, 700, 950, 990, 1240, 1300, 1500, 1540, 1600, 2000),
        "variable_frame_rate",
    ),
    warned(
        "half the frame rate",
        "slow.mp4",
        lambda path: encode(path, moving(path.stem), fps=FPS // 2),
        "fps_low",
    ),
    warned("interlaced", "fields.mp4", interlaced, "interlaced"),
    warned(
        "pixels that are not square",
        "dv.mp4",
        _sized(32, 24, tags={"sample_aspect_ratio": Fraction(2)}),
        "non_square_pixels",
    ),
    warned("VP9 with alpha", "vp9.webm", _see_through("libvpx-vp9", "yuva420p"), "alpha"),
    warned("ProRes with alpha", "pro.mov", _see_through("prores_ks", "yuva444p10le"), "alpha"),
    warned("QuickTime RLE with alpha", "rle.mov", _see_through("qtrle", "argb"), "alpha"),
    warned("PNG frames with alpha", "png.mov", _see_through("png", "rgba"), "alpha"),
    warned("4:4:4", "full.mp4", _as(pixels="yuv444p"), "odd_pixel_format"),
    warned("H.264 in full range", "range.mp4", _as(pixels="yuvj420p"), "odd_pixel_format"),
    warned("two video streams", "streams.mp4", two_streams, "several_streams"),
    rejected("a stream without container", "raw.mkv", _as(muxer="h264"), "no_time_stamps"),
    rejected(
        "frames before zero",
        "early.mkv",
        _shifted(-500, muxing={"avoid_negative_ts": "disabled"}),
        "no_time_stamps",
    ),
    media_kind(
        "frames that an edit list hides",
        "edited.mp4",
        _shifted(-500, muxing={"avoid_negative_ts": "disabled"}),
    ),
    warned("a header that counts too many", "count.avi", promising_more, "frame_count"),
    warned("a header that says too long", "words.mkv", longer_in_words, "duration"),
)
