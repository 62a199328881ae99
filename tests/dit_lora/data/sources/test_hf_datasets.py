"""Hugging Face datasets of images and videos: read in place, with the names of their classes."""

import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit_lora.config.data import SourceConfig
from dit_lora.config.recipe import DataConfig
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media import media
from dit_lora.data.media.media import MediaFile, read_bytes
from dit_lora.data.media.video import read_frames
from dit_lora.data.sources import hf_datasets
from dit_lora.data.sources.clips import Clip, DataScan
from dit_lora.data.sources.scan import read_clips
from dit_lora.data.synthetic.clips import write_shapes
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
    return a_dataset(fine=(datasets.ClassLabel(names=["red fox", "a/b", "tench, Tinca tinca"]), [2, 0, 1]))


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
    dataset = a_dataset(
        caption=(text, ["a", "b", "c"]),
        label=(datasets.ClassLabel(names=["x", "y"]), [0, 1, 0]),
    )
    assert [clip.caption for clip in read(dataset)] == ["a", "b", "c"]


def test_the_column_that_the_recipe_names_is_taken(read: Callable[..., list[Clip]]) -> None:
    text = datasets.Value("string")
    dataset = a_dataset(text=(text, ["a", "b", "c"]), short=(text, ["d", "e", "f"]))
    assert [clip.caption for clip in read(dataset, caption_column="short")] == ["d", "e", "f"]
    data = {"path": "unused", "caption_column": "long"}
    with pytest.raises(DitLoraError, match=r"no column of text or classes among long; it has picture"):
        read(dataset.select([0, 1]), caption_column=data["caption_column"])


