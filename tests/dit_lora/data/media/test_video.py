"""Frames by time stamp, aspect kept, errors that name the file."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dit_lora.data.media.video import (
    ClipError,
    explain_missing_frames,
    read_frames,
    read_header,
    write_sample,
    write_video,
)


def numbered(path: Path, times_ms: list[int], height: int = 32, width: int = 48) -> Path:
    """A lossless clip whose k-th frame is grey level 8 * k, shown at the given milliseconds."""
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for k, time in enumerate(times_ms):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 8 * k, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels(video: torch.Tensor) -> list[int]:
    return [round(frame.float().mean().item() / 8) for frame in video]


def test_30_fps_is_resampled_to_8_by_the_nearest_frame(tmp_path: Path) -> None:
    times = [round(k * 1000 / 30) for k in range(30)]
    path = numbered(tmp_path / "a.mp4", times)
    video = read_frames(path, frames=7, height=32, width=48, fps=8)
    nearest = [int(np.argmin([abs(t - 125 * k) for t in times])) for k in range(7)]
    assert levels(video) == nearest == [0, 4, 7, 11, 15, 19, 22]


def test_a_variable_frame_rate_is_read_by_its_time_stamps(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.mp4", [0, 40, 400, 480, 1000, 1040])
    video = read_frames(path, frames=5, height=32, width=48, fps=4)
    assert levels(video) == [0, 2, 3, 4, 4]  # 0, 250, 500, 750, 1000 ms


def test_a_clip_that_starts_late_counts_from_its_first_frame(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.mkv", [500, 625, 750, 875])
    assert levels(read_frames(path, frames=4, height=32, width=48, fps=8)) == [0, 1, 2, 3]


def test_the_last_frame_serves_for_its_own_time_but_no_longer(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.mp4", [0, 125, 250, 375])
    read_frames(path, frames=4, height=32, width=48, fps=8)
    with pytest.raises(ClipError, match=r"a\.mp4: too short: 5 frames at 8 fps .* it has at most 4"):
        read_frames(path, frames=5, height=32, width=48, fps=8)
    header = read_header(path)
    assert explain_missing_frames(header, frames=4, fps=8) is None
    assert "at most 4" in (explain_missing_frames(header, frames=6, fps=8) or "")


@pytest.mark.parametrize(("height", "width"), [(64, 32), (32, 64), (48, 48)])
def test_the_aspect_is_kept_and_the_centre_is_cropped(tmp_path: Path, height: int, width: int) -> None:
    """A disc in the middle stays a disc in the middle."""
    y, x = np.mgrid[:96, :144]
    disc = ((y - 47.5) ** 2 + (x - 71.5) ** 2 < 20**2)[..., None] * np.full(3, 255, np.uint8)
    write_video(tmp_path / "a.mp4", torch.from_numpy(np.repeat(disc[None], 3, 0)), 8)
    frame = read_frames(tmp_path / "a.mp4", frames=3, height=height, width=width, fps=8)[0]
    rows, columns = torch.where(frame.float().mean(0) > 127)
    assert abs((rows.max() - rows.min()) - (columns.max() - columns.min())) <= 1
    assert abs(rows.float().mean() - (height - 1) / 2) < 0.6
    assert abs(columns.float().mean() - (width - 1) / 2) < 0.6


def coloured(height: int = 64, width: int = 96) -> torch.Tensor:
    """Three frames: red, with a blue top-left quarter."""
    video = torch.zeros(3, height, width, 3, dtype=torch.uint8)
    video[..., 0] = 230
    video[:, : height // 2, : width // 2] = torch.tensor([20, 20, 230], dtype=torch.uint8)
    return video


def test_colours_keep_their_channels(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", coloured(), 8)
    frame = read_frames(tmp_path / "a.mp4", frames=3, height=64, width=96, fps=8)[0].float()
    red, blue = frame[:, 40:, 60:].mean((1, 2)), frame[:, :24, :40].mean((1, 2))
    assert red[0] > 200 > 60 > red[2]
    assert blue[2] > 200 > 60 > blue[0]


@pytest.mark.parametrize(("width", "tag"), [(1280, 1), (96, 5)])
def test_written_colours_are_tagged_with_the_matrix_that_players_assume(tmp_path: Path, width: int, tag: int) -> None:
    """The tags 1 and 5 are BT.709 and BT.601 (ITU-T H.273); 219 levels of luma of pure green are 0.7152 or 0.587."""
    green = torch.tensor([0, 255, 0], dtype=torch.uint8).expand(2, 64, width, 3)
    write_video(tmp_path / "a.mp4", green, 8)
    with av.open(tmp_path / "a.mp4") as container:
        frame = next(container.decode(video=0))
    assert (frame.colorspace, frame.color_range) == (tag, 1)
    luma = frame.to_ndarray()[:64].mean()
    assert luma == pytest.approx(16 + 219 * {1: 0.7152, 5: 0.587}[tag], abs=1.5)


def remux_turned(path: Path, turned: Path, degrees: int) -> None:
    """The same packets with a rotation flag."""
    with av.open(path) as source, av.open(turned, "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)


@pytest.mark.parametrize(("degrees", "corner"), [(90, "bottom left"), (180, "bottom right"), (270, "top right")])
def test_a_rotation_flag_is_honoured(tmp_path: Path, degrees: int, corner: str) -> None:
    """The flag says how far to turn the stored picture, counter-clockwise; the blue corner moves."""
    path, rotated_file = tmp_path / "a.mp4", tmp_path / "b.mp4"
    write_video(path, coloured(), 8)
    remux_turned(path, rotated_file, degrees)
    height, width = (96, 64) if degrees % 180 else (64, 96)
    frame = read_frames(rotated_file, frames=3, height=height, width=width, fps=8)[0].float()
    vertical, horizontal = corner.split()
    rows = slice(0, 20) if vertical == "top" else slice(height - 20, height)
    columns = slice(0, 20) if horizontal == "left" else slice(width - 20, width)
    assert frame[2, rows, columns].mean() > 200
    assert frame[0, rows, columns].mean() < 60


def test_pixels_that_are_not_square_are_stretched_to_what_a_player_shows(tmp_path: Path) -> None:
    """A 48x32 picture of pixels twice as wide as high is 96x32."""
    y, x = np.mgrid[:32, :48]
    disc = ((y - 15.5) ** 2 + (2 * (x - 23.5)) ** 2 < 12**2)[..., None] * np.full(3, 255, np.uint8)
    with av.open(tmp_path / "a.mp4", "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "5"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv444p"
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(disc, format="rgb24")))
        container.mux(stream.encode())
    remux_turned(tmp_path / "a.mp4", tmp_path / "b.mp4", 90)
    for name, height, width in (("a.mp4", 32, 96), ("b.mp4", 96, 32)):
        frame = read_frames(tmp_path / name, frames=3, height=height, width=width, fps=8)[0]
        rows, columns = torch.where(frame.float().mean(0) > 127)
        assert abs((rows.max() - rows.min()) - (columns.max() - columns.min())) <= 2
        assert rows.max() - rows.min() > 20


def test_shrinking_averages_and_does_not_pick(tmp_path: Path) -> None:
    """A fine checkerboard becomes grey."""
    y, x = np.mgrid[:128, :192]
    board = ((y + x) % 2 * 255).astype(np.uint8)[None, ..., None]
    write_video(tmp_path / "a.mp4", torch.from_numpy(np.tile(board, (3, 1, 1, 3))), 8)
    frame = read_frames(tmp_path / "a.mp4", frames=3, height=32, width=48, fps=8)[0].float()
    assert frame.std() < 20
    assert abs(frame.mean() - 127) < 20


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    ramp = torch.linspace(0, 255, 48).view(1, 1, 48, 1).expand(5, 32, 48, 3)
    video = (ramp + torch.arange(5).view(5, 1, 1, 1)).clip(0, 255).to(torch.uint8)
    write_video(tmp_path / "deep" / "a.mp4", video, 8)
    read_video = read_frames(tmp_path / "deep" / "a.mp4", frames=5, height=32, width=48, fps=8)
    assert (read_video.permute(0, 2, 3, 1).int() - video.int()).abs().float().mean() < 3
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.mp4"]


def test_equal_frames_give_equal_files(tmp_path: Path) -> None:
    video = torch.randint(0, 256, (9, 32, 48, 3), generator=torch.Generator().manual_seed(0))
    for k in range(5):
        write_video(tmp_path / f"{k}.mp4", video.to(torch.uint8), 8)
    assert len({(tmp_path / f"{k}.mp4").read_bytes() for k in range(5)}) == 1


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "empty.mp4").touch()
    expected = numbered(tmp_path / "a.mp4", [k * 125 for k in range(20)])
    (tmp_path / "cut.mp4").write_bytes(expected.read_bytes()[: expected.stat().st_size // 2])
    for name in ("text.mp4", "empty.mp4", "cut.mp4", "gone.mp4"):
        with pytest.raises(ClipError, match=name):
            read_header(tmp_path / name)
        with pytest.raises(ClipError, match=name):
            read_frames(tmp_path / name, frames=2, height=32, width=48, fps=8)


def test_a_file_with_sound_only_is_no_video(tmp_path: Path) -> None:
    with av.open(tmp_path / "sound.mp4", "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ClipError, match="no video stream"):
        read_header(tmp_path / "sound.mp4")


def test_an_image_is_one_frame_upright_and_cropped_at_the_centre(tmp_path: Path) -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 20:60, 0] = 200  # what a square crop keeps
    Image.fromarray(pixels).save(tmp_path / "a.png")
    frame = read_frames(tmp_path / "a.png", frames=1, height=40, width=40, fps=None)
    assert frame.shape == (1, 3, 40, 40)
    assert frame.dtype == torch.uint8
    assert (frame[0, 0, :, 1:-1] == 200).all()
    rotated_image = Image.fromarray(pixels[:, :60])
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    rotated_image.save(tmp_path / "b.jpg", exif=exif, quality=100, subsampling=0)
    upright = read_frames(tmp_path / "b.jpg", frames=1, height=60, width=40, fps=None)[0, 0].float()
    assert upright[:18].mean() < 10
    assert upright[22:].mean() > 190


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "I;16", "CMYK"])
def test_images_of_other_modes_become_rgb_with_white_behind(tmp_path: Path, mode: str) -> None:
    name = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    image = Image.new("I;16", (32, 32), 60000) if mode == "I;16" else Image.new(mode, (32, 32))
    if mode == "P":
        image.info["transparency"] = 0
    image.save(name)
    frame = read_frames(name, frames=1, height=32, width=32, fps=None)
    expected = {"L": 0, "I;16": 233}.get(mode, 255)
    assert frame.float().mean().item() == expected


def test_an_image_is_too_short_for_a_clip_and_a_clip_gives_its_first_frame(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    with pytest.raises(ClipError, match="too short"):
        read_frames(tmp_path / "a.png", frames=5, height=32, width=32, fps=8)
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ClipError, match=r"b\.png: cannot be decoded"):
        read_frames(tmp_path / "b.png", frames=1, height=32, width=32, fps=None)
    clip = numbered(tmp_path / "c.mp4", [0, 125, 250])
    assert levels(read_frames(clip, frames=1, height=32, width=48, fps=None)) == [0]


def test_one_frame_is_written_as_png_and_more_as_mp4(tmp_path: Path) -> None:
    video = torch.randint(0, 256, (3, 32, 48, 3), generator=torch.Generator().manual_seed(0))
    pixels = video.to(torch.uint8)
    image = write_sample(tmp_path / "new" / "a.b", pixels[:1], None)
    assert image.name == "a.b.png"
    read_image = read_frames(image, frames=1, height=32, width=48, fps=None)
    assert torch.equal(read_image[0].permute(1, 2, 0), pixels[0])
    assert write_sample(tmp_path / "new" / "c", pixels[:2], 8).name == "c.mp4"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.b.png", "c.mp4"]
