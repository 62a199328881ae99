"""What each smoke recipe of a diffusion family needs to run in a test."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from family_cases.case import as_it_is
from family_cases.qwen_image import small_references

from dit_lora.data.synthetic.clips import write_class_folders, write_shapes
from dit_lora.data.synthetic.pairs import write_edit_pairs


@dataclass(frozen=True)
class Smoke:
    """What a smoke recipe needs to run here and to be quick."""

    variant: str
    """The tiny checkpoint."""
    write_data: Callable[[Path], None] | None = None
    """Its data; None for the clips of moving shapes."""
    overrides: tuple[str, ...] = ()
    prompt: str = "a red disc"
    """Or a class's name."""
    pictures: tuple[str, ...] = ()
    """The pictures that its samples start from, as `validation` names them."""
    references: int = 0
    """Frames of the reference that its samples are made from; 0 for none."""
    prepare: Callable[[pytest.MonkeyPatch], None] = as_it_is
    """Makes it cheap."""


def class_folders(folder: Path) -> None:
    write_class_folders(folder, images=12, height=32, width=32)


def class_clips(folder: Path) -> None:
    write_class_folders(folder, images=6, height=32, width=48, frames=8)


def captioned_images(folder: Path) -> None:
    write_shapes(folder, clips=4, frames=1, height=64, width=96, fps=1)


def clips_with_sound(folder: Path) -> None:
    write_shapes(folder, clips=4, frames=17, height=64, width=96, fps=8, sound=True)


def edit_pairs(folder: Path) -> None:
    write_edit_pairs(folder, pairs=4, height=64, width=64)


def edit_clips(folder: Path) -> None:
    write_edit_pairs(folder, pairs=4, height=64, width=64, frames=9)


SMOKES = {
    "cogvideox": Smoke("cogvideox-5b"),
    "cogvideox_1.5": Smoke("cogvideox-1.5"),
    "cogvideox_i2v": Smoke(
        "cogvideox-5b-i2v",
        overrides=("data.image_dropout=0.5", "train.batch_size=1"),
        pictures=("images",),
    ),
    "dit": Smoke("dit-tiny", class_folders, ("data.flip=true",), prompt="red disc"),
    "dit_scratch": Smoke("dit-tiny", class_folders, prompt="blue square"),
    "flux": Smoke("flux-dev", captioned_images),
    "flux_kontext": Smoke("flux-kontext", edit_pairs, references=1),
    "flux2": Smoke("flux2-klein", captioned_images),
    "flux2_edit": Smoke("flux2-klein", edit_pairs, references=1),
    "krea2": Smoke("krea2-raw", captioned_images),
    "qwen_image": Smoke("qwen-image", captioned_images),
    "qwen_image_edit": Smoke("qwen-image-edit", edit_pairs, references=1, prepare=small_references),
    "ltx_video": Smoke("ltx-video-0.9.1"),
    "ltx_video_i2v": Smoke(
        "ltx-video", overrides=("data.image_dropout=0.5",), pictures=("images",)
    ),
    "ltx2": Smoke("ltx-2.3"),
    "ltx2_sound": Smoke("ltx-2.3", clips_with_sound),
    "ltx2_i2v": Smoke("ltx-2", overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "ltx2_i2v_sound": Smoke(
        "ltx-2", clips_with_sound, overrides=("data.image_dropout=0.5",), pictures=("images",)
    ),
    "ltx2_ic_lora": Smoke("ltx-2.3", edit_clips, references=9),
    "sana": Smoke("sana-fp16", captioned_images),
    "sana_video": Smoke("sana-video"),
    "sd3": Smoke("sd3.5-medium", captioned_images),
    "video_dit": Smoke("video-dit-class", class_clips, prompt="red disc"),
    "video_dit_lora": Smoke("video-dit-text", class_clips),
    "latte": Smoke("latte"),
    "wan": Smoke("wan-2.1-t2v"),
    "wan_i2v": Smoke("wan-2.1-i2v", pictures=("images",)),
    "wan_flf2v": Smoke("wan-2.1-flf2v", pictures=("images", "last_images")),
    "wan_2.2": Smoke("wan-2.2-t2v-a14b"),
    "wan_2.2_i2v": Smoke("wan-2.2-i2v-a14b", pictures=("images",)),
    "wan_5b": Smoke("wan-2.2-ti2v-5b"),
    "wan_5b_i2v": Smoke(
        "wan-2.2-ti2v-5b", overrides=("data.image_dropout=0.5",), pictures=("images",)
    ),
    "z_image": Smoke("z-image", captioned_images),
}
