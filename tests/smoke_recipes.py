"""What each smoke recipe of a diffusion family needs to run in a test, and what other variants of their bases need."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.case import as_it_is
from family_cases.qwen_image import small_references
from launching import ROOT
from PIL import Image

from dit_lora.data.media.video import write_sample
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
    """Frames of the references that its samples are made from; 0 for none."""
    references_each: int = 1
    """How many of them a sample has."""
    prepare: Callable[[pytest.MonkeyPatch], None] = as_it_is
    """Makes it cheap."""
    recipe: str | None = None
    """The smoke recipe, where the name is not its own."""

    def write_pictures(self, folder: Path) -> dict[str, Path]:
        """Write what samples start from; files by their fields of `validation`."""
        images = {field: folder / f"{field}.png" for field in self.pictures}
        for image in images.values():
            Image.new("RGB", (120, 80), "navy").save(image)
        return images

    def write_references(self, folder: Path) -> tuple[Path, ...]:
        """Write what samples are made from, of several sizes; nothing where there is no such thing."""
        olive = torch.tensor([128, 128, 0]).byte()
        return tuple(
            write_sample(
                folder / f"reference_{number}",
                olive.expand(self.references, 80, 120 - 16 * number, 3),
                8,
            )
            for number in range(self.references_each if self.references else 0)
        )

    def sampled(self, images: dict[str, Path], references: tuple[Path, ...]) -> list[str]:
        """Return the overrides for one sample, in two steps."""
        value = f"[[{', '.join(map(str, references))}]]" if references else "[]"
        return [
            f"validation.prompts=[{self.prompt}]",
            *(f"validation.{field}=[{image}]" for field, image in images.items()),
            f"validation.references={value}",
            "validation.inference_steps=2",
        ]


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


def edit_pairs_of_two(folder: Path) -> None:
    """Give each pair its mask as a second reference, in which the places are seen that differ."""
    edit_pairs(folder)
    _change_rows(folder, lambda row: row["references"].append(row["mask"]))


def edit_clips_with_sound(folder: Path) -> None:
    """Give clips with sound a silent clip each as their reference: the one behind them."""
    write_shapes(folder / "before", clips=4, frames=17, height=64, width=96, fps=8)
    (folder / "before" / "metadata.jsonl").unlink()
    before = sorted((folder / "before").glob("*.mp4"))
    clips_with_sound(folder)
    shifted_rows = iter([*before[1:], before[0]])
    _change_rows(folder, lambda row: row.update(references=[f"before/{next(shifted_rows).name}"]))


def _change_rows(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    listing = folder / "metadata.jsonl"
    rows = [json.loads(line) for line in listing.read_text("utf-8").splitlines()]
    for row in rows:
        change(row)
    listing.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


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
    "ltx_video_i2v": Smoke("ltx-video", overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "ltx2": Smoke("ltx-2.3"),
    "ltx2_sound": Smoke("ltx-2.3", clips_with_sound),
    "ltx2_i2v": Smoke("ltx-2", overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "ltx2_i2v_sound": Smoke("ltx-2", clips_with_sound, overrides=("data.image_dropout=0.5",), pictures=("images",)),
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
    "wan_5b_i2v": Smoke("wan-2.2-ti2v-5b", overrides=("data.image_dropout=0.5",), pictures=("images",)),
    "z_image": Smoke("z-image", captioned_images),
}


MASKED = ("data.mask_column=mask", "data.mask_floor=0.2")


def _other(recipe: str, variant: str | None = None, *overrides: str, **changes: object) -> Smoke:
    """Return a smoke recipe's needs with another tiny checkpoint, and what else is changed."""
    smoke = SMOKES[recipe]
    return replace(
        smoke,
        recipe=recipe,
        variant=variant or smoke.variant,
        overrides=(*smoke.overrides, *overrides),
        **changes,  # type: ignore[arg-type]
    )


OTHERS = {
    "flux_kontext_masked": _other("flux_kontext", None, *MASKED),
    "flux2_dev_edit": _other("flux2_edit", "flux2-dev", *MASKED, write_data=edit_pairs_of_two),
    "qwen_image_edit_masked": _other("qwen_image_edit", None, *MASKED),
    "qwen_image_edit_plus": _other(
        "qwen_image_edit",
        "qwen-image-edit-plus",
        *MASKED,
        write_data=edit_pairs_of_two,
        references_each=2,
    ),
    "z_image_turbo": _other("z_image", "z-image-turbo"),
    "sd3_large": _other("sd3", "sd3.5-large"),
    "ltx_video_0.9": _other("ltx_video", "ltx-video"),
    "ltx2_first": _other("ltx2", "ltx-2"),
    "ltx2_first_sound": _other("ltx2_sound", "ltx-2"),
    "ltx2_i2v_sound": _other("ltx2_i2v", "ltx-2.3", "data.sound=true", write_data=clips_with_sound),
    "ltx2_ic_lora_sound": _other("ltx2_ic_lora", "ltx-2", "data.sound=true", write_data=edit_clips_with_sound),
}
"""What has no smoke recipe of its own: other bases and data of those."""
RUNS = SMOKES | OTHERS


def smoke_args(
    name: str, checkpoints: dict[str, Path], clips: Path, folder: Path, variant: str | None = None
) -> list[str]:
    """Return a run's recipe, checkpoint, data (written below `folder`, or `clips`) and cache, for `lora_main`."""
    smoke = RUNS[name]
    if smoke.write_data is not None:
        clips = folder / "data"
        smoke.write_data(clips)
    return [
        str(ROOT / "recipes" / "smoke" / f"{smoke.recipe or name}.yaml"),
        f"model.path={checkpoints[variant or smoke.variant]}",
        f"data.path={clips}",
        f"data.cache={folder / 'cache'}",
        *smoke.overrides,
    ]
