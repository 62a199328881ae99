"""Sound of a clip: the span of its frames, at a model's rate and channels, whatever the file has."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sound_files import FPS, Tones, pitch, write_clip

from dit_lora.data.media import clip_sound
from dit_lora.data.media.clip_sound import close_sound, find_sound_problem, read_sound
from dit_lora.data.media.media import MediaFile, TarMember
from dit_lora.data.media.sound import Sound, SoundFormat
from dit_lora.data.media.sound_stream import iter_audio_frames
from dit_lora.data.media.video import ClipError, read_header, write_video
from dit_lora.data.synthetic.tones import SAMPLE_RATE, make_tone

WANTED = SoundFormat(16_000, 2)


def read(path: Path, how: SoundFormat = WANTED, *, frames: int = 8, start: float = 0.0) -> np.ndarray:
    sound = read_sound(MediaFile(path), how, frames=frames, fps=FPS, start=start)
    assert sound.dtype is torch.float32
    assert sound.shape == (how.channels, round(frames / FPS * how.rate))
    assert sound.abs().max() <= 1
    return sound.numpy()


@pytest.mark.parametrize(
    ("name", "tones"),
    [
        ("a.mov", Tones()),
        ("a.mov", Tones(rate=16_000)),
        ("a.mp4", Tones(codec="aac", rate=48_000)),
        ("a.mkv", Tones(codec="libopus", rate=48_000)),
        ("a.mkv", Tones(codec="flac", rate=22_050)),
        ("a.avi", Tones(rate=8_000)),
    ],
)
def test_mono_is_given_twice_at_the_models_rate(tmp_path: Path, name: str, tones: Tones) -> None:
    channels = read(write_clip(tmp_path / name, tones))
    assert np.array_equal(channels[0], channels[1])
    assert pitch(channels[0], 16_000) == pytest.approx(440, abs=0.5)
    # In the middle, where no filter begins: the wave itself, sample for sample.
    time = np.arange(16_000) / 16_000
    middle = slice(4_000, 12_000)
    wave = 0.5 * np.sin(2 * np.pi * 440 * time)
    error = (channels[0] - wave)[middle]
    lossy = tones.codec in ("aac", "libopus")
    # A shift by one sample would be an error of 0.06 on average.
    assert np.sqrt((error**2).mean()) < 0.03
    assert lossy or np.abs(error).max() < 2e-3


def test_stereo_keeps_its_sides_and_is_averaged_for_one_channel(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mov", Tones(hertz=(300.0, 900.0), rate=48_000))
    left_channel, right_channel = read(path)
    assert pitch(left_channel, 16_000) == pytest.approx(300, abs=0.5)
    assert pitch(right_channel, 16_000) == pytest.approx(900, abs=0.5)
    (channel,) = read(path, SoundFormat(16_000, 1))
    np.testing.assert_allclose(channel, (left_channel + right_channel) / 2, atol=1e-6)


def test_six_channels_are_mixed_to_two_within_the_range(tmp_path: Path) -> None:
    loud = Tones(hertz=(300.0,) * 6, rate=48_000, loud=1.0, codec="flac")
    left_channel, right_channel = read(write_clip(tmp_path / "a.mkv", loud))
    assert pitch(left_channel, 16_000) == pytest.approx(300, abs=0.5)
    middle = slice(4_000, 12_000)
    # Scaled, and not cut off at the full level.
    assert 0.5 < np.abs(left_channel[middle]).max() <= 1
    assert (np.abs(left_channel[middle]) > 0.999).mean() < 0.05
    np.testing.assert_allclose(left_channel, right_channel, atol=1e-4)


@pytest.mark.parametrize("name", ["a.mov", "a.mkv"])
def test_a_window_has_the_sound_of_its_own_time(tmp_path: Path, name: str) -> None:
    """A tone that begins at 1 s is heard from half of the window on that begins at 0.5 s, to the sample."""
    path = write_clip(tmp_path / name, Tones(silent_until=1.0, rate=48_000))
    channels = read(path, start=0.5)
    loud_positions = np.flatnonzero(np.abs(channels[0]) > 0.05)
    assert abs(loud_positions[0] - 8_000) <= 16  # Matroska's times are of 1 ms
    full_sound = read(path, frames=16)
    np.testing.assert_allclose(channels, full_sound[:, 8_000:24_000], atol=2e-3)


def test_sound_that_begins_after_the_pictures_is_silent_until_then(tmp_path: Path) -> None:
    channels = read(write_clip(tmp_path / "a.mov", Tones(offset=0.5, seconds=1.5)))
    assert not channels[:, :7_990].any()
    assert np.abs(channels[:, 8_000:8_100]).max() > 0.3


def test_pictures_that_begin_after_the_sound_are_not_shifted(tmp_path: Path) -> None:
    """The first picture is at 0.5 s, so that its sound is what is heard from 0.5 s on."""
    tones = Tones(silent_until=1.0, seconds=2.5)
    channels = read(write_clip(tmp_path / "a.mkv", tones, shown_at=0.5))
    loud_positions = np.flatnonzero(np.abs(channels[0]) > 0.05)
    assert abs(loud_positions[0] - 8_000) <= 16


def test_a_gap_is_silence_and_what_follows_stays_in_its_place(tmp_path: Path) -> None:
    full_sound = read(write_clip(tmp_path / "a.mkv", Tones()))
    channels = read(write_clip(tmp_path / "b.mkv", Tones(gap=(0.3, 0.6))))
    assert not channels[:, 5_100:9_500].any()
    np.testing.assert_allclose(channels[:, 9_800:], full_sound[:, 9_800:], atol=2e-3)


def test_sound_a_little_short_is_silent_there_and_shorter_is_refused(tmp_path: Path) -> None:
    """Sound that lasts until a tenth of a second before the last frame begins is enough."""
    channels = read(write_clip(tmp_path / "a.mov", Tones(seconds=0.79)))
    assert not channels[:, 12_700:].any()
    assert channels[:, 12_000:12_600].any()
    path = write_clip(tmp_path / "b.mov", Tones(seconds=0.5))
    message = r"b\.mov: sound_too_short: its sound ends at 0\.50 s and the last of its 8 frames is at 0\.88 s"
    with pytest.raises(ClipError, match=message):
        read(path)
    read(path, frames=4)
    assert "0.50 s" not in (find_sound_problem(read_header(path), frames=4, fps=FPS) or "")
    problem = find_sound_problem(read_header(path), frames=8, fps=FPS)
    assert problem is not None
    assert problem.startswith("sound_too_short")


def test_a_clip_or_picture_without_sound_is_refused_by_name(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4")
    with pytest.raises(ClipError, match=r"a\.mp4: no_sound: it has no sound, and data\.sound"):
        read(path)
    header = read_header(path)
    assert not header.has_sound
    assert (find_sound_problem(header, frames=8, fps=FPS) or "").startswith("no_sound")
    Image.new("RGB", (48, 32)).save(tmp_path / "a.png")
    with pytest.raises(ClipError, match=r"a\.png: no_sound: it is a picture"):
        read(tmp_path / "a.png")


def test_a_header_says_when_sound_ends(tmp_path: Path) -> None:
    late_tones = Tones(offset=0.5, seconds=1.0)
    header = read_header(write_clip(tmp_path / "a.mov", late_tones))
    assert header.has_sound
    assert header.sound_ends == pytest.approx(1.5, abs=0.01)
    assert read_header(write_clip(tmp_path / "a.mkv", late_tones)).sound_ends is None


def test_sound_in_a_tar_is_that_of_the_file(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mov", Tones())
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(path, "a.mov")
    with tarfile.open(tmp_path / "a.tar") as tar:
        (info,) = tar.getmembers()
    member = TarMember(tmp_path / "a.tar", "a.mov", info.offset_data, info.size)
    decoded_sound = read_sound(member, WANTED, frames=8, fps=FPS)
    assert np.array_equal(decoded_sound.numpy(), read(path))


def test_a_file_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", Tones(codec="flac"))
    path.write_bytes(io.BytesIO(path.read_bytes()).read(300))
    with pytest.raises(ClipError, match=r"a\.mkv: "):
        read(path)


def test_a_video_is_written_with_sound_that_reads_back(tmp_path: Path) -> None:
    """In step with the pictures, by AAC; equal input gives equal bytes, and without sound what it was before."""
    video = torch.randint(0, 255, (9, 32, 48, 3), dtype=torch.uint8)
    time = torch.arange(27_000) / 24_000
    wave = 0.5 * torch.sin(2 * torch.pi * 500 * time) * (time >= 0.5)
    sound = Sound(torch.stack([wave, wave / 2]), 24_000)
    for name, waveform in (("a", sound), ("b", sound), ("c", None)):
        write_video(tmp_path / f"{name}.mp4", video, 8, waveform)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert not read_header(tmp_path / "c.mp4").has_sound
    left_channel, right_channel = read(tmp_path / "a.mp4")
    assert pitch(left_channel, 16_000) == pytest.approx(500, abs=1)
    loud_positions = np.flatnonzero(np.abs(left_channel) > 0.1)
    assert abs(loud_positions[0] - 8_000) < 100
    assert np.abs(left_channel).max() == pytest.approx(2 * np.abs(right_channel).max(), rel=0.1)
    mono = Sound(wave[None], 24_000)
    write_video(tmp_path / "one.mp4", video, 8, mono)
    assert read_header(tmp_path / "one.mp4").has_sound


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of frames that are decoded from here on."""
    times: list[float] = []

    def counted(container: Any) -> Iterator[Any]:
        for frame in iter_audio_frames(container):
            times.append(frame.time)
            yield frame

    monkeypatch.setattr(clip_sound, "iter_audio_frames", counted)
    return times


