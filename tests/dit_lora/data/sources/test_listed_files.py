"""Which files a list may name, and which captions any source may have."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.data import SourceConfig
from dit_lora.config.recipe import DataConfig
from dit_lora.data.sources.scan import scan_sources
from dit_lora.errors import DitLoraError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "sub/b.mp4"):
        (tmp_path / name).write_bytes(b"video")
    return tmp_path


def config(folder: Path, **values: Any) -> DataConfig:
    return DataConfig(path=str(folder), frames=9, height=32, width=48, fps=8, **values)


def write_jsonl(folder: Path, rows: list[dict]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def test_a_list_names_files_below_its_folder_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Others are refused by name, first images too; an absolute name may say the folder itself."""
    outside_file = tmp_path_factory.mktemp("other") / "c.mp4"
    outside_file.write_bytes(b"video")
    table_folder = folder / "table"
    (table_folder / "sub").mkdir(parents=True)
    (table_folder / "d.mp4").write_bytes(b"video")
    (table_folder / "link").symlink_to(outside_file.parent)
    names = [str(outside_file), "../a.mp4", "sub/../../a.mp4", f"{table_folder}/../a.mp4"]
    allowed = [str(table_folder / "d.mp4"), "link/c.mp4"]
    rows = [{"file_name": name, "text": "x", "first": None} for name in (*names, *allowed)]
    # By the name: what `..` after a link would lead to is not asked.
    rows.append({"file_name": "link/../sub/../e.mp4", "text": "x", "first": None})
    (table_folder / "e.mp4").write_bytes(b"video")
    rows.append({"file_name": "sub/f.mp4", "text": "x", "first": "../../a.mp4"})
    (table_folder / "sub" / "f.mp4").write_bytes(b"video")
    write_jsonl(table_folder, rows)
    scan_result = scan_sources(config(table_folder, image_column="first"))
    problems = [(finding.file, finding.code) for finding in scan_result.problems]
    assert problems == [(name, "unsafe_path") for name in (*names, "sub/f.mp4")]
    assert f"../../a.mp4 is outside of {table_folder}" in scan_result.problems[-1].message
    media_paths = {clip.id: clip.media.location for clip in scan_result.clips}
    assert media_paths == {name: str(table_folder / name) for name in ("d.mp4", "link/c.mp4", "e.mp4")}
    assert all(clip.media.exists() for clip in scan_result.clips)


@pytest.mark.parametrize("listing", ["metadata.csv", "videos.txt"])
def test_media_is_the_folder_that_the_files_of_a_list_are_below(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, listing: str
) -> None:
    lists = tmp_path_factory.mktemp("lists")
    if listing == "videos.txt":
        (lists / listing).write_text(f"a.mp4\n{folder}/sub/b.mp4\n../x.mp4\n")
        (lists / "prompts.txt").write_text("one\ntwo\nthree\n")
    else:
        (lists / listing).write_text(f"file_name,text\na.mp4,one\n{folder}/sub/b.mp4,two\n../x.mp4,three\n")
    scan_result = scan_sources(config(lists, media=str(folder)))
    assert [(clip.id, clip.caption) for clip in scan_result.clips] == [
        ("a.mp4", "one"),
        ("sub/b.mp4", "two"),
    ]
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [("../x.mp4", "unsafe_path")]


def test_media_without_a_list_is_refused(folder: Path) -> None:
    with pytest.raises(DitLoraError, match=r"data\.media is the folder of files that a list names"):
        scan_sources(config(folder, media=str(folder)))
    write_jsonl(folder, [{"file_name": "a.mp4", "text": "x"}])
    with pytest.raises(DitLoraError, match="the folder of media"):
        scan_sources(config(folder, media=str(folder / "gone")))


def test_names_that_no_file_system_takes_are_missing_files(folder: Path) -> None:
    names = ["x" * 5000 + ".mp4", "nul\0.mp4", "half\ud83d.mp4"]
    rows = [{"file_name": name, "text": "x", "first": name} for name in names]
    write_jsonl(folder, rows)
    scan_result = scan_sources(config(folder, image_column="first"))
    assert {(finding.file, finding.code) for finding in scan_result.problems} == {(name, "missing") for name in names}


@pytest.mark.parametrize(
    ("caption", "code"),
    [
        ("\u200b\u2060", "caption_empty"),
        ("\0\x07", "caption_empty"),
        ("\u3164\u2800", "caption_empty"),
        ("a cat \ud83d sits", "caption_not_text"),
        ("a cat " * 20_000, "caption_long"),
    ],
)
def test_a_caption_that_cannot_be_trained_on_is_refused_from_every_source(
    folder: Path, caption: str, code: str
) -> None:
    write_jsonl(folder, [{"file_name": "a.mp4", "text": caption}])
    scan_result = scan_sources(config(folder))
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [("a.mp4", code)]
    source = SourceConfig(path=str(folder / "sub"), caption=caption)
    scan_result = scan_sources(DataConfig(sources=(source,), height=32, width=48))
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [("sub/b.mp4", code)]
    if code == "caption_long":
        (folder / "metadata.jsonl").unlink()
        (folder / "a.txt").write_text(caption * 4)
        (folder / "sub" / "b.txt").write_text("a dog")
        scan_result = scan_sources(config(folder))
        assert ("a.mp4", code) in [(finding.file, finding.code) for finding in scan_result.problems]
