"""Columns of references and masks in Hugging Face datasets: pictures, lists of them, and what is empty."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dit_lora.config.data import DataConfig, SourceConfig
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media import media
from dit_lora.data.media.media import read_bytes
from dit_lora.data.sources import hf_datasets
from dit_lora.data.sources.clips import DataScan
from dit_lora.data.sources.scan import scan_sources
from dit_lora.errors import DitLoraError

datasets = pytest.importorskip("datasets", reason="the extra dit-lora[datasets]")


def picture(level: int) -> dict[str, Any]:
    """A picture of one level as a dataset stores it."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (level, level, level)).save(stream, "png")
    return {"bytes": stream.getvalue(), "path": f"{level}.png"}


def level(one: media.Media) -> int:
    gray_level: int = Image.open(io.BytesIO(read_bytes(one))).getpixel((0, 0))[0]  # type: ignore[index]
    return gray_level


def a_dataset(**columns: tuple[Any, list[Any]]) -> Any:
    """Three targets of levels 0, 1 and 2, with further columns."""
    features = {"target": datasets.Image(), "text": datasets.Value("string")}
    values = {"target": [picture(number) for number in range(3)], "text": ["x", "y", "z"]}
    for name, (feature, column) in columns.items():
        features[name], values[name] = feature, column
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def scanned(saved: Any, folder: Path, **options: Any) -> DataScan:
    saved.save_to_disk(folder)
    return scan_sources(DataConfig(path=str(folder), height=8, width=8, **options))


def levels(found: DataScan) -> dict[int, list[int]]:
    return {level(clip.media): [level(reference) for reference in clip.references] for clip in found.clips}


IMAGES = [picture(10), picture(11), None]
LISTS = [[picture(20), picture(21)], [], [picture(22)]]


def test_a_column_holds_a_picture_or_a_list_of_them(tmp_path: Path) -> None:
    dataset = a_dataset(first=(datasets.Image(), IMAGES), references=(datasets.List(datasets.Image()), LISTS))
    assert levels(scanned(dataset, tmp_path / "a", reference_columns=["references"])) == {
        0: [20, 21],
        1: [],
        2: [22],
    }
    scan_result = scanned(dataset, tmp_path / "b", reference_columns=["references", "first"])
    assert levels(scan_result) == {0: [20, 21, 10], 1: [11], 2: [22]}
    assert not scan_result.problems
    scan_result = scanned(dataset, tmp_path / "c", reference_columns=["first", "references"])
    assert levels(scan_result) == {0: [10, 20, 21], 1: [11]}
    # Nothing of the third row's first column, and something behind it.
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [
        ("00000002.png", "reference_missing")
    ]


@pytest.mark.parametrize("kind", ["List", "LargeList", "fixed"])
def test_a_column_called_references_is_read_unasked(tmp_path: Path, kind: str) -> None:
    feature = {
        "List": datasets.List(datasets.Image()),
        "LargeList": datasets.LargeList(datasets.Image()),
        "fixed": datasets.List(datasets.Image(), length=2),
    }[kind]
    picture_rows = [[picture(20 + row), picture(30 + row)] for row in range(3)]
    dataset = a_dataset(references=(feature, picture_rows))
    assert levels(scanned(dataset, tmp_path)) == {row: [20 + row, 30 + row] for row in range(3)}


def test_chosen_rows_have_their_own_references(tmp_path: Path) -> None:
    dataset = a_dataset(references=(datasets.List(datasets.Image()), LISTS)).select([2, 0])
    assert levels(scanned(dataset, tmp_path / "saved")) == {2: [22], 0: [20, 21]}
    in_memory = dataset.shuffle(seed=1)
    assert in_memory._indices is not None
    cell_lists = hf_datasets._iter_list_cells("x", in_memory, "references", False)
    reference_levels = [[level(cell.media) for cell in cells if cell.media] for cells in cell_lists]
    assert sorted(reference_levels) == [[20, 21], [22]]


def test_cells_of_a_list_are_told_apart(tmp_path: Path) -> None:
    """Each has a place of its own, survives pickling, and is hashed by its bytes; nothing is written."""
    scan_result = scanned(a_dataset(references=(datasets.List(datasets.Image()), LISTS)), tmp_path / "a")
    assert not [file for file in (tmp_path / "a").iterdir() if file.name.startswith("cache-")]
    references = [reference for clip in scan_result.clips for reference in clip.references]
    assert (
        len({reference.location for reference in references}) == len({reference.name for reference in references}) == 3
    )
    assert [reference.get_file_stamp()[0] for reference in references] == [
        len(read_bytes(reference)) for reference in references
    ]
    assert [level(reference) for reference in pickle.loads(pickle.dumps(references))] == [
        20,
        21,
        22,
    ]
    digests = Digests(tmp_path / "digests.json")
    assert len({digests.hash_media(reference) for reference in references}) == 3


def test_a_mask_column_is_no_medium_and_a_row_may_have_none(tmp_path: Path) -> None:
    masks = [picture(200), None, picture(201)]
    dataset = a_dataset(mask=(datasets.Image(), masks)).select_columns(["mask", "target", "text"])
    scan_result = scanned(dataset, tmp_path, mask_column="mask")
    mask_levels = {level(clip.media): clip.mask and level(clip.mask.media) for clip in scan_result.clips}
    assert mask_levels == {0: 200, 1: None, 2: 201}
    assert not scan_result.problems


def test_cells_that_cannot_be_read_refuse_their_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing_file = {"bytes": None, "path": str(tmp_path / "gone.png")}
    text_cell = {"bytes": b"words, " * 50, "path": None}
    lists = [[picture(1), missing_file], [None, picture(2)], [picture(3), text_cell]]
    dataset = a_dataset(
        references=(datasets.List(datasets.Image()), lists),
        mask=(datasets.Image(), [missing_file, picture(1), {"bytes": b"", "path": None}]),
    )
    monkeypatch.setattr(hf_datasets, "_load_dataset", lambda path: dataset)
    scan_result = hf_datasets.read_dataset(SourceConfig(path="in memory", mask_column="mask"))
    assert not scan_result.clips
    assert {(finding.file, finding.code): finding.message for finding in scan_result.problems} == {
        (
            "00000000.png",
            "reference_missing",
        ): f"its reference: no such file: {missing_file['path']}",
        ("00000000.png", "mask_missing"): f"its mask: no such file: {missing_file['path']}",
        ("00000001.png", "reference_missing"): "its reference 1 is empty, and others follow",
        ("00000002.png", "not_media"): "its reference: its bytes are not a video or an image of a "
        "known format: b'words, w' ...",
        ("00000002.png", "empty_file"): "its mask: it has no bytes",
    }
    monkeypatch.setattr(media, "MAX_BYTES", 349)
    scan_result = hf_datasets.read_dataset(SourceConfig(path="in memory", caption="x"))
    large = [problem for problem in scan_result.problems if problem.code == "too_large"]
    assert [problem.file for problem in large] == ["00000002.png"]
    assert large[0].message.startswith("its reference: it has 350 bytes, and 349 are read")


def test_columns_that_are_not_there_or_hold_no_pictures_are_named(tmp_path: Path) -> None:
    source_dataset = a_dataset(names=(datasets.Value("string"), ["a", "b", "c"]))
    cases = {
        "reference_columns": (["names", "low"], "images called names, none of images called low"),
        "mask_column": ("names", "images called names"),
    }
    for number, (option, (dataset, reason)) in enumerate(cases.items()):
        with pytest.raises(DitLoraError, match=f"has no column of {reason}; it has target"):
            scanned(source_dataset, tmp_path / str(number), **{option: dataset})