def test_cells_are_read_in_place(tmp_path: Path, read: Callable[..., list[Clip]]) -> None:
    """Nothing is written; a cell survives pickling, and a second reading finds the same places."""
    first_clips = read(labelled())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    data = DataConfig(path=str(tmp_path / "saved"), height=24, width=16)
    second_clips = read_clips(data, tmp_path / "cache")
    assert second_clips == first_clips
    assert [clip.id for clip in first_clips] == ["00000000.png", "00000001.png", "00000002.tiff"]
    assert [clip.media.get_file_stamp()[0] for clip in first_clips] == [len(read_bytes(c.media)) for c in first_clips]
    pickled = pickle.dumps(second_clips)
    assert str(tmp_path / "saved").encode() in pickled  # by the files' paths
    for clip, unpickled in zip(first_clips, pickle.loads(pickled), strict=True):
        assert (clip, hash(clip.media)) == (unpickled, hash(unpickled.media))
        assert read_bytes(clip.media) == read_bytes(unpickled.media)
    digests = Digests(tmp_path / "digests.json")
    assert len({digests.hash_media(clip.media) for clip in first_clips}) == 3
    del before[tmp_path / "saved"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert not (tmp_path / "cache").exists()


def test_another_dataset_in_the_same_folder_is_another_place(tmp_path: Path, read: Callable[..., list[Clip]]) -> None:
    first_clips = read(labelled())
    shutil.rmtree(tmp_path / "saved")
    second = read(labelled().map(lambda row: {**row, "note": "other"}))
    assert not {clip.media.location for clip in first_clips} & {clip.media.location for clip in second}


def test_chosen_rows_are_those_of_the_dataset() -> None:
    """A dataset may be a choice of its table's rows: cells, captions and names go by the choice."""
    scan_result = found_in(labelled().select([2, 0]))
    assert [clip.caption for clip in scan_result.clips] == ["a/b", "tench, Tinca tinca"]
    assert [clip.id for clip in scan_result.clips] == ["00000000.tiff", "00000001.png"]
    frame = read_frames(scan_result.clips[1].media, frames=1, fps=None, height=24, width=16)
    assert torch.equal(frame[0, :, 5, 5], torch.tensor(COLOURS[0], dtype=torch.uint8))


def test_videos_are_read_without_a_decoder_of_the_datasets_package(
    tmp_path: Path, read: Callable[..., list[Clip]]
) -> None:
    """With a column of first images; bytes without a name are known by what they are."""
    paths = write_shapes(tmp_path / "clips", clips=2, frames=3, height=24, width=32, fps=8)
    Image.new("RGB", (32, 24), "red").save(tmp_path / "first.png")
    png = {"bytes": (tmp_path / "first.png").read_bytes(), "path": None}
    rows = {
        "first": [png, None],
        "clip": [{"bytes": path.read_bytes(), "path": None} for path in paths],
        "prompt": ["one", "two"],
    }
    features = datasets.Features(first=datasets.Image(), clip=datasets.Video(), prompt=datasets.Value("string"))
    dataset = datasets.Dataset.from_dict(rows, features=features)
    options = {"frames": 3, "fps": 8.0}
    clips = read(dataset, **options, image_column="first")
    assert [(clip.id, clip.caption) for clip in clips] == [
        ("00000000.mp4", "one"),
        ("00000001.mp4", "two"),
    ]
    for clip, path in zip(clips, paths, strict=True):
        pictures = [read_frames(media, frames=3, height=24, width=32, fps=8) for media in (clip.media, path)]
        assert torch.equal(*pictures)
    assert clips[0].image is not None
    assert read_bytes(clips[0].image) == png["bytes"]
    assert clips[1].image is None
    with pytest.raises(DitLoraError, match="no column of images called start"):
        read(dataset, **options, image_column="start")


def test_everything_wrong_with_rows_is_listed(tmp_path: Path) -> None:
    """Files that rows name are read where they are."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "there.png")
    png = (tmp_path / "there.png").read_bytes()
    cells = [
        {"bytes": None, "path": str(tmp_path / "there.png")},
        {"bytes": None, "path": str(tmp_path / "gone.png")},
        None,
        {"bytes": b"<html>not found</html>", "path": None},
        {"bytes": b"", "path": None},
        {"bytes": png, "path": "x.png"},
        {"bytes": png, "path": "x.png"},
    ]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    labels = [0, 0, 0, 0, 0, -1, None]
    dataset = datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)
    scan_result = found_in(dataset)
    assert [(clip.id, clip.caption) for clip in scan_result.clips] == [("00000000.png", "cat")]
    assert scan_result.clips[0].media == MediaFile(tmp_path / "there.png")
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [
        ("00000001.png", "missing"),
        ("00000002", "missing"),
        ("00000003", "not_media"),
        ("00000004", "empty_file"),
        ("00000005.png", "label_unknown"),
        ("00000006.png", "caption_missing"),
    ]


def test_a_dataset_of_the_hub_names_no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was downloaded with it is read; a cell too large for the memory is not."""
    monkeypatch.setattr(media, "MAX_BYTES", 100)
    downloaded = Path(datasets.config.HF_DATASETS_CACHE) / "x.png"
    cells = [
        {"bytes": None, "path": str(tmp_path / "mine.png")},
        {"bytes": None, "path": str(downloaded)},
        {"bytes": b"x" * 101, "path": "x.png"},
    ]
    (tmp_path / "mine.png").write_bytes(b"image")
    features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"))
    rows = {"image": cells, "text": ["a", "b", "c"]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(hf_datasets, "_load_dataset", lambda path: dataset)
    scan_result = hf_datasets.read_dataset(SourceConfig(path="somebody/images"))
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [
        ("00000000.png", "unsafe_path"),
        ("00000001.png", "missing"),
        ("00000002", "too_large"),
    ]


def found_in(dataset: Any, **options: Any) -> DataScan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_datasets, "_load_dataset", lambda path: dataset)
        return hf_datasets.read_dataset(SourceConfig(path="any", **options))


def test_one_caption_needs_no_column() -> None:
    scan_result = found_in(a_dataset(), caption="a photo of sks dog")
    assert {clip.caption for clip in scan_result.clips} == {"a photo of sks dog"}
    assert len(scan_result.clips) == 3


def test_the_column_of_first_images_is_not_what_is_trained_on() -> None:
    dataset = a_dataset(after=(datasets.Image(), [Image.new("RGB", (9, 9), c) for c in COLOURS]))
    scan_result = found_in(dataset, caption="x", image_column="picture")
    for clip in scan_result.clips:
        assert ":after/" in clip.media.name
        assert clip.image is not None
        assert ":picture/" in clip.image.name


def test_decoded_arrays_are_refused() -> None:
    features = datasets.Features(pixels=datasets.Array3D((2, 2, 3), "uint8"), text=datasets.Value("string"))
    rows = {"pixels": [[[[0, 0, 0]] * 2] * 2], "text": ["x"]}
    with pytest.raises(DitLoraError, match=r"pixels \(Array3D\), text \(Value\)\. Arrays of pixels"):
        found_in(datasets.Dataset.from_dict(rows, features=features))


def test_the_split_called_train_is_taken_and_others_need_a_choice(
    read: Callable[..., list[Clip]], tmp_path: Path
) -> None:
    dataset = labelled()
    splits = datasets.DatasetDict({"test": dataset.select([0]), "train": dataset.select([1, 2])})
    assert [clip.caption for clip in read(splits)] == ["red fox", "a/b"]
    dataset_dict = datasets.DatasetDict({"a": dataset.select([0]), "b": dataset.select([1])})
    dataset_dict.save_to_disk(tmp_path / "odd")
    with pytest.raises(DitLoraError, match="has the splits a, b, and none is called train"):
        read_clips(DataConfig(path=str(tmp_path / "odd"), height=24, width=16), tmp_path / "cache")


def test_a_dataset_without_images_or_captions_is_refused(read: Callable[..., list[Clip]], tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"no column of text or classes .*picture \(Image\)"):
        read(a_dataset())
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(DitLoraError, match=r"no column of videos or images; it has text \(Value\)"):
        read_clips(DataConfig(path=str(tmp_path / "texts"), height=24, width=16), tmp_path)


def test_an_offset_out_of_the_files_memory_is_damage(tmp_path: Path) -> None:
    """Followed, it would end the process."""
    captions = ["one", "three", "sixteen"]
    a_dataset(text=(datasets.Value("string"), captions)).save_to_disk(tmp_path / "saved")
    (shard,) = (tmp_path / "saved").glob("*.arrow")
    data = shard.read_bytes()
    offsets = struct.pack("<4i", 0, 3, 8, 15)
    assert data.count(offsets) == 1
    shard.write_bytes(data.replace(offsets, struct.pack("<4i", 0, 3, 2**30, 2**30 + 7)))
    with pytest.raises(DitLoraError, match="cannot be read"):
        read_clips(DataConfig(path=str(tmp_path / "saved"), height=24, width=16), tmp_path)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(tmp_path: Path) -> None:
    data = DataConfig(path="nobody/nothing", height=24, width=16)
    with pytest.raises(DitLoraError, match="nobody/nothing is not a folder, and it cannot"):
        read_clips(data, tmp_path)


def test_without_the_package_the_extra_is_named(
    read: Callable[..., list[Clip]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = labelled()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DitLoraError, match=r"pip install 'dit-lora\[datasets\]'"):
        read(dataset)
