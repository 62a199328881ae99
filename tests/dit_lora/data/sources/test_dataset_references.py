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
from dit_lora.data.sources.scan import Scan, scan
from dit_lora.errors import DitLoraError

datasets = pytest.importorskip("datasets", reason="the extra dit-lora[datasets]")


def picture(level: int) -> dict[str, Any]:
    """A picture of one level as a dataset stores it."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (level, level, level)).save(stream, "png")
    return {"bytes": stream.getvalue(), "path": f"{level}.png"}


def level(one: media.Media) -> int:
    found: int = Image.open(io.BytesIO(read_bytes(one))).getpixel((0, 0))[0]  # type: ignore[index]
    return found


def a_dataset(**columns: tuple[Any, list[Any]]) -> Any:
    """Three targets of levels 0, 1 and 2, with further columns."""
    features = {"target": datasets.Image(), "text": datasets.Value("string")}
    values = {"target": [picture(number) for number in range(3)], "text": ["x", "y", "z"]}
    for name, (feature, column) in columns.items():
        features[name], values[name] = feature, column
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def scanned(saved: Any, folder: Path, **options: Any) -> Scan:
    saved.save_to_disk(folder)
    return scan(DataConfig(path=str(folder), height=8, width=8, **options))


def levels(found: Scan) -> dict[int, list[int]]:
    return {level(one.media): [level(other) for other in one.references] for one in found.clips}


IMAGES = [picture(10), picture(11), None]
LISTS = [[picture(20), picture(21)], [], [picture(22)]]


def test_a_column_holds_a_picture_or_a_list_of_them(tmp_path: Path) -> None:
    saved = a_dataset(
        first=(datasets.Image(), IMAGES), references=(datasets.List(datasets.Image()), LISTS)
    )
    assert levels(scanned(saved, tmp_path / "a", reference_columns=["references"])) == {
        0: [20, 21],
        1: [],
        2: [22],
    }
    found = scanned(saved, tmp_path / "b", reference_columns=["references", "first"])
    assert levels(found) == {0: [20, 21, 10], 1: [11], 2: [22]}
    assert not found.problems
    found = scanned(saved, tmp_path / "c", reference_columns=["first", "references"])
    assert levels(found) == {0: [10, 20, 21], 1: [11]}
    # Nothing of the third row's first column, and something behind it.
    assert [(one.file, one.code) for one in found.problems] == [
        ("00000002.png", "reference_missing")
    ]


@pytest.mark.parametrize("kind", ["List", "LargeList", "fixed"])
def test_a_column_called_references_is_read_unasked(tmp_path: Path, kind: str) -> None:
    feature = {
        "List": datasets.List(datasets.Image()),
        "LargeList": datasets.LargeList(datasets.Image()),
        "fixed": datasets.List(datasets.Image(), length=2),
    }[kind]
    two = [[picture(20 + row), picture(30 + row)] for row in range(3)]
    saved = a_dataset(references=(feature, two))
    assert levels(scanned(saved, tmp_path)) == {row: [20 + row, 30 + row] for row in range(3)}


def test_chosen_rows_have_their_own_references(tmp_path: Path) -> None:
    saved = a_dataset(references=(datasets.List(datasets.Image()), LISTS)).select([2, 0])
    assert levels(scanned(saved, tmp_path / "saved")) == {2: [22], 0: [20, 21]}
    in_memory = saved.shuffle(seed=1)
    assert in_memory._indices is not None
    places = hf_datasets._lists("x", in_memory, "references", False)
    given = [[level(cell.media) for cell in cells if cell.media] for cells in places]
    assert sorted(given) == [[20, 21], [22]]


def test_cells_of_a_list_are_told_apart(tmp_path: Path) -> None:
    """Each has a place of its own, survives pickling, and is hashed by its bytes; nothing is written."""
    found = scanned(a_dataset(references=(datasets.List(datasets.Image()), LISTS)), tmp_path / "a")
    assert not [file for file in (tmp_path / "a").iterdir() if file.name.startswith("cache-")]
    given = [one for clip in found.clips for one in clip.references]
    assert len({one.place for one in given}) == len({one.name for one in given}) == 3
    assert [one.stamp()[0] for one in given] == [len(read_bytes(one)) for one in given]
    assert [level(one) for one in pickle.loads(pickle.dumps(given))] == [20, 21, 22]
    digests = Digests(tmp_path / "digests.json")
    assert len({digests.media(one) for one in given}) == 3


def test_a_mask_column_is_no_medium_and_a_row_may_have_none(tmp_path: Path) -> None:
    masks = [picture(200), None, picture(201)]
    saved = a_dataset(mask=(datasets.Image(), masks)).select_columns(["mask", "target", "text"])
    found = scanned(saved, tmp_path, mask_column="mask")
    own = {level(one.media): one.mask and level(one.mask.media) for one in found.clips}
    assert own == {0: 200, 1: None, 2: 201}
    assert not found.problems


def test_cells_that_cannot_be_read_refuse_their_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"bytes": None, "path": str(tmp_path / "gone.png")}
    words = {"bytes": b"words, " * 50, "path": None}
    lists = [[picture(1), gone], [None, picture(2)], [picture(3), words]]
    saved = a_dataset(
        references=(datasets.List(datasets.Image()), lists),
        mask=(datasets.Image(), [gone, picture(1), {"bytes": b"", "path": None}]),
    )
    monkeypatch.setattr(hf_datasets, "_load", lambda path: saved)
    found = hf_datasets.read_dataset(SourceConfig(path="in memory", mask_column="mask"))
    assert not found.clips
    assert {(one.file, one.code): one.words for one in found.problems} == {
        ("00000000.png", "reference_missing"): f"its reference: no such file: {gone['path']}",
        ("00000000.png", "mask_missing"): f"its mask: no such file: {gone['path']}",
        ("00000001.png", "reference_missing"): "its reference 1 is empty, and there are others "
        "behind it",
        ("00000002.png", "not_media"): "its reference: its bytes are no video or image of a format "
        "known here: b'words, w' ...",
        ("00000002.png", "empty_file"): "its mask: it has no bytes",
    }
    monkeypatch.setattr(media, "MOST_BYTES", 349)
    found = hf_datasets.read_dataset(SourceConfig(path="in memory", caption="x"))
    large = [one for one in found.problems if one.code == "too_large"]
    assert [one.file for one in large] == ["00000002.png"]
    assert large[0].words.startswith("its reference: it has 350 bytes, and 349 are read")


def test_columns_that_are_not_there_or_hold_no_pictures_are_named(tmp_path: Path) -> None:
    saved = a_dataset(names=(datasets.Value("string"), ["a", "b", "c"]))
    wrong = {
        "reference_columns": (["names", "low"], "images called names, none of images called low"),
        "mask_column": ("names", "images called names"),
    }
    for number, (option, (given, why)) in enumerate(wrong.items()):
        with pytest.raises(DitLoraError, match=f"has no column of {why}; it has target"):
            scanned(saved, tmp_path / str(number), **{option: given})
