"""Nothing of a folder is left out silently; kohya's folders and near misses of names are said."""

import json
import unicodedata
from pathlib import Path

import pytest

from dit_lora.config.recipe import DataConfig
from dit_lora.data.sources.scan import read_clips, scan_sources
from dit_lora.errors import DitLoraError


def config(folder: Path, **values: object) -> DataConfig:
    return DataConfig(path=str(folder), height=32, width=48, **values)  # type: ignore[arg-type]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = "a caption" if name.endswith(".txt") else "pixels"
        (folder / name).write_text(text)


def write_table(folder: Path, *rows: dict[str, object]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def notes(folder: Path, **values: object) -> list[str]:
    scan_notes = scan_sources(config(folder, **values)).notes
    assert all(note.startswith(f"{folder}: ") for note in scan_notes)
    return [note.removeprefix(f"{folder}: ") for note in scan_notes]


def test_every_picture_that_pillow_reads_is_a_sample(tmp_path: Path) -> None:
    ends = ("avif", "gif", "jfif", "jpe", "apng", "PNG")
    write(tmp_path, *(f"{end}.{end}" for end in ends), *(f"{end}.txt" for end in ends))
    assert [clip.id for clip in read_clips(config(tmp_path))] == sorted(f"{e}.{e}" for e in ends)
    assert notes(tmp_path) == []


def test_what_a_folder_leaves_out_is_counted_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.txt", "a.json", "README.md", "notes.csv")
    assert notes(tmp_path) == []
    write(tmp_path, "b.heic", "c.HEIC", "c.txt", "d.wmv", "e.strange", "e.txt", "lonely.txt")
    unread, orphans = notes(tmp_path)
    assert unread.startswith("4 files are left out, because their format is not supported: 2 .heic (Pillow")
    assert "1 .wmv (convert to mp4)" in unread
    assert "1 .strange (next to a caption" in unread
    assert orphans.endswith("1 file is left out, because no picture or video has their name: lonely.txt")


def test_pictures_that_a_table_does_not_list_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "mask.png", "new.png", "sub/new.mp4", "b.heic", "masks/a.png")
    write_table(tmp_path, {"file_name": "./a.png", "text": "a", "mask": "mask.png"})
    unlisted, unread = notes(tmp_path)
    assert "3 files are left out, because metadata.jsonl does not list them: masks/a.png, new.png" in unlisted
    assert "1 .heic" in unread
    # A folder of masks is no folder of samples, and one in data.media may serve many tables.
    unlisted = notes(tmp_path, mask_folder=str(tmp_path / "masks"))[0]
    assert "2 files are left out" in unlisted
    assert notes(tmp_path, media=str(tmp_path)) == []
    # What a table names is a problem of its own.
    write_table(tmp_path, {"file_name": "b.heic", "text": "b"})
    assert "heic" not in " ".join(notes(tmp_path))


def test_kohyas_folders_give_captions_and_repeats(tmp_path: Path) -> None:
    write(tmp_path, "10_sks my_Dog/a.png", "10_sks my_Dog/b.png", "2_dog/c.png")
    clips = read_clips(config(tmp_path))
    assert {(clip.caption, clip.times_per_epoch) for clip in clips} == {
        ("sks my_Dog", 10),
        ("dog", 2),
    }
    (note,) = notes(tmp_path)
    assert "'10_sks my_Dog' is the caption 'sks my_Dog', 10 times an epoch" in note
    # Repeats of the source multiply those of the folder, and captions beside pictures are theirs.
    write(tmp_path, *(f"{clip.id[:-4]}.txt" for clip in clips))
    source = {"path": str(tmp_path), "repeats": 3}
    data = DataConfig(sources=(source,), height=32, width=48)  # type: ignore[arg-type]
    assert {(clip.caption, clip.times_per_epoch) for clip in read_clips(data)} == {
        ("a caption", 30),
        ("a caption", 6),
    }


def test_numbered_classes_are_no_repeats(tmp_path: Path) -> None:
    write(tmp_path, "001_red_car/a.png", "002_boat/b.png")
    clips = read_clips(config(tmp_path))
    assert [(clip.caption, clip.times_per_epoch) for clip in clips] == [
        ("001 red car", 1),
        ("002 boat", 1),
    ]
    assert notes(tmp_path) == []


def test_near_misses_of_names_are_said(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "upper.png", "a.txt")
    (tmp_path / "upper.TXT").write_text("a caption")
    with pytest.raises(DitLoraError, match=r"found 'upper\.TXT', which differs in upper"):
        read_clips(config(tmp_path))
    composed, split = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))
    write(tmp_path, split)
    write_table(tmp_path, {"file_name": composed, "text": "x"})
    with pytest.raises(DitLoraError, match=r"found .*, which differs in another Unicode form"):
        read_clips(config(tmp_path))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_captions_of_another_encoding_are_refused_with_the_remedy(tmp_path: Path, encoding: str) -> None:
    write(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes("ein größeres Café".encode(encoding))
    name = {"cp1252": "Windows-1252", "utf-16": "UTF-16"}[encoding]
    with pytest.raises(DitLoraError, match=f"probably {name}: save it as UTF-8.*iconv -f"):
        read_clips(config(tmp_path))
    (tmp_path / "metadata.jsonl").write_bytes('{"text": "größer"}'.encode(encoding))
    with pytest.raises(DitLoraError, match=f"probably {name}"):
        read_clips(config(tmp_path))