@pytest.mark.parametrize(
    ("name", "codec", "gap"),
    [
        ("a.mp4", "aac", None),
        ("a.mkv", "libopus", None),
        ("a.mkv", "libmp3lame", None),
        ("a.mov", "pcm_s16le", None),
        ("a.mkv", "pcm_s16le", (1.4, 1.9)),
    ],
)
def test_windows_of_a_clip_are_decoded_once_and_are_those_of_the_files_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    codec: str,
    gap: tuple[float, float] | None,
) -> None:
    """To the last bit: overlapping, one after the other, over a gap, again, and back to an earlier one."""
    tones = Tones((300.0, 900.0), codec, 48_000, seconds=6.0, gap=gap)
    path = write_clip(tmp_path / name, tones, frames=48)
    starts = [0.0, 0.25, 1.25, 1.25, 2.25, 2.3125, 4.5]
    expected = []
    for start in starts:
        close_sound()
        expected.append(read(path, start=start))
    close_sound()
    times = decoded(monkeypatch)
    for start, expected_sound in zip(starts, expected, strict=True):
        assert np.array_equal(read(path, start=start), expected_sound), start
    assert len(set(times)) == len(times) > 100
    assert np.array_equal(read(path, start=1.25), expected[2])
    assert len(set(times)) < len(times)


