"""Captions go into a folder's metadata.jsonl, and nothing else of it changes."""

import os
import re
from pathlib import Path

import pytest

from dit_lora.config.load import load_folder_config
from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.data.sources.made_captions import GeneratedCaptions
from dit_lora.data.sources.scan import scan_sources
from dit_lora.errors import DitLoraError


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"media")
    return root


def test_other_lines_and_columns_keep_their_bytes(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.png", "deep/c.mp4", "mask.png")
    lines = [
        '{"video": "a.mp4",   "caption": "é kept", "fps": 8}\r',
        "not json",
        '{"fps": 4, "video": "./b.png", "caption": null, "mask": "mask.png"}\r',
    ]
    (tmp_path / "metadata.jsonl").write_bytes("\n".join(lines).encode() + b"\n")
    table = CaptionTable.read(tmp_path)
    assert table.media == ["a.mp4", "b.png", "deep/c.mp4"]  # a mask is no sample
    assert table.uncaptioned_files == ["b.png", "deep/c.mp4"]
    with lock_table(tmp_path) as table:
        table.write_captions({"b.png": 'a "b"', "deep/c.mp4": "ç"})
    written = (tmp_path / "metadata.jsonl").read_bytes().decode().split("\n")
    assert written[:2] == lines[:2]
    assert written[2] == ('{"fps": 4, "video": "./b.png", "caption": "a \\"b\\"", "mask": "mask.png"}\r')
    assert written[3:] == ['{"video": "deep/c.mp4", "caption": "ç"}\r', ""]
    reread = CaptionTable.read(tmp_path)
    assert reread.captions == {"a.mp4": "é kept", "b.png": 'a "b"', "deep/c.mp4": "ç"}
    assert not reread.uncaptioned_files


def test_captions_of_text_files_come_along_into_a_new_table(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.mp4")
    (tmp_path / "a.txt").write_text("by\nhand ")
    table = CaptionTable.read(tmp_path)
    assert (table.captions, table.uncaptioned_files) == ({"a.mp4": "by hand"}, ["b.mp4"])
    with pytest.raises(RuntimeError, match="inside lock_table"):
        table.write_captions({"b.mp4": "made"})
    with lock_table(tmp_path) as table:
        table.write_captions({"b.mp4": "made"})
    assert (tmp_path / "a.txt").read_text() == "by\nhand "
    clips = scan_sources(load_folder_config(str(tmp_path))).clips  # as training reads it
    assert {clip.id: clip.caption for clip in clips} == {"a.mp4": "by hand", "b.mp4": "made"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metadata.csv", r"captions in metadata\.csv"),
        ("prompts.txt", r"captions in prompts\.txt"),
        ("a.tar", "tar files, whose captions lie in them"),
        ("README", "no clip and no picture"),
    ],
)
def test_a_folder_that_keeps_captions_elsewhere_is_refused(tmp_path: Path, name: str, words: str) -> None:
    folder(tmp_path, name, *(["a.mp4"] if "." in name and name != "a.tar" else []))
    with pytest.raises(DitLoraError, match=words):
        CaptionTable.read(tmp_path)


def test_what_waits_is_moved_once_and_never_over_another_caption(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    first_writer, second_writer = GeneratedCaptions(tmp_path), GeneratedCaptions(tmp_path, rank=1)
    with first_writer.lock_folder():
        with (
            pytest.raises(DitLoraError, match="another process is writing captions"),
            second_writer.lock_folder(),
        ):
            pass
        first_writer.add("a.mp4", "first")
        second_writer.add("b.mp4", "second\nline")
        with (tmp_path / ".captions" / "part_1.jsonl").open("a") as file:
            file.write('{"file": "c.mp4", "capt')  # of a process that was killed
        with lock_table(tmp_path) as table:
            table.write_captions({"a.mp4": "by hand"})
        assert second_writer.merge_into_table(include_all=True) == 1
        assert second_writer.merge_into_table(include_all=True) == 0
    table = CaptionTable.read(tmp_path)
    assert table.captions == {"a.mp4": "by hand", "b.mp4": "second\nline"}
    assert table.uncaptioned_files == ["c.mp4"]


def put(root: Path, captions: dict[str, str]) -> bytes:
    with lock_table(root) as table:
        table.write_captions(captions)
    return (root / "metadata.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            b'\xef\xbb\xbf{"file_name": "a.mp4", "fps": 1.50e1, "n": 12345678901234567890, "text": "old"}',
            b'\xef\xbb\xbf{"file_name": "a.mp4", "fps": 1.50e1, "n": 12345678901234567890, "text": "new"}',
        ),
        (
            b' { "text":"old" ,"x":{"text":"\\u00e9}"},\t"file_name":"\\u0061.mp4"} \r\n',
            b' { "text":"new" ,"x":{"text":"\\u00e9}"},\t"file_name":"\\u0061.mp4"} \r\n',
        ),
        (
            b'{"file_name": "a.mp4", "text": "1", "text": "old"}\n\n',
            b'{"file_name": "a.mp4", "text": "1", "text": "new"}\n\n',
        ),
        (b'{"file_name": "a.mp4"  }\n', b'{"file_name": "a.mp4", "text": "new"  }\n'),
        (b"", b'{"file_name": "a.mp4", "text": "new"}\n'),
        (b"[1]\r\n", b'[1]\r\n{"file_name": "a.mp4", "text": "new"}\r\n'),
    ],
)
def test_an_edit_changes_the_caption_and_no_other_byte(tmp_path: Path, before: bytes, after: bytes) -> None:
    (folder(tmp_path, "a.mp4") / "metadata.jsonl").write_bytes(before)
    assert put(tmp_path, {"a.mp4": "new"}) == after


