"""Clips whose files are sound and whose pictures are not: black, frozen, cut, faint, or there twice."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dit_lora.faults.media.encode import FRAMES, Video, encode, flat, moving
from dit_lora.faults.media.kind import media_kind


def _of(picture: Callable[[str], Video], **how: Any) -> Callable[[Path], None]:
    return lambda path: encode(path, picture(path.stem), **how)


def _first_half_only(name: str) -> Video:
    video = moving(name)
    video[FRAMES // 2 :] = video[FRAMES // 2]
    return video


def _half_black(name: str) -> Video:
    video = moving(name)
    video[FRAMES // 2 :] = 0
    return video


def _faint_noise(name: str) -> Video:
    """Return grey levels of 126 to 130."""
    return np.random.default_rng(0).integers(126, 131, flat(0).shape, np.uint8)


def _two_scenes(name: str) -> Video:
    return np.concatenate(
        [moving(name, FRAMES // 2) // 3, 255 - moving("another", FRAMES // 2) // 3]
    )


def _greyish(name: str) -> Video:
    """Return a picture that moves well between 100 and 163."""
    return moving(name) // 4 + 100


def _still(name: str) -> Video:
    return np.repeat(moving(name, 1), FRAMES, axis=0)


def _near_copy(path: Path) -> None:
    """Encode what the good clip shows anew, at a worse quality."""
    encode(path, moving("good"), options={"crf": "30"})


def _copy(path: Path) -> None:
    """Copy the good clip's bytes."""
    shutil.copy(path.with_name("good.mp4"), path)


KINDS = (
    media_kind("frozen", "still.mp4", _of(_still), "warn", "frozen"),
    media_kind("half frozen", "stops.mp4", _of(_first_half_only), "warn", "frozen"),
    media_kind("all black", "black.mp4", _of(lambda name: flat(0)), "reject", "black"),
    media_kind("half black", "fades.mp4", _of(_half_black), "warn", "black_frames"),
    media_kind("one grey", "grey.mp4", _of(lambda name: flat(128)), "reject", "constant"),
    media_kind(
        "faint noise", "noise.mp4", _of(_faint_noise, options={"crf": "1"}), "warn", "near_constant"
    ),
    media_kind("a hard cut", "scenes.mp4", _of(_two_scenes), "warn", "hard_cut"),
    media_kind("a part of the levels", "dull.mp4", _of(_greyish), "warn", "low_range"),
    media_kind(
        "the same file twice",
        "same.mp4",
        _copy,
        "warn",
        "duplicate_clip",
    ),
    media_kind("the same clip encoded anew", "near.mp4", _near_copy, "warn", "near_duplicate_clip"),
)