def test_a_clip_that_is_open_is_not_taken_for_another(tmp_path: Path) -> None:
    low, high = Tones((300.0,), seconds=3.0), Tones((900.0,), seconds=3.0)
    low_clip, high_clip = write_clip(tmp_path / "a.mov", low), write_clip(tmp_path / "b.mov", high)
    assert pitch(read(low_clip)[0], 16_000) == pytest.approx(300, abs=1)
    assert pitch(read(high_clip, start=0.5)[0], 16_000) == pytest.approx(900, abs=1)
    read(low_clip)
    write_clip(low_clip, Tones((600.0,), seconds=3.5))  # another file in its place
    assert pitch(read(low_clip, start=0.5)[0], 16_000) == pytest.approx(600, abs=1)


def test_damage_is_found_again_by_the_next_window(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", Tones(codec="flac", seconds=6.0), frames=48)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    read(path)
    for start in (4.5, 4.75):
        with pytest.raises(ClipError, match="sound_too_short"):
            read(path, start=start)


@pytest.mark.parametrize("shape", ["disc", "square"])
def test_the_tone_of_a_shape_goes_with_its_movement(shape: str) -> None:
    rising, falling = make_tone(shape, True, 2.0), make_tone(shape, False, 2.0)
    assert rising.waveform.shape == (2, 2 * SAMPLE_RATE)
    pitches = {
        name: [
            pitch(sound.waveform.sum(0)[piece].numpy(), SAMPLE_RATE) for piece in (slice(0, 4410), slice(-4410, None))
        ]
        for name, sound in (("up", rising), ("down", falling))
    }
    first_pitch, last_pitch = pitches["up"]
    # From 220 Hz to two octaves above, measured over the first and the last tenth of a second.
    assert first_pitch == pytest.approx(220 * 4**0.025, rel=0.02)
    assert last_pitch == pytest.approx(220 * 4**0.975, rel=0.02)
    assert pitches["down"] == pytest.approx([last_pitch, first_pitch], rel=0.01)
    assert rising.waveform[0, :4410].abs().max() > 5 * rising.waveform[1, :4410].abs().max()