def test_a_table_keeps_its_mode_and_the_link_to_it(tmp_path: Path) -> None:
    root, table = folder(tmp_path / "clips", "a.mp4"), tmp_path / "captions.jsonl"
    table.write_text('{"file_name": "a.mp4", "text": "old"}\n')
    table.chmod(0o660)
    (root / "metadata.jsonl").symlink_to("../captions.jsonl")
    put(root, {"a.mp4": "new"})
    assert (root / "metadata.jsonl").is_symlink()
    assert table.read_text() == '{"file_name": "a.mp4", "text": "new"}\n'
    assert table.stat().st_mode & 0o777 == 0o660
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["captions.jsonl"]


def test_names_that_are_not_utf8_have_captions_too(tmp_path: Path) -> None:
    undecodable_name = os.fsdecode(b"caf\xe9.mp4")
    folder(tmp_path, undecodable_name, "ok.mp4")
    captions = GeneratedCaptions(tmp_path)
    with captions.lock_folder():
        captions.add(undecodable_name, "made")
        assert captions.merge_into_table(include_all=True) == 1
    put(tmp_path, {"ok.mp4": "ok"})
    assert CaptionTable.read(tmp_path).captions == {undecodable_name: "made", "ok.mp4": "ok"}
    clips = scan_sources(load_folder_config(str(tmp_path))).clips
    assert {clip.id: clip.caption for clip in clips} == {undecodable_name: "made", "ok.mp4": "ok"}


def test_a_text_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    (tmp_path / "a.txt").write_text("text")
    file = tmp_path / "b.txt"
    for make, reason in (
        (lambda: file.write_bytes(b"\xff\xfe\x00"), "invalid start byte"),
        # From a named pipe, reading would wait for a writer.
        (lambda: os.mkfifo(file), "is not a regular file"),
        (lambda: file.symlink_to("nowhere"), "No such file"),
    ):
        make()
        with pytest.raises(DitLoraError, match=re.escape(f"cannot read {file} as UTF-8 text")) as refused:
            CaptionTable.read(tmp_path)
        assert reason in str(refused.value)
        file.unlink()


def test_a_folder_is_read_again_only_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, "a.mp4", "deep/b.mp4")
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path / "deep", tmp_path):
        os.utime(path, (1, 1))  # long ago
    scans: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or scandir(path))
    table = CaptionTable.read(tmp_path)
    assert len(scans) == 2
    assert CaptionTable.read(tmp_path, table) is table
    (tmp_path / "a.txt").write_text("other")
    table = CaptionTable.read(tmp_path, table)
    assert table.captions == {"a.mp4": "other"}
    assert len(scans) == 2
    (tmp_path / "deep" / "c.mp4").write_bytes(b"media")
    table = CaptionTable.read(tmp_path, table)
    assert table.media == ["a.mp4", "deep/b.mp4", "deep/c.mp4"]
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.mp4", "mask": "deep/b.mp4"}\n')
    table = CaptionTable.read(tmp_path, table)
    assert (table.media, table.captions) == (["a.mp4", "deep/c.mp4"], {})
