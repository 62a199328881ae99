"""The frames asked for are those seen: each frame's number is written in its pixels."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dit_lora.data.chat.frames import (
    CropBox,
    compute_latest_times,
    read_frames_at,
    sample_frame_times,
    sample_random_box,
)
from dit_lora.data.media import decode
from dit_lora.data.media.decode import ArbitraryFrameTimes, iter_nearest_frames
from dit_lora.data.media.media import MediaFile, TarMember
from dit_lora.data.media.video import ClipError, read_frames, read_header

HEIGHT, WIDTH, COUNT, FPS = 32, 40, 120, 25


def seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


def picture(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Black and white columns of 5 pixels: the binary digits of the number; the last row is grey."""
    bits = [number >> bit & 1 for bit in range(width // 5)]
    pixels = np.repeat(np.array(bits, np.uint8) * 255, 5)[None, :, None].repeat(height, 0)
    return np.ascontiguousarray(pixels.repeat(3, 2))


def numbers(video: torch.Tensor) -> list[int]:
    """Of frames at the size they were drawn."""
    middles = video[:, :, HEIGHT // 2, 2::5].float().mean(1) > 127
    return [sum(int(bit) << position for position, bit in enumerate(bits)) for bits in middles]


def write(path: Path, times_ms: list[int], codec: str = "libx264", **options: str) -> Path:
    """Frame k, showing k, at the k-th of these milliseconds."""
    with av.open(path, "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.thread_count = WIDTH, HEIGHT, 1
        stream.pix_fmt = "yuv420p"
        base = Fraction(1, FPS) if path.suffix == ".avi" else Fraction(1, 1000)
        stream.codec_context.time_base = base
        for number, time in enumerate(times_ms):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = round(Fraction(time, 1000) / base), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def even(count: int = COUNT) -> list[int]:
    return [k * 1000 // FPS for k in range(count)]


def seen(path: Path, seconds: list[float] | tuple[float, ...]) -> list[int]:
    video = read_frames_at(MediaFile(path), seconds, height=HEIGHT, width=WIDTH, fit="stretch")
    assert video.dtype == torch.uint8
    assert video.shape == (len(seconds), 3, HEIGHT, WIDTH)
    return numbers(video)


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "short groups": ("a.mp4", {"x264-params": "keyint=12:scenecut=0:bframes=3"}),
    "one group": ("a.mp4", {"x264-params": "keyint=250:scenecut=0"}),
    "open groups": ("a.mkv", {"x264-params": "keyint=24:open-gop=1:scenecut=0"}),
    "webm": ("a.webm", {"codec": "libvpx-vp9", "g": "30", "cpu-used": "8", "deadline": "realtime"}),
    "avi": ("a.avi", {"codec": "mpeg4", "g": "24", "q": "2"}),
    "H.264 in avi": ("a.avi", {"x264-params": "keyint=24:scenecut=0:bframes=3"}),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_frames_are_those_of_the_times(tmp_path: Path, kind: str) -> None:
    name, options = FILES[kind]
    path = write(tmp_path / name, even(), **options)
    header = read_header(path)
    assert header.seconds is not None
    assert header.seconds == pytest.approx(COUNT / FPS, abs=0.05)
    times = sample_frame_times(COUNT / FPS, FPS, 8)
    assert seen(path, times) == [7, 22, 37, 52, 67, 82, 97, 112]
    for number in range(5):
        times = sample_frame_times(COUNT / FPS, FPS, 7, start=0.2, end=4.6, generator=seed(number))
        frame_indices = [round(second * FPS) for second in times]
        assert seen(path, times) == frame_indices
        assert 5 <= frame_indices[0] <= frame_indices[-1] < 115
    assert seen(path, [0.0]) == [0]
    assert seen(path, [0, 0.015, 0.025, 4.76]) == [0, 0, 1, 119]


def test_times_of_a_clip_of_uneven_frames_that_starts_late(tmp_path: Path) -> None:
    steps = np.random.default_rng(0).choice([10, 40, 70, 300], 60)
    times_ms = np.cumsum(steps).tolist()
    path = write(tmp_path / "a.mkv", [700 + time for time in times_ms], **{"x264-params": "keyint=9"})
    seconds = (np.array(times_ms) - times_ms[0]) / 1000
    times = sorted(np.random.default_rng(1).uniform(0, seconds[-1], 20).tolist())
    assert seen(path, times) == [int(np.abs(seconds - time).argmin()) for time in times]


def test_only_groups_with_wanted_frames_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"x264-params": "keyint=10:scenecut=0:bframes=0"}
    path = write(tmp_path / "a.mkv", [time + 2000 for time in even()], **options)
    decoded_indices: list[int] = []
    forwards = decode._check_times_ascend

    def count(frames: Any) -> Any:
        for seconds, frame in forwards(frames):
            decoded_indices.append(round(seconds * FPS))
            yield seconds, frame

    monkeypatch.setattr(decode, "_check_times_ascend", count)
    assert seen(path, [15 / FPS, 17 / FPS, 93 / FPS]) == [15, 17, 93]
    assert decoded_indices == [*range(10, 19), *range(90, 95)]
    nearest_frames = iter_nearest_frames(MediaFile(path), ArbitraryFrameTimes((0.6, 3.0)), should_seek=True)
    assert [warning.num_times for warning in nearest_frames] == [1, 1]


def test_a_gif_is_a_video(tmp_path: Path) -> None:
    frames = [Image.fromarray(picture(k)).quantize(4) for k in range(12)]
    times = [100] * 11 + [3000]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=times)
    header = read_header(tmp_path / "a.gif")
    assert header.seconds == pytest.approx(4.1)
    assert not header.is_image
    assert seen(tmp_path / "a.gif", [0.0, 0.21, 0.56, 1.1, 4.0]) == [0, 2, 6, 11, 11]


def test_fewer_frames_than_asked_for_come_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", even(3))
    assert seen(path, sample_frame_times(3 / FPS, FPS, 8)) == [0, 1, 2, 2, 2, 2, 2, 2]
    path = write(tmp_path / "b.mp4", even(1))
    assert seen(path, sample_frame_times(1 / FPS, FPS, 2, generator=seed(0))) == [0, 0]


def test_a_clip_that_says_it_is_longer_than_it_is_repeats_its_last_frame_for_a_second(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.mp4", even(50))
    assert seen(path, [1.0, 2.9]) == [25, 49]
    with pytest.raises(ClipError, match=r"a\.mp4: it ends before 3\.00 s"):
        seen(path, [1.0, 3.0, 4.0])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.png"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(ClipError, match=rf"{name}: cannot be decoded"):
            seen(tmp_path / name, [0.0])
    with pytest.raises(ClipError, match=r"gone\.gif: cannot be decoded"):
        seen(tmp_path / "gone.gif", [0.0])
    for times in ([1.0, 0.0], []):
        with pytest.raises(ValueError, match="the times of a video must be in order"):
            seen(tmp_path / "a.mp4", times)


def test_a_member_of_a_tar_is_read_as_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", even(30))
    (tmp_path / "a.tar").write_bytes(b"-" * 512 + path.read_bytes())
    member = TarMember(tmp_path / "a.tar", "a.mp4", 512, path.stat().st_size)
    video = read_frames_at(member, [0.4, 0.8], height=HEIGHT, width=WIDTH, fit="stretch")
    assert numbers(video) == [10, 20]


# The rule as published, of a clip of `length` frames.
def published(count: int, length: int) -> list[tuple[int, int]]:
    num_used = min(count, length)
    edges = np.linspace(0, length, num_used + 1).astype(int).tolist()
    return [(edges[k], edges[k + 1] - 1) for k in range(num_used)]


@pytest.mark.parametrize("fps", [7.5, 24000 / 1001, 25, 30000 / 1001, 59.94])
def test_times_are_of_the_published_frames(fps: float) -> None:
    for length in (*range(1, 40), 299, 1000, 54001):
        for count in (1, 4, 8, 16):
            parts = published(count, length)
            padding = [parts[-1]] * (count - len(parts))
            expected = [(start + stop) // 2 for start, stop in parts + padding]
            times = sample_frame_times(length / fps, fps, count)
            assert [round(time * fps) for time in times] == expected
            latest = compute_latest_times(length / fps, fps, count)
            assert [round(time * fps) for time in latest] == [stop for _, stop in parts + padding]


def test_each_frame_of_a_part_is_as_likely() -> None:
    draws = [sample_frame_times(23 / 5, 5, 4, generator=seed(k)) for k in range(2000)]
    indices = np.array([[round(time * 5) for time in draw] for draw in draws])
    for column, (start, stop) in zip(indices.T, published(4, 23), strict=True):
        numbers, counts = np.unique(column, return_counts=True)
        assert numbers.tolist() == list(range(start, stop + 1))
        assert counts == pytest.approx(2000 / len(numbers), rel=0.2)
    assert len({tuple(draw) for draw in draws}) > 500  # parts are drawn apart
    assert draws[0] == sample_frame_times(23 / 5, 5, 4, generator=seed(0))


def test_a_part_of_the_clip() -> None:
    assert sample_frame_times(10, 10, 4, start=2, end=6) == (2.4, 3.4, 4.4, 5.4)
    assert sample_frame_times(10, 10, 2, start=8) == sample_frame_times(10, 10, 2, start=8, end=99)
    assert sample_frame_times(10, 10, 2, start=8) == (8.4, 9.4)
    assert sample_frame_times(10, 10, 2, end=0.01) == (0, 0)
    with pytest.raises(ClipError, match="nothing lies between 12 s and 10 s of it; it is 10 s"):
        sample_frame_times(10, 10, 2, start=12, end=14)


def corners(path: Path) -> Path:
    """Red, green over blue, white; wider than high."""
    pixels = np.zeros((41, 83, 3), np.uint8)
    pixels[:20, :41, 0] = pixels[:20, 41:, 1] = pixels[20:, :41, 2] = 255
    pixels[20:, 41:] = 255
    Image.fromarray(pixels).save(path)
    return path


def test_fits_and_boxes(tmp_path: Path) -> None:
    media = MediaFile(corners(tmp_path / "a.png"))
    options: dict[str, Any] = {"height": 21, "width": 35}
    stretched_frames = read_frames_at(media, (), fit="stretch", **options)
    assert stretched_frames.shape == (1, 3, 21, 35)
    expected = Image.open(media.path).resize((35, 21), Image.Resampling.BICUBIC)
    assert np.array_equal(stretched_frames[0].permute(1, 2, 0), np.asarray(expected))
    covering_frames = read_frames_at(media, (), fit="cover", **options)
    assert torch.equal(covering_frames, read_frames(media, frames=1, fps=None, **options))
    assert not torch.equal(covering_frames, stretched_frames)
    blue = read_frames_at(media, (), fit="stretch", box=CropBox(0.55, 0.1, 0.4, 0.3), **options)
    assert torch.equal(blue, torch.tensor([0, 0, 255]).view(1, 3, 1, 1).expand(1, 3, 21, 35))
    right_half = read_frames_at(media, (), fit="cover", box=CropBox(0, 0.5, 1, 0.5), **options)
    assert right_half[0, :, 0, 0].tolist() == right_half[0, :, 0, -1].tolist() == [0, 255, 0]
    assert right_half[0, :, -1, 0].tolist() == [255, 255, 255]
    point = read_frames_at(media, (), fit="stretch", box=CropBox(1.0, 1.0, 1e-9, 1e-9), **options)
    assert point.min() == 255
    full_picture = read_frames_at(media, (), fit="stretch", box=CropBox(0, 0, 1, 1), **options)
    assert torch.equal(full_picture, stretched_frames)


def test_a_box_is_of_the_picture_as_shown(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    rotated_file = tmp_path / "b.png"
    Image.open(corners(tmp_path / "a.png")).save(rotated_file, exif=exif)
    box = CropBox(0, 0, 0.4, 0.4)
    first_frame = read_frames_at(MediaFile(rotated_file), (), height=8, width=8, fit="stretch", box=box)
    assert first_frame.min() == 255  # white, stored at the lower right


def test_all_frames_have_the_same_box(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", even(40))
    media, box = MediaFile(path), CropBox(0.5, 0.5, 0.5, 0.5)  # the digits from 4 on
    video = read_frames_at(media, [0.0, 0.6, 1.4], height=16, width=20, fit="stretch", box=box)
    assert [bool(frame[:, 8, 2].float().mean() > 127) for frame in video] == [False, False, False]
    assert (video[:, :, 8, 7].float().mean(1) > 127).tolist() == [False, False, True]


@pytest.mark.parametrize(("least", "aspect"), [(0.5, 1.0), (0.5, 16 / 9), (0.08, 9 / 16)])
def test_a_random_box_keeps_the_published_rule(least: float, aspect: float) -> None:
    """Area uniform, ratio uniform in its logarithm, before those that do not fit are drawn anew."""
    generator = seed(0)
    boxes = np.array([sample_random_box(generator, least, aspect) for _ in range(3000)])
    assert boxes.min() >= 0
    boxes = boxes[(boxes[:, 2:] < 1).all(1)]  # the others are those that no draw fitted in
    assert len(boxes) > 2500
    top, x, height, width = boxes.T
    assert (top + height).max() <= 1 + 1e-9
    assert (x + width).max() <= 1 + 1e-9
    area, ratio = height * width, width * aspect / height
    assert least <= area.min() < least + 0.02
    assert 3 / 4 - 1e-9 <= ratio.min() < ratio.max() <= 4 / 3 + 1e-9
    # The same by rejection, of many draws at once.
    rng = np.random.default_rng(1)
    share = rng.uniform(least, 1, 200_000)
    ratios = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), 200_000))
    fits = (share * ratios / aspect <= 1) & (share * aspect / ratios <= 1)
    for actual, published_values in ((area, share[fits]), (np.log(ratio), np.log(ratios[fits]))):
        for part in (0.1, 0.25, 0.5, 0.75, 0.9):
            assert np.quantile(actual, part) == pytest.approx(np.quantile(published_values, part), abs=0.02)
    for offset, max_offset in ((top, 1 - height), (x, 1 - width)):
        assert np.mean(offset / max_offset) == pytest.approx(0.5, abs=0.02)
        assert np.std(offset / max_offset) == pytest.approx(math.sqrt(1 / 12), abs=0.02)


@pytest.mark.parametrize(("aspect", "height", "width"), [(3, 1, 4 / 9), (1 / 3, 4 / 9, 1)])
def test_where_no_box_fits_it_is_the_largest_in_the_middle(aspect: float, height: float, width: float) -> None:
    expected = CropBox((1 - height) / 2, (1 - width) / 2, height, width)
    assert sample_random_box(seed(0), 1.0, aspect) == pytest.approx(expected)
    assert sample_random_box(seed(0), 1.0) == CropBox(0, 0, 1, 1)
