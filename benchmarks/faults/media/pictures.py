"""Clips whose files are sound and whose pictures are not: black, frozen, cut, faint, or there twice."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.media.encode import FRAMES, Video, encode, flat, moving
from benchmarks.faults.media.kind import rejected, warned


def _encoded(picture: Callable[[str], Video], **options: Any) -> Callable[[Path], None]:
    return lambda path: encode(path, picture(path.stem), **options)


def _first_half_only(name: str) -> Video:
    video = moving(name)
    video[FRAMES // 2 :] = video[FRAMES // 2]
    return video


def _half_black(name: str) -> Video:
    video = moving(name)
    video[FRAMES // 2 :] = 0
    return video


def _faint_noise(name: str) -> Video:
    """Noise with grey levels from 126 to 130."""
    return np.random.default_rng(0).integers(126, 131, flat(0).shape, np.uint8)


def _two_scenes(name: str) -> Video:
    return np.concatenate([moving(name, FRAMES // 2) // 3, 255 - moving("another", FRAMES // 2) // 3])


def _greyish(name: str) -> Video:
    """A moving picture with values from 100 to 163."""
    return moving(name) // 4 + 100


def _still(name: str) -> Video:
    return np.repeat(moving(name, 1), FRAMES, axis=0)


def _near_copy(path: Path) -> None:
    """Encode the good clip's picture again, at a lower quality."""
    encode(path, moving("good"), options={"crf": "30"})


def _copy(path: Path) -> None:
    """Copy the good clip's bytes."""
    shutil.copy(path.with_name("good.mp4"), path)


KINDS = (
    warned("frozen", "still.mp4", _encoded(_still), "frozen"),
    warned("half frozen", "stops.mp4", _encoded(_first_half_only), "frozen"),
    rejected("all black", "black.mp4", _encoded(lambda name: flat(0)), "black"),
    warned("half black", "fades.mp4", _encoded(_half_black), "black_frames"),
    rejected("one grey", "grey.mp4", _encoded(lambda name: flat(128)), "constant"),
    warned("faint noise", "noise.mp4", _encoded(_faint_noise, options={"crf": "1"}), "near_constant"),
    warned("a hard cut", "scenes.mp4", _encoded(_two_scenes), "hard_cut"),
    warned("a part of the levels", "dull.mp4", _encoded(_greyish), "low_range"),
    warned("the same file twice", "same.mp4", _copy, "duplicate_clip"),
    warned("the same clip encoded anew", "near.mp4", _near_copy, "near_duplicate_clip"),
)
