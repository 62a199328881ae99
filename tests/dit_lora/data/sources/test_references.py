"""References and masks of tables, folders, tars and datasets: their order, and what is missing or leads out."""

import csv
import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.data import DataConfig
from dit_lora.data.media import media
from dit_lora.data.media.media import TarMember, read_bytes
from dit_lora.data.sources.clips import Clip, DataScan
from dit_lora.data.sources.scan import scan_sources
from dit_lora.errors import DitLoraError


def config(path: Path, **values: Any) -> DataConfig:
    return DataConfig(path=str(path), height=32, width=48, **values)


def write_files(root: Path, *names: str) -> Path:
    """Write files whose bytes are their names below `root`."""
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    return root


def write_rows(root: Path, layout: str, rows: list[dict[str, Any]]) -> None:
    if layout == "csv":
        with (root / "metadata.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif layout == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="the extra dit-lora[datasets]")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), root / "metadata.parquet")
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (root / "metadata.jsonl").write_text(lines)


def references(found: DataScan) -> dict[str, list[str]]:
    """The bytes of each clip's references, which are the names that they were written under."""
    return {clip.id: [read_bytes(reference).decode() for reference in clip.references] for clip in found.clips}


def masks(clips: list[Clip]) -> dict[str, tuple[str, bool] | None]:
    return {clip.id: (read_bytes(clip.mask.media).decode(), clip.mask.alpha) if clip.mask else None for clip in clips}


def problems(found: DataScan) -> list[tuple[str, str]]:
    return [(finding.file, finding.code) for finding in found.problems]


ALL = ("a.png", "b.png", "c.png", "in/1.png", "in/2.jpg", "in/3.mp4", "m/a.png")


@pytest.mark.parametrize("layout", ["jsonl", "parquet"])
def test_a_column_called_references_holds_a_list(tmp_path: Path, layout: str) -> None:
    write_files(tmp_path, *ALL)
    rows = [
        {"file_name": "a.png", "text": "x", "references": ["in/2.jpg", "in/1.png"], "m": "m/a.png"},
        {"file_name": "b.png", "text": "x", "references": ["in/3.mp4"], "m": None},
        {"file_name": "c.png", "text": "x", "references": None, "m": ""},
    ]
    write_rows(tmp_path, layout, rows)
    scan_result = scan_sources(config(tmp_path, mask_column="m"))
    assert not scan_result.problems
    expected = {"a.png": ["in/2.jpg", "in/1.png"], "b.png": ["in/3.mp4"], "c.png": []}
    assert references(scan_result) == expected
    assert masks(scan_result.clips) == {"a.png": ("m/a.png", False), "b.png": None, "c.png": None}


def test_a_cell_may_hold_one_name_and_in_csv_a_list_of_json(tmp_path: Path) -> None:
    write_files(tmp_path, *ALL, "[a].png")
    rows = [
        {"file_name": "a.png", "text": "x", "references": "in/1.png"},
        {"file_name": "b.png", "text": "x", "references": '["in/2.jpg", "in/1.png"]'},
        {"file_name": "c.png", "text": "x", "references": "[a].png"},
        {"file_name": "[a].png", "text": "x", "references": ""},
    ]
    expected = {
        "a.png": ["in/1.png"],
        "b.png": ["in/2.jpg", "in/1.png"],
        "c.png": ["[a].png"],
        "[a].png": [],
    }
    for layout in ("csv", "jsonl"):
        write_rows(tmp_path, layout, rows)
        assert references(scan_sources(config(tmp_path))) == expected
        (tmp_path / f"metadata.{layout}").unlink()


@pytest.mark.parametrize("layout", ["jsonl", "csv", "parquet"])
def test_columns_of_references_are_read_in_the_order_of_the_recipe(tmp_path: Path, layout: str) -> None:
    write_files(tmp_path, *ALL)
    rows = [
        {"file_name": "a.png", "text": "x", "scene": "in/1.png", "face": "in/2.jpg"},
        {"file_name": "b.png", "text": "x", "scene": None, "face": "in/1.png"},
    ]
    write_rows(tmp_path, layout, rows)
    scan_result = scan_sources(config(tmp_path, reference_columns=["face", "scene"]))
    assert references(scan_result) == {"a.png": ["in/2.jpg", "in/1.png"], "b.png": ["in/1.png"]}
    # What is empty before another would shift it.
    scan_result = scan_sources(config(tmp_path, reference_columns=["scene", "face"]))
    assert references(scan_result) == {"a.png": ["in/1.png", "in/2.jpg"]}
    assert problems(scan_result) == [("b.png", "reference_missing")]
    assert scan_result.problems[0].message == "its reference 1 is empty, and others follow"
    with pytest.raises(DitLoraError, match=r"no column for a reference \(reference_columns\); .* low"):
        scan_sources(config(tmp_path, reference_columns=["low"]))
    with pytest.raises(DitLoraError, match=r"no column for the mask \(mask_column\); looked for low"):
        scan_sources(config(tmp_path, mask_column="low"))


def test_what_a_row_names_wrongly_is_listed_whole(tmp_path: Path) -> None:
    """Files beside a sample are refused as its own: what is not there, what leads out, what is no name."""
    data_folder = write_files(tmp_path / "data", *ALL)
    (tmp_path / "secret.png").write_bytes(b"secret")
    rows = [
        {"file_name": "a.png", "references": ["in/gone.png", "in/1.png", "in/lost.png"]},
        {"file_name": "b.png", "references": ["../secret.png"], "mask": str(tmp_path / "s.png")},
        {"file_name": "c.png", "references": [{"path": "in/1.png"}, 7], "mask": "m/gone.png"},
        {"file_name": "in/1.png", "references": ["in/1.png", None, "in/2.jpg"]},
    ]
    write_rows(data_folder, "jsonl", [{"text": "x", **row} for row in rows])
    scan_result = scan_sources(config(data_folder, mask_column="mask"))
    assert not scan_result.clips
    assert {(finding.file, finding.code): finding.message for finding in scan_result.problems} == {
        ("a.png", "reference_missing"): f"no such reference: {data_folder}/in/gone.png; "
        f"no such reference: {data_folder}/in/lost.png",
        (
            "b.png",
            "unsafe_path",
        ): f"../secret.png is outside of {data_folder}; set data.media to a folder "
        f"that contains it; {tmp_path}/s.png is outside of {data_folder}; set data.media to a folder that "
        "contains it",
        ("c.png", "reference_missing"): "its reference is of type dict, not a name; "
        "its reference is of type int, not a name",
        ("c.png", "mask_missing"): f"no such mask: {data_folder}/m/gone.png",
        (
            "in/1.png",
            "reference_missing",
        ): "its reference 2 is empty, and others follow",
    }


PAIRS = (
    *("target/x/1.png", "target/x/2.JPG", "target/3.webp"),
    *("source/x/1.webp", "source/x/2.png", "source/3.mp4", "source/other.png"),
    *("style/x/1.png", "style/x/2.png", "style/3.png", "style/.hidden/3.png", "style/notes.txt"),
    *("mask/x/1.png", "mask/x/2.png", "mask/3.png"),
)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_files(tmp_path, *PAIRS)
    for stem in ("x/1", "x/2", "3"):
        (tmp_path / "target" / f"{stem}.txt").write_text(f"make it {stem}")
    return tmp_path


def of_pairs(root: Path, *folders: str, **options: Any) -> DataScan:
    reference_folders = [str(root / folder) for folder in folders]
    return scan_sources(config(root / "target", reference_folders=reference_folders, **options))


def test_folders_beside_the_targets_hold_files_of_their_names(pairs: Path) -> None:
    scan_result = of_pairs(pairs, "style", "source", mask_folder=str(pairs / "mask"))
    assert not scan_result.problems
    assert references(scan_result) == {
        "3.webp": ["style/3.png", "source/3.mp4"],
        "x/1.png": ["style/x/1.png", "source/x/1.webp"],
        "x/2.JPG": ["style/x/2.png", "source/x/2.png"],
    }
    assert masks(scan_result.clips)["x/2.JPG"] == ("mask/x/2.png", False)
    assert [clip.caption for clip in scan_result.clips] == [
        "make it 3",
        "make it x/1",
        "make it x/2",
    ]
    assert references(of_pairs(pairs, "source", "style"))["3.webp"] == [
        "source/3.mp4",
        "style/3.png",
    ]


def test_links_in_folders_of_references_are_followed(pairs: Path) -> None:
    (pairs / "source").rename(pairs / "elsewhere")
    (pairs / "source").mkdir()
    (pairs / "source" / "x").symlink_to(pairs / "elsewhere" / "x")
    (pairs / "source" / "3.png").symlink_to(pairs / "gone.png")
    scan_result = of_pairs(pairs, "source")
    assert set(references(scan_result)) == {"x/1.png", "x/2.JPG"}
    assert problems(scan_result) == [("3.webp", "reference_missing")]


def test_a_sample_without_its_file_is_a_problem(pairs: Path) -> None:
    (pairs / "source/x/1.webp").unlink()
    (pairs / "style/x/1.png").unlink()
    (pairs / "mask/x/2.png").unlink()
    (pairs / "style/3.jpg").write_bytes(b"another")
    scan_result = of_pairs(pairs, "source", "style", mask_folder=str(pairs / "mask"))
    assert not scan_result.clips
    source, style, mask = (pairs / name for name in ("source", "style", "mask"))
    assert {(finding.file, finding.code): finding.message for finding in scan_result.problems} == {
        ("3.webp", "reference_ambiguous"): f"several files in {style} have its name: 3.jpg, 3.png",
        ("x/1.png", "reference_missing"): f"it has no reference with its name in {source}; it has no "
        f"reference with its name in {style}",
        ("x/2.JPG", "mask_missing"): f"it has no mask with its name in {mask}",
    }


def test_a_folder_that_cannot_be_meant_is_one_line(pairs: Path) -> None:
    """It is not there, lies among the samples, or has no file of any sample's name."""
    write_files(pairs, "target/in/1.png", "named/1_source.png", "empty/readme.md")
    cases = {
        "gone": r"reference_folders: the folder .*gone does not exist",
        "target/in": r"reference_folders: .*in lies in .*target, where every picture and video is",
        "named": r"no file in .*named has the name of a sample in .*target, such as 3 with any suffix; "
        r"it has 1_source\.png",
        "empty": r"no file in .*empty has the name .*; it has no picture and no video",
    }
    for folder, reason in cases.items():
        with pytest.raises(DitLoraError, match=reason) as error:
            of_pairs(pairs, folder)
        assert "\n" not in str(error.value)
        with pytest.raises(DitLoraError, match=reason.replace("reference_folders", "mask_folder")):
            scan_sources(config(pairs / "target", mask_folder=str(pairs / folder)))


def test_of_a_list_the_folders_may_lie_beside_it(tmp_path: Path) -> None:
    """Only what a list names is a sample; a table's own column of references goes before no folder."""
    write_files(tmp_path, "out/a.png", "low/out/a.jpg", "masks/out/a.png")
    write_rows(tmp_path, "jsonl", [{"file_name": "out/a.png", "text": "x", "references": "out/a.png"}])
    scan_result = scan_sources(config(tmp_path, mask_folder=str(tmp_path / "masks")))
    assert references(scan_result) == {"out/a.png": ["out/a.png"]}
    assert masks(scan_result.clips) == {"out/a.png": ("masks/out/a.png", False)}
    scan_result = scan_sources(config(tmp_path, reference_folders=[str(tmp_path / "low")]))
    assert references(scan_result) == {"out/a.png": ["low/out/a.jpg"]}


def test_options_that_contradict_each_other_or_the_layout_are_refused(pairs: Path) -> None:
    folder = str(pairs / "source")
    with pytest.raises(ValueError, match="got both reference_columns and reference_folders"):
        config(pairs, reference_columns=["a"], reference_folders=[folder])
    with pytest.raises(ValueError, match="got more than one of mask_column, mask_folder and alpha_mask"):
        config(pairs, mask_folder=folder, alpha_mask=True)
    with pytest.raises(DitLoraError, match="reference_columns and mask_column need metadata"):
        scan_sources(config(pairs / "target", mask_column="mask"))
    generated_source = {
        "path": str(pairs / "made"),
        "caption": "x",
        "generate": 2,
        "alpha_mask": True,
    }
    with pytest.raises(DitLoraError, match=r"made is generated, so it has no references"):
        scan_sources(DataConfig(sources=[generated_source], height=32, width=48))  # type: ignore[arg-type]
    write_tar(pairs / "a.tar", "7.jpg", "7.txt")
    with pytest.raises(DitLoraError, match="reference_folders and mask_folder are for folders"):
        scan_sources(config(pairs / "a.tar", reference_folders=[folder]))
    (pairs / "tars").mkdir()
    (pairs / "a.tar").rename(pairs / "tars" / "a.tar")
    with pytest.raises(DitLoraError, match="reference_folders and mask_folder are for folders"):
        scan_sources(config(pairs / "tars", mask_folder=folder))


def test_only_some_of_several_sources_have_masks_and_references(pairs: Path) -> None:
    write_files(pairs, "clips/v.mp4", "clips/w.png")
    (pairs / "clips" / "v.txt").write_text("x")
    (pairs / "clips" / "w.txt").write_text("y")
    sources = [
        {"path": str(pairs / "target"), "reference_folders": [str(pairs / "source")]},
        {"path": str(pairs / "clips"), "alpha_mask": True},
        {"path": str(pairs / "target"), "mask_folder": str(pairs / "mask")},
    ]
    scan_result = scan_sources(DataConfig(sources=sources, height=32, width=48))  # type: ignore[arg-type]
    assert references(scan_result)["target/3.webp"] == ["source/3.mp4"]
    assert not references(scan_result)["target-2/3.webp"]
    mask_by_clip = masks(scan_result.clips)
    assert mask_by_clip["target/3.webp"] is mask_by_clip["clips/v.mp4"] is None  # a video is learned whole
    assert mask_by_clip["clips/w.png"] == ("clips/w.png", True)
    assert mask_by_clip["target-2/3.webp"] == ("mask/3.png", False)


def write_tar(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, BytesIO(name.encode()))
    return path


def test_members_of_a_tar_are_references_by_name(tmp_path: Path) -> None:
    """In the order of their numbers, and never the sample's own picture, though one be a video."""
    names = ["7.reference_10.png", "7.reference_2.jpeg", "7.reference.mp4", "7.jpg", "7.txt"]
    other_names = [
        "8.jpg",
        "8.txt",
        "8.reference_mask.png",
        "8.references.png",
        "8.Reference-3.PNG",
    ]
    write_tar(tmp_path / "a.tar", *names, *other_names, "9.png", "9.txt")
    scan_result = scan_sources(config(tmp_path / "a.tar"))
    assert not scan_result.problems
    assert references(scan_result) == {
        "7.jpg": ["7.reference.mp4", "7.reference_2.jpeg", "7.reference_10.png"],
        "8.jpg": ["8.Reference-3.PNG"],
        "9.png": [],
    }
    assert all(isinstance(reference, TarMember) for reference in scan_result.clips[0].references)
    assert masks(scan_result.clips) == {"7.jpg": None, "8.jpg": None, "9.png": None}


def test_members_of_a_tar_are_references_and_masks_by_column(tmp_path: Path) -> None:
    names = ["7.target.jpg", "7.source.png", "7.style.jpg", "7.mask.png", "7.txt"]
    write_tar(tmp_path / "a.tar", *names)
    options = {"reference_columns": ["style", "Source"], "mask_column": "mask"}
    scan_result = scan_sources(config(tmp_path / "a.tar", **options))
    assert references(scan_result) == {"7.target.jpg": ["7.style.jpg", "7.source.png"]}
    assert masks(scan_result.clips) == {"7.target.jpg": ("7.mask.png", False)}
    # Without their columns, four pictures are as many samples' own.
    assert problems(scan_sources(config(tmp_path / "a.tar"))) == [("7", "duplicate_clip")]


def test_what_a_tars_sample_lacks_or_has_twice_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = ["1.jpg", "1.txt"]
    duplicate_names = ["2.jpg", "2.txt", "2.source.jpg", "2.source.png", "2.mask.png", "2.mask.jpg"]
    single_names = ["3.source.jpg"]
    large = ["4.jpg", "4.txt", "4.source.jpg", "4.mask.png"]
    write_tar(tmp_path / "a.tar", *lacks, *duplicate_names, *single_names, *large, "README.md")
    write_tar(tmp_path / "b.tar", "5.jpg", "5.txt", "5.reference.jpg", "5.reference.png")
    # Without columns, the same holds of what is called reference.
    assert problems(scan_sources(config(tmp_path / "b.tar"))) == [("5.jpg", "reference_ambiguous")]
    monkeypatch.setattr(media, "MAX_BYTES", len("4.mask.png") - 1)
    options = {"reference_columns": ["source"], "mask_column": "mask"}
    scan_result = scan_sources(config(tmp_path / "a.tar", **options))
    assert not scan_result.clips
    message_by_problem = {(finding.file, finding.code): finding.message for finding in scan_result.problems}
    assert set(message_by_problem) == {
        ("1.jpg", "reference_missing"),
        ("1.jpg", "mask_missing"),
        ("2.jpg", "reference_ambiguous"),
        ("2.jpg", "mask_ambiguous"),
        ("2.jpg", "too_large"),
        ("3", "missing"),
        ("4.jpg", "too_large"),
    }
    assert message_by_problem["1.jpg", "mask_missing"] == "it has no mask: there is no .mask.png or the like"
    assert message_by_problem["2.jpg", "reference_ambiguous"] == (
        "it has several of one name: .source.jpg, .source.png"
    )
    assert message_by_problem["4.jpg", "too_large"].startswith("4.source.jpg: it has 12 bytes, and 9 are read")
