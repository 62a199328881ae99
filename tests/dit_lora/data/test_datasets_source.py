"""Hugging Face datasets of images: exported once, with the names of their classes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit_lora.config import DataConfig
from dit_lora.data import datasets_source
from dit_lora.data.sources import Clip, read_clips
from dit_lora.data.video import read_frames
from dit_lora.errors import DitLoraError

datasets = pytest.importorskip("datasets", reason="the extra dit-lora[datasets]")

COLOURS = [(250, 10, 20), (10, 240, 30), (20, 30, 230)]


def a_dataset(**columns: Any) -> Any:
    images = [Image.new("RGB", (20 + i, 24), colour) for i, colour in enumerate(COLOURS)]
    images[1].putalpha(0)
    images[2] = images[2].convert("CMYK")
    features = {"picture": datasets.Image()}
    values: dict[str, Any] = {"picture": images}
    for name, (feature, column) in columns.items():
        features[name], values[name] = feature, column
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def labelled() -> Any:
    return a_dataset(
        fine=(datasets.ClassLabel(names=["red fox", "a/b", "tench, Tinca tinca"]), [2, 0, 1])
    )


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Clip]]:
    def clips(saved: Any, **options: Any) -> list[Clip]:
        saved.save_to_disk(tmp_path / "saved")
        data = DataConfig(path=str(tmp_path / "saved"), height=24, width=16, **options)
        return read_clips(data, tmp_path / "cache")

    return clips


def test_images_and_the_names_of_their_classes(read: Callable[..., list[Clip]]) -> None:
    """Whatever the label's column is called and its names hold; what is transparent is put on white."""
    clips = read(labelled())
    assert [clip.caption for clip in clips] == ["tench, Tinca tinca", "red fox", "a/b"]
    frame = read_frames(clips[0].media, frames=1, fps=None, height=24, width=16)
    assert torch.equal(frame[0, :, 5, 5], torch.tensor(COLOURS[0], dtype=torch.uint8))
    transparent = read_frames(clips[1].media, frames=1, fps=None, height=24, width=16)
    assert (transparent == 255).all()
    assert read_frames(clips[2].media, frames=1, fps=None, height=24, width=16).shape[1] == 3


def test_captions_and_a_column_of_ones_choice(read: Callable[..., list[Clip]]) -> None:
    text = datasets.Value("string")
    saved = a_dataset(
        caption=(text, ["a", "b", "c"]),
        label=(datasets.ClassLabel(names=["x", "y"]), [0, 1, 0]),
    )
    assert [clip.caption for clip in read(saved)] == ["a", "b", "c"]


def test_the_column_that_the_recipe_names_is_taken(read: Callable[..., list[Clip]]) -> None:
    text = datasets.Value("string")
    saved = a_dataset(text=(text, ["a", "b", "c"]), short=(text, ["d", "e", "f"]))
    assert [clip.caption for clip in read(saved, caption_column="short")] == ["d", "e", "f"]
    data = {"path": "unused", "caption_column": "long"}
    with pytest.raises(
        DitLoraError, match=r"no column of text or classes among long; it has picture"
    ):
        read(saved.select([0, 1]), caption_column=data["caption_column"])


def test_it_is_exported_once(
    tmp_path: Path, read: Callable[..., list[Clip]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(labelled())
    stamps = [clip.media.path.stat().st_mtime_ns for clip in first]
    data = DataConfig(path=str(tmp_path / "saved"), height=24, width=16)
    monkeypatch.setattr(datasets_source, "_write", None)
    again = read_clips(data, tmp_path / "cache")
    assert [clip.media.path.stat().st_mtime_ns for clip in again] == stamps
    assert again == first


def test_the_split_called_train_is_taken_and_others_need_a_choice(
    read: Callable[..., list[Clip]], tmp_path: Path
) -> None:
    whole = labelled()
    splits = datasets.DatasetDict({"test": whole.select([0]), "train": whole.select([1, 2])})
    assert [clip.caption for clip in read(splits)] == ["red fox", "a/b"]
    odd = datasets.DatasetDict({"a": whole.select([0]), "b": whole.select([1])})
    odd.save_to_disk(tmp_path / "odd")
    with pytest.raises(DitLoraError, match="has the splits a, b, none called train"):
        read_clips(DataConfig(path=str(tmp_path / "odd"), height=24, width=16), tmp_path / "cache")


def test_a_dataset_without_images_or_captions_is_refused(
    read: Callable[..., list[Clip]], tmp_path: Path
) -> None:
    with pytest.raises(DitLoraError, match=r"no column of text or classes .*picture \(Image\)"):
        read(a_dataset())
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(DitLoraError, match=r"no column of an image; it has text \(Value\)"):
        read_clips(DataConfig(path=str(tmp_path / "texts"), height=24, width=16), tmp_path)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(tmp_path: Path) -> None:
    data = DataConfig(path="nobody/nothing", height=24, width=16)
    with pytest.raises(DitLoraError, match="no folder nobody/nothing, and as a dataset it cannot"):
        read_clips(data, tmp_path)


def test_without_the_package_the_extra_is_named(
    read: Callable[..., list[Clip]], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = labelled()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DitLoraError, match=r"pip install 'dit-lora\[datasets\]'"):
        read(saved)
