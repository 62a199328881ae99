"""Sound beside a written video: what is read back, whatever the channels, and the same bytes twice."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from dit_lora.data.media.sound import Sound, find_sound_fault
from dit_lora.data.media.video import write_sample, write_video
from dit_lora.errors import DitLoraError

RATE, SECONDS = 24_000, 0.75


def tones(*hertz: int) -> Sound:
    """One tone a channel, of loudnesses that differ."""
    seconds = torch.arange(round(RATE * SECONDS)) / RATE
    loud = [0.8 / (1 + n) * torch.sin(2 * torch.pi * f * seconds) for n, f in enumerate(hertz)]
    return Sound(torch.stack(loud), RATE)


def video() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (6, 32, 48, 3), dtype=torch.uint8, generator=generator)


def read(path: Path) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """The waveform, its rate, and the video's frames."""
    with av.open(path) as container:
        pieces = [frame.to_ndarray() for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    with av.open(path) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.concatenate(pieces, axis=1), rate, frames


@pytest.mark.parametrize("hertz", [(500, 1300), (900,)])
def test_sound_is_read_back_channel_by_channel(hertz: tuple[int, ...], tmp_path: Path) -> None:
    sound = tones(*hertz)
    write_video(tmp_path / "a.mp4", video(), 8, sound)
    waveform, rate, frames = read(tmp_path / "a.mp4")
    assert (rate, len(waveform)) == (RATE, len(hertz))
    assert waveform.shape[1] == pytest.approx(RATE * SECONDS, abs=2048)
    for channel, expected in zip(waveform, sound.waveform.numpy(), strict=True):
        length = min(len(channel), len(expected)) - 1000
        distance = np.linalg.norm(channel[1000:length] - expected[1000:length])
        assert distance < 0.05 * np.linalg.norm(expected[1000:length])
    write_video(tmp_path / "silent.mp4", video(), 8)
    with av.open(tmp_path / "silent.mp4") as container:
        silent = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert not container.streams.audio
    assert len(frames) == 6
    assert all(np.array_equal(*pair) for pair in zip(frames, silent, strict=True))


def test_equal_sound_gives_equal_bytes_and_a_louder_one_is_cut(tmp_path: Path) -> None:
    sound = tones(500, 1300)
    loud = Sound(10 * sound.waveform, RATE)
    clamped = Sound(loud.waveform.clamp(-1, 1), RATE)
    a, b, c, d = (
        write_sample(tmp_path / str(number), video(), 8, tone).read_bytes()
        for number, tone in enumerate((sound, sound, loud, clamped))
    )
    assert a == b
    assert a != c == d


def test_sound_that_is_not_finite_is_named_and_nothing_written(tmp_path: Path) -> None:
    """Silence in its place would hide it."""
    sound = tones(500)
    sound.waveform[0, 7] = torch.nan
    sound.waveform[0, 9] = torch.inf
    message = f"sound has 1 NaN and 1 Inf among {sound.waveform.numel()} values"
    assert find_sound_fault(sound) == message
    assert find_sound_fault(tones(500)) is find_sound_fault(None) is None
    with pytest.raises(DitLoraError, match=f"a.mp4: its {message}"):
        write_video(tmp_path / "a.mp4", video(), 8, sound)
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_without_its_sound(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "a", video()[:1], None, tones(500))
    assert path.name == "a.png"
