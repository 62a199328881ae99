"""Captions go into a folder's metadata.jsonl, and nothing else of it changes."""

from pathlib import Path

import pytest

from dit_lora.config.load import load_folder
from dit_lora.data.sources.caption_table import CaptionTable, locked_table
from dit_lora.data.sources.made_captions import MadeCaptions
from dit_lora.data.sources.scan import scan
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
    assert table.missing == ["b.png", "deep/c.mp4"]
    with locked_table(tmp_path) as table:
        table.put({"b.png": 'a "b"', "deep/c.mp4": "ç"})
    written = (tmp_path / "metadata.jsonl").read_bytes().decode().split("\n")
    assert written[:2] == lines[:2]
    assert written[2] == (
        '{"fps": 4, "video": "./b.png", "caption": "a \\"b\\"", "mask": "mask.png"}\r'
    )
    assert written[3:] == ['{"video": "deep/c.mp4", "caption": "ç"}\r', ""]
    again = CaptionTable.read(tmp_path)
    assert again.captions == {"a.mp4": "é kept", "b.png": 'a "b"', "deep/c.mp4": "ç"}
    assert not again.missing


def test_captions_of_text_files_come_along_into_a_new_table(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.mp4")
    (tmp_path / "a.txt").write_text("by\nhand ")
    table = CaptionTable.read(tmp_path)
    assert (table.captions, table.missing) == ({"a.mp4": "by hand"}, ["b.mp4"])
    with pytest.raises(RuntimeError, match="within locked_table"):
        table.put({"b.mp4": "made"})
    with locked_table(tmp_path) as table:
        table.put({"b.mp4": "made"})
    assert (tmp_path / "a.txt").read_text() == "by\nhand "
    clips = scan(load_folder(str(tmp_path))).clips  # as training reads it
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
def test_a_folder_that_keeps_captions_elsewhere_is_refused(
    tmp_path: Path, name: str, words: str
) -> None:
    folder(tmp_path, name, *(["a.mp4"] if "." in name and name != "a.tar" else []))
    with pytest.raises(DitLoraError, match=words):
        CaptionTable.read(tmp_path)


def test_what_waits_is_moved_once_and_never_over_another_caption(tmp_path: Path) -> None:
    folder(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    one, other = MadeCaptions(tmp_path), MadeCaptions(tmp_path, rank=1)
    with one.held():
        with pytest.raises(DitLoraError, match="another process writes captions"), other.held():
            pass
        one.add("a.mp4", "first")
        other.add("b.mp4", "second\nline")
        with (tmp_path / ".captions" / "part_1.jsonl").open("a") as file:
            file.write('{"file": "c.mp4", "capt')  # of a process that was killed
        with locked_table(tmp_path) as table:
            table.put({"a.mp4": "by hand"})
        assert other.merge(of_all=True) == 1
        assert other.merge(of_all=True) == 0
    table = CaptionTable.read(tmp_path)
    assert table.captions == {"a.mp4": "by hand", "b.mp4": "second\nline"}
    assert table.missing == ["c.mp4"]
