"""metadata files: their columns, and rows that are odd."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.recipe import DataConfig
from dit_lora.data.sources.scan import read_clips, scan_sources
from dit_lora.errors import DitLoraError

ROWS = [
    {"file_name": "a.mp4", "text": "a horse", "frames": 81},
    {"file_name": "b.mp4", "text": "zwei Füchse", "frames": 49},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"video")
    return tmp_path


def config(folder: Path, **values: Any) -> DataConfig:
    return DataConfig(path=str(folder), frames=9, height=32, width=48, fps=8, **values)


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra dit-lora[datasets]")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "metadata.parquet")
    return folder / "metadata.parquet"


def test_parquet_is_read_as_the_same_rows_of_jsonl_are(folder: Path) -> None:
    rows = [*ROWS, {"file_name": "gone.mp4", "text": None, "frames": 1}]
    write_parquet(folder, rows)
    scan_result = scan_sources(config(folder))
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert scan_sources(config(folder)) == scan_result
    assert [clip.caption for clip in scan_result.clips] == ["a horse", "zwei Füchse"]
    assert [finding.code for finding in scan_result.problems] == ["missing", "caption_missing"]


def test_of_parquet_only_the_columns_that_are_needed_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(folder, [{**row, "thumbnail": b"x"} for row in ROWS])
    from pyarrow import parquet

    requested_columns, read_table = [], parquet.read_table

    def spy(path: Path, *, columns: list[str], **options: Any) -> Any:
        requested_columns.append(columns)
        return read_table(path, columns=columns, **options)

    monkeypatch.setattr(parquet, "read_table", spy)
    read_clips(config(folder))
    assert requested_columns == [["file_name", "text"]]


def test_a_broken_parquet_file_and_a_missing_package_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_parquet(folder, ROWS)
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(DitLoraError, match=r"cannot read .*metadata\.parquet"):
        read_clips(config(folder))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DitLoraError, match=r"pyarrow package; pip install 'dit-lora\[datasets\]'"):
        read_clips(config(folder))


def test_a_csv_that_is_no_csv_is_named_by_where(folder: Path) -> None:
    (folder / "metadata.csv").write_text('file_name,text\na.mp4,"' + "x" * 200_000 + '"\n')
    with pytest.raises(DitLoraError, match=r"metadata\.csv after line 1: field larger than"):
        read_clips(config(folder))


def test_a_row_with_too_few_cells_has_no_caption(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,text\na.mp4,a horse\nb.mp4\n")
    assert [(finding.file, finding.code) for finding in scan_sources(config(folder)).problems] == [
        ("b.mp4", "caption_missing")
    ]
