"""A run keeps small copies of what its samples are made from, in the order given."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import read_frames, read_header, write_video
from dit_lora.families.base import Sampling
from dit_lora.families.references import ReferenceSpec
from dit_lora.training.tasks.diffusion.shown_references import copy_references


def takes(*, clips: bool = False) -> ReferenceSpec:
    return ReferenceSpec(0, None, lambda height, width, shape: VideoShape(1, 16, 16), is_clip=clips)


def how(*files: Path, frames: int = 1) -> Sampling:
    return Sampling(VideoShape(frames, 32, 48), 2, 1.0, 0, references=files, fps=8.0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.png" for name in ("red", "lime", "blue")]
    for path, width in zip(paths, (1500, 600, 40), strict=True):
        Image.new("RGB", (width, width // 2), path.stem).save(path)
    return paths


def test_pictures_are_scaled_down_and_in_order(tmp_path: Path, files: list[Path]) -> None:
    red, lime, blue = files
    copy_references(tmp_path, takes(), [how(red), how(), how(blue, lime)])
    refs = {path.name: Image.open(path) for path in sorted((tmp_path / "references").iterdir())}
    assert {name: image.size for name, image in refs.items()} == {
        "prompt_00_1.jpg": (512, 256),
        "prompt_02_1.jpg": (40, 20),
        "prompt_02_2.jpg": (512, 256),
    }
    channels = [max(range(3), key=im.getpixel((9, 9)).__getitem__) for im in refs.values()]  # type: ignore[union-attr]
    assert channels == [0, 2, 1]
    copy_references(tmp_path, takes(), [how(lime)])
    assert [path.name for path in (tmp_path / "references").iterdir()] == ["prompt_00_1.jpg"]
    copy_references(tmp_path, None, [how()])
    assert not (tmp_path / "references").exists()


def test_clips_are_kept_as_the_model_is_given_them(tmp_path: Path, files: list[Path]) -> None:
    levels = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1) * 30
    clip = tmp_path / "clip.mp4"
    write_video(clip, levels.expand(8, 64, 96, 3).contiguous(), 8)
    copy_references(tmp_path, takes(clips=True), [how(clip, frames=5)])
    (reference_path,) = (tmp_path / "references").iterdir()
    assert reference_path.name == "prompt_00_1.mp4"
    header = read_header(reference_path)
    assert (header.height, header.width, header.frames) == (32, 48, 5)
    frames_read = read_frames(reference_path, frames=5, height=32, width=48, fps=8)
    assert [round(frame.float().mean().item() / 30) for frame in frames_read] == [0, 1, 2, 3, 4]
    # Of a picture, and for models that take pictures, it is one.
    for clips, frames in ((True, 1), (False, 5)):
        copy_references(tmp_path, takes(clips=clips), [how(clip, frames=frames)])
        (reference_path,) = (tmp_path / "references").iterdir()
        assert reference_path.name == "prompt_00_1.jpg"
