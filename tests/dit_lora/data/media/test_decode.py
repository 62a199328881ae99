"""Frames that are decoded from key frames on are bit-identical to those from decoding from the beginning."""

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dit_lora.data.media.decode import RegularFrameTimes, iter_nearest_frames
from dit_lora.data.media.media import MediaFile, TarMember
from dit_lora.data.media.pictures import scale_to_cover, to_upright_image
from dit_lora.data.media.video import (
    ClipError,
    explain_missing_frames,
    read_frames,
    read_header,
    write_video,
)

HEIGHT, WIDTH, FPS, COUNT = 32, 48, 30, 100


def moving() -> np.ndarray:
    """uint8 (F, H, W, 3): a texture seen through a moving window, so that frames are predicted from others."""
    rough = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    big = np.asarray(Image.fromarray(rough).resize((3 * WIDTH, 3 * HEIGHT)))
    left_edges = [round(WIDTH * (1 + np.sin(k / 9))) for k in range(COUNT)]
    top = [round(HEIGHT * (1 + np.cos(k / 13))) for k in range(COUNT)]
    return np.stack([big[y : y + HEIGHT, x : x + WIDTH] for x, y in zip(left_edges, top, strict=True)])


def encode(path: Path, codec: str, options: dict[str, str], ticks: list[int]) -> Path:
    """`moving` with the frames at `ticks` / (100 * FPS) seconds."""
    with av.open(path, "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.thread_count = WIDTH, HEIGHT, 1
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        base = Fraction(1, FPS * 100) if codec == "libx264" else Fraction(1, FPS)
        stream.codec_context.time_base = base
        for pixels, tick in zip(moving(), ticks, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(tick / (100 * FPS) / base), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def x264(params: str) -> dict[str, str]:
    return {"x264-params": f"scenecut=0:{params}"}


EVEN = [100 * k for k in range(COUNT)]
UNEVEN = np.cumsum(np.random.default_rng(1).choice([30, 50, 100, 150, 400], COUNT)).tolist()
FILES: dict[str, tuple[str, str, dict[str, str], list[int]]] = {
    "short groups": ("a.mp4", "libx264", x264("keyint=12:bframes=3"), EVEN),
    "one group": ("a.mp4", "libx264", x264("keyint=250:bframes=3"), EVEN),
    "no B-frames": ("a.mp4", "libx264", x264("keyint=20:bframes=0"), EVEN),
    "many B-frames": ("a.mp4", "libx264", x264("keyint=40:bframes=16:b-adapt=0:ref=16"), EVEN),
    "open groups": ("a.mp4", "libx264", x264("keyint=24:open-gop=1:b-adapt=0"), EVEN),
    "open groups, mkv": ("a.mkv", "libx264", x264("keyint=24:open-gop=1:b-adapt=0"), EVEN),
    "no key frames": ("a.mkv", "libx264", x264("keyint=24:intra-refresh=1:bframes=2"), EVEN),
    "uneven": ("a.mp4", "libx264", x264("keyint=24:bframes=3"), UNEVEN),
    "late": ("a.mov", "libx264", x264("keyint=24"), [t + 4500 for t in EVEN]),
    "early": ("a.mp4", "libx264", x264("keyint=24"), [t - 1000 for t in EVEN]),
    "webm": ("a.webm", "libvpx-vp9", {"g": "30", "deadline": "realtime", "cpu-used": "8"}, EVEN),
    "avi": ("a.avi", "mpeg4", {"g": "24", "bf": "2"}, EVEN),
    "H.264 in avi": ("a.avi", "libx264", x264("keyint=24:bframes=3"), EVEN),
    "all key frames": ("a.avi", "mjpeg", {}, EVEN),
}


def remux(path: Path, target: Path, **change: Any) -> Path:
    """The same packets, with attributes of each set as `change` says, from the `skip`-th frame on."""
    skip = change.pop("skip", 0)
    with av.open(path) as source, av.open(target, "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for index, packet in enumerate(source.demux(video=0)):
            if packet.dts is not None and index >= skip:
                packet.stream = stream
                for name, value in change.items():
                    setattr(packet, name, value)
                container.mux(packet)
    return target


def from_the_beginning(path: Path, wanted: RegularFrameTimes) -> list[np.ndarray]:
    frames: list[np.ndarray] = []
    for nearest_frame in iter_nearest_frames(MediaFile(path), wanted, should_seek=False):
        frames += [
            scale_to_cover(*to_upright_image(nearest_frame.frame, nearest_frame.pixel_aspect), HEIGHT, WIDTH)
        ] * nearest_frame.num_times
    return frames


def check_equal(path: Path, tries: int) -> None:
    """Windows at random places, on frames and between them, with the first and the last ones."""
    chance = random.Random(0)
    last_time = RegularFrameTimes(1, 8.0, (COUNT - 0.7) / FPS)  # nearest to the last frame, though after it
    for times in (last_time, RegularFrameTimes(5, 8.0), RegularFrameTimes(20, 30.0)):
        check_window(path, times)
    starts = [1e-9, 0.8, 1.6, (COUNT - 1) / FPS, (COUNT - 1.4) / FPS, 1e3]
    starts += [chance.uniform(0, COUNT / FPS) for _ in range(tries)]
    starts += [chance.randrange(COUNT) / FPS for _ in range(tries)]
    for start in starts:
        times = RegularFrameTimes(*chance.choice([(1, 8.0), (5, 8.0), (3, 24.0), (9, 30.0), (2, 60.0)]), start)
        check_window(path, times)


def check_window(path: Path, wanted: RegularFrameTimes) -> None:
    expected = from_the_beginning(path, wanted)
    options: dict[str, Any] = {
        "frames": wanted.count,
        "fps": wanted.fps,
        "height": HEIGHT,
        "width": WIDTH,
    }
    if len(expected) < wanted.count:
        with pytest.raises(ClipError, match=f"at most {len(expected)}"):
            read_frames(path, start=wanted.start, **options)
        return
    video = read_frames(path, start=wanted.start, **options).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(video, np.stack(expected)), f"{wanted}"


@pytest.mark.parametrize(
    ("kind", "threads"),
    [*((kind, 1) for kind in FILES), ("short groups", 2), ("open groups", 2), ("webm", 2)],
)
def test_a_window_holds_what_decoding_from_the_beginning_gives(tmp_path: Path, kind: str, threads: int) -> None:
    name, codec, options, ticks = FILES[kind]
    path = encode(tmp_path / name, codec, options, ticks)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_equal(path, tries=7)
    finally:
        torch.set_num_threads(before)


def test_files_that_mislead_the_search_are_decoded_from_the_beginning(tmp_path: Path) -> None:
    full_clip = encode(tmp_path / "a.mp4", "libx264", x264("keyint=24:bframes=3"), EVEN)
    # Every packet says that it is a key frame; the file ends early; the first key frame is gone.
    check_equal(remux(full_clip, tmp_path / "lie.mkv", is_keyframe=True), tries=3)
    check_equal(remux(full_clip, tmp_path / "lie.mp4", is_keyframe=True), tries=3)
    matroska = remux(full_clip, tmp_path / "b.mkv")
    (tmp_path / "cut.mkv").write_bytes(matroska.read_bytes()[: matroska.stat().st_size * 9 // 10])
    check_equal(tmp_path / "cut.mkv", tries=3)
    check_equal(remux(full_clip, tmp_path / "headless.mkv", skip=10), tries=3)


def test_a_window_decodes_little_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the key frame before it on, to one frame past the last."""
    path = encode(tmp_path / "a.mp4", "libx264", x264("keyint=24:bframes=3:b-adapt=0"), EVEN)
    positions: list[float] = []

    def count(frames: Any, *_: Any) -> Any:
        for frame in frames:
            positions.append(frame[0])
            yield frame

    monkeypatch.setattr("dit_lora.data.media.decode._check_times_ascend", count)
    read_frames(path, frames=3, height=HEIGHT, width=WIDTH, fps=8, start=1)  # frames 30, 34, 37
    assert positions[0] == pytest.approx(24 / FPS)
    assert positions[-1] <= 40 / FPS
    assert len(positions) <= 17


@pytest.mark.parametrize("kind", ["open groups", "open groups, mkv", "late", "webm", "avi"])
def test_key_frames_are_found_in_many_kinds_of_files(tmp_path: Path, kind: str) -> None:
    """Without falling back to the beginning."""
    name, codec, options, ticks = FILES[kind]
    path = encode(tmp_path / name, codec, options, ticks)
    for start in (0.0, 0.8, 1.7, 2.5):
        nearest_frames = list(iter_nearest_frames(MediaFile(path), RegularFrameTimes(4, 8.0, start), should_seek=True))
        assert sum(warning.num_times for warning in nearest_frames) == 4


def test_a_window_that_the_clip_does_not_hold_is_too_short(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", "libx264", x264("keyint=24"), EVEN)
    with pytest.raises(ClipError, match=r"9 frames at 8 fps from 2\.5 s on .* it has at most 7"):
        read_frames(path, frames=9, height=HEIGHT, width=WIDTH, fps=8, start=2.5)
    header = read_header(path)
    assert explain_missing_frames(header, frames=7, fps=8, start=2.5) is None
    assert "at most 7" in (explain_missing_frames(header, frames=9, fps=8, start=2.5) or "")


def test_a_window_inside_a_tar_is_read_as_from_a_file(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", "libx264", x264("keyint=24"), EVEN)
    size = path.stat().st_size
    (tmp_path / "a.tar").write_bytes(b"-" * 512 + path.read_bytes())
    member = TarMember(tmp_path / "a.tar", "a.mp4", 512, size)
    options: dict[str, Any] = {"frames": 4, "height": 32, "width": 48, "fps": 8, "start": 1.7}
    assert torch.equal(read_frames(member, **options), read_frames(path, **options))


def test_a_header_tells_what_is_shown_upright_and_in_square_pixels(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", torch.zeros(9, 32, 48, 3, dtype=torch.uint8), 8)
    header = read_header(tmp_path / "a.mp4")
    assert (header.height, header.width, header.frames, header.is_image) == (32, 48, 9, False)
    assert (header.fps, header.seconds) == (8, pytest.approx(9 / 8))
    with av.open(tmp_path / "a.mp4") as source, av.open(tmp_path / "b.mp4", "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(90)
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    rotated_header = read_header(tmp_path / "b.mp4")
    assert (rotated_header.height, rotated_header.width) == (96, 32)


def test_the_header_of_wide_pixels_and_of_matroska(tmp_path: Path) -> None:
    with av.open(tmp_path / "a.mkv", "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(4, 3)
        for _ in range(16):
            container.mux(stream.encode(av.VideoFrame(48, 32, "yuv420p")))
        container.mux(stream.encode())
    header = read_header(tmp_path / "a.mkv")
    assert (header.height, header.width, header.frames) == (32, 64, None)
    assert header.seconds == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_the_header_of_an_image(tmp_path: Path, name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    Image.new("RGB", (48, 32)).save(tmp_path / name, exif=exif)
    header = read_header(tmp_path / name)
    assert (header.height, header.width, header.frames, header.is_image) == (48, 32, 1, True)
    assert header.fps is header.seconds is None
    Image.effect_noise((320, 240), 50).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:5000])
    assert read_header(tmp_path / "cut.png").width == 320  # the pixels are not touched
    (tmp_path / "b.png").write_bytes(b"text")
    with pytest.raises(ClipError, match=r"b\.png: cannot be opened as an image"):
        read_header(tmp_path / "b.png")
