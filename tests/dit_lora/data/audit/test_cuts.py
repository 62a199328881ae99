"""A cut is told from fast motion, flashes, repeated frames and changes of light; where one is, it is found."""

import numpy as np
import pytest
from PIL import Image

from dit_lora.data.audit.measure import SMALL_SIDE, PictureMeasures

FRAMES, EDGE = 48, 96


def texture(seed: int, deviation: float = 50.0, mean: float = 128.0) -> np.ndarray:
    """(200, 3000), its amplitudes falling with frequency as natural images' do."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(200)[:, None], np.fft.rfftfreq(3000)[None])
    frequency[0, 0] = 1.0
    waves = np.fft.irfft2(np.exp(2j * np.pi * random.random(frequency.shape)) / frequency**1.5, (200, 3000))
    return mean + deviation * (waves - waves.mean()) / waves.std()


SCENES = [texture(seed) for seed in range(4)]


def pan(scene: np.ndarray, steps: np.ndarray | float, frames: int = FRAMES) -> np.ndarray:
    """The camera moves by `steps` pixels a frame."""
    positions = np.cumsum(np.broadcast_to(np.asarray(steps, float), frames)).astype(int)
    return np.stack([scene[50 : 50 + EDGE, x : x + EDGE] for x in positions])


def cuts(video: np.ndarray) -> list[float]:
    """In frames."""
    pictures = PictureMeasures()
    video = video + np.random.default_rng(0).normal(0, 2, video.shape)
    grey = video.clip(0, 255).astype(np.uint8)
    for picture in grey:
        image = Image.fromarray(picture).convert("RGB")
        pictures.add(np.asarray(image.resize((SMALL_SIDE, SMALL_SIDE), Image.Resampling.BOX)))
    pictures.add_luma_levels(grey[0])
    scores: list[float] = pictures.compute_measurements(range(len(video) + 1))["cuts"]
    return scores


def at(frame: int, other: float, usual: float = 1.0) -> np.ndarray:
    values = np.full(FRAMES, usual)
    values[frame] = other
    return values


SLOW = pan(SCENES[0], 1)
MOMENTS = np.arange(FRAMES)[:, None, None]
NONE = {
    **{f"a pan of {step:g} pixels": pan(SCENES[0], step) for step in (0, 0.5, 5, 20, 60)},
    "a whip pan": pan(SCENES[1], np.where((MOMENTS.ravel() > 19) & (MOMENTS.ravel() < 24), 60, 1)),
    "a jerk": pan(SCENES[1], at(20, 25)),
    "a flash of one frame": np.where(MOMENTS == 20, 255.0, SLOW),
    "a flash of three frames": np.where((MOMENTS > 19) & (MOMENTS < 23), SLOW / 5 + 200, SLOW),
    "a flash that flickers": np.where((MOMENTS > 19) & (MOMENTS < 23), 225.0 + MOMENTS % 2 * 20, SLOW),
    "light that goes out by half": np.where(MOMENTS < 20, SLOW, SLOW / 2),
    "light that goes on": np.where(MOMENTS < 20, SLOW, SLOW + 60),
    "a strobe": np.where(MOMENTS % 6 < 3, SLOW, SLOW * 0.3),
    "noise": np.random.default_rng(1).uniform(0, 255, (FRAMES, EDGE, EDGE)),
    "three times each frame": np.repeat(pan(SCENES[2], 40, 16), 3, axis=0),
    "four times each frame": np.repeat(pan(SCENES[2], 12, 12), 4, axis=0),
    "lost frames": np.delete(pan(SCENES[2], 6), [10, 11, 20, 21, 22], axis=0),
    "a dissolve": SLOW + (pan(SCENES[3], 1) - SLOW) * np.clip((MOMENTS - 10) / 20, 0, 1),
    "a fade to black": SLOW * np.linspace(1, 0, FRAMES)[:, None, None],
}


@pytest.mark.parametrize("name", list(NONE))
def test_no_cut_is_seen_in(name: str) -> None:
    assert cuts(NONE[name]) == []


@pytest.mark.parametrize("frame", [1, 2, 24, 47])
@pytest.mark.parametrize("step", [0.0, 2.0, 10.0])
def test_a_cut_is_found(frame: int, step: float) -> None:
    video = np.concatenate([pan(SCENES[0], step, frame), pan(SCENES[3], step, FRAMES - frame)])
    assert cuts(video) == [frame]


def test_cuts_are_found_in_the_dark_between_like_layouts_and_one_after_another() -> None:
    dark = [pan(texture(seed, 10, 40), 1, 24) for seed in (5, 6)]
    assert cuts(np.concatenate(dark)) == [24]
    sky = np.linspace(60, -60, EDGE)[:, None]
    fields = [pan(texture(seed, 25), 1, 24) + sky for seed in (7, 8)]
    assert cuts(np.concatenate(fields)) == [24]
    scene_frames = [pan(scene, 2, 16) for scene in SCENES[:3]]
    assert cuts(np.concatenate(scene_frames)) == [16, 32]
