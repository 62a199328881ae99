"""Four layouts, one list; every offender at once."""

import json
from pathlib import Path

import pytest

from dit_lora.config import DataConfig
from dit_lora.data.sources import read_clips
from dit_lora.errors import DitLoraError

CAPTIONS = {"a.mp4": "a horse, galloping", "sub/b.mp4": 'a "quoted" cat'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in CAPTIONS:
        (tmp_path / name).write_bytes(b"video")
    return tmp_path


def config(folder: Path, **values: object) -> DataConfig:
    return DataConfig(path=str(folder), frames=9, height=32, width=48, fps=8, **values)  # type: ignore[arg-type]


def write_jsonl(folder: Path, rows: list[dict]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def write_layout(folder: Path, layout: str) -> None:
    if layout == "jsonl":
        write_jsonl(folder, [{"file_name": n, "text": c} for n, c in CAPTIONS.items()])
    elif layout == "csv":
        rows = "".join(f'{n},"{c.replace(chr(34), chr(34) * 2)}"\n' for n, c in CAPTIONS.items())
        (folder / "metadata.csv").write_text("file_name,caption\n" + rows)
    elif layout == "cogvideo":
        (folder / "videos.txt").write_text("\n".join(CAPTIONS) + "\n")
        (folder / "prompts.txt").write_text("\n".join(CAPTIONS.values()) + "\n")
    else:
        for name, caption in CAPTIONS.items():
            (folder / name).with_suffix(".txt").write_text(caption + "\n")


@pytest.mark.parametrize("layout", ["jsonl", "csv", "cogvideo", "txt"])
def test_each_layout_gives_the_same_clips(folder: Path, layout: str) -> None:
    write_layout(folder, layout)
    clips = read_clips(config(folder))
    assert {clip.id: clip.caption for clip in clips} == CAPTIONS
    assert all(clip.path == folder / clip.id for clip in clips)


def test_line_breaks_in_a_quoted_caption_are_kept(folder: Path) -> None:
    (folder / "metadata.csv").write_bytes(b'file_name,text\r\na.mp4,"a red fox\njumps"\r\n')
    assert [clip.caption for clip in read_clips(config(folder))] == ["a red fox\njumps"]
    write_jsonl(folder, [{"file_name": "a.mp4", "text": "one\u2028two"}])
    text = (folder / "metadata.jsonl").read_text().replace("\\u2028", "\u2028")
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")
    assert [clip.caption for clip in read_clips(config(folder))] == ["one\u2028two"]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path) -> None:
    (folder / "metadata.csv").write_bytes(b"\xef\xbb\xbffile_name,text\r\na.mp4,a horse\r\n")
    assert [(clip.id, clip.caption) for clip in read_clips(config(folder))] == [
        ("a.mp4", "a horse")
    ]
    (folder / "metadata.jsonl").write_bytes(
        b'\xef\xbb\xbf{"file_name": "a.mp4", "text": "x"}\r\n\r\n'
    )
    assert [(clip.id, clip.caption) for clip in read_clips(config(folder))] == [("a.mp4", "x")]


def test_hidden_folders_are_passed_over_and_upper_case_endings_read(folder: Path) -> None:
    write_layout(folder, "txt")
    (folder / ".trash").mkdir()
    (folder / ".trash" / "old.mp4").write_bytes(b"video")
    (folder / "C.MP4").write_bytes(b"video")
    (folder / "C.txt").write_text("c")
    assert sorted(clip.id for clip in read_clips(config(folder))) == ["C.MP4", *sorted(CAPTIONS)]


def test_missing_files_empty_captions_and_doubles_are_listed_at_once(folder: Path) -> None:
    write_jsonl(
        folder,
        [
            {"file_name": "a.mp4", "text": "  "},
            {"file_name": "gone.mp4", "text": "x"},
            {"file_name": "sub/b.mp4", "text": "y"},
            {"file_name": "sub/b.mp4", "text": "z"},
        ],
    )
    with pytest.raises(DitLoraError) as error:
        read_clips(config(folder))
    message = str(error.value)
    assert "a.mp4: its caption is empty" in message
    assert "gone.mp4: no such file" in message
    assert "sub/b.mp4: listed twice" in message


def test_a_clip_without_its_text_file_has_an_empty_caption(folder: Path) -> None:
    (folder / "a.txt").write_text("a horse")
    with pytest.raises(DitLoraError, match=r"sub/b\.mp4: its caption is empty"):
        read_clips(config(folder))


def test_zero_clips_say_which_layouts_there_are(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"no clips in .*metadata\.jsonl.*videos\.txt"):
        read_clips(config(tmp_path))
    write_jsonl(tmp_path, [])
    with pytest.raises(DitLoraError, match="no clips in"):
        read_clips(config(tmp_path))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"no folder .*nowhere"):
        read_clips(config(tmp_path / "nowhere"))


def test_the_caption_column_can_be_chosen_and_must_exist(folder: Path) -> None:
    write_jsonl(folder, [{"file_name": n, "text": c, "short": n} for n, c in CAPTIONS.items()])
    assert [c.caption for c in read_clips(config(folder, caption_column="short"))] == list(CAPTIONS)
    with pytest.raises(DitLoraError, match=r"looked for long among file_name, text, short"):
        read_clips(config(folder, caption_column="long"))


def test_unequal_line_counts_are_refused(folder: Path) -> None:
    write_layout(folder, "cogvideo")
    (folder / "prompts.txt").write_text("only one\n")
    with pytest.raises(DitLoraError, match=r"prompts\.txt has 1 lines and videos\.txt 2"):
        read_clips(config(folder))
    (folder / "prompts.txt").unlink()
    with pytest.raises(DitLoraError, match=r"prompts\.txt is missing"):
        read_clips(config(folder))


def test_broken_json_lines_are_numbered(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "a.mp4", "text": "x"}\n{oops\n[1]\n')
    with pytest.raises(DitLoraError, match=r"(?s)line 2.*line 3: not an object"):
        read_clips(config(folder))
