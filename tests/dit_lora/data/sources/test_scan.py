"""Folders of several layouts and several sources, one list; every offender at once."""

import json
import os
from pathlib import Path

import pytest

from dit_lora.config.recipe import DataConfig
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.scan import find_class_names_in_data, format_class_name, read_clips, scan_sources
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
    assert all(clip.media.name == str(folder / clip.id) for clip in clips)


def test_a_caption_that_is_a_named_pipe_is_a_problem_of_its_clip(folder: Path) -> None:
    write_layout(folder, "txt")
    (folder / "a.txt").unlink()
    os.mkfifo(folder / "a.txt")
    scan_result = scan_sources(config(folder))
    (problem,) = scan_result.problems
    assert "is not a regular file" in problem.message
    assert [clip.id for clip in scan_result.clips] == ["sub/b.mp4"]


def test_line_breaks_in_a_quoted_caption_are_kept(folder: Path) -> None:
    (folder / "metadata.csv").write_bytes(b'file_name,text\r\na.mp4,"a red fox\njumps"\r\n')
    assert [clip.caption for clip in read_clips(config(folder))] == ["a red fox\njumps"]
    write_jsonl(folder, [{"file_name": "a.mp4", "text": "one\u2028two"}])
    text = (folder / "metadata.jsonl").read_text().replace("\\u2028", "\u2028")
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")
    assert [clip.caption for clip in read_clips(config(folder))] == ["one\u2028two"]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path) -> None:
    (folder / "metadata.csv").write_bytes(b"\xef\xbb\xbffile_name,text\r\na.mp4,a horse\r\n")
    assert [(clip.id, clip.caption) for clip in read_clips(config(folder))] == [("a.mp4", "a horse")]
    (folder / "metadata.jsonl").write_bytes(b'\xef\xbb\xbf{"file_name": "a.mp4", "text": "x"}\r\n\r\n')
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


def test_a_clip_without_its_text_file_has_no_caption(folder: Path) -> None:
    (folder / "a.txt").write_text("a horse")
    with pytest.raises(DitLoraError, match=r"sub/b\.mp4: it has no caption: there is no sub/b\.txt"):
        read_clips(config(folder))


def test_zero_clips_say_which_layouts_there_are(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"no clips in .*metadata\.jsonl.*videos\.txt"):
        read_clips(config(tmp_path))
    write_jsonl(tmp_path, [])
    with pytest.raises(DitLoraError, match="no clips in"):
        read_clips(config(tmp_path))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match=r"the folder .*nowhere does not exist"):
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


def test_a_folder_a_class_gives_its_name_in_words_as_caption(tmp_path: Path) -> None:
    for name in ("BoxingPunchingBag/v_1.avi", "white_shark/a.png", "white_shark/b.JPG", "7/c.webp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"media")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "readme.md").write_text("of the data set")
    clips = read_clips(DataConfig(path=str(tmp_path), height=32, width=32))
    assert {clip.id: clip.caption for clip in clips} == {
        "BoxingPunchingBag/v_1.avi": "Boxing Punching Bag",
        "white_shark/a.png": "white shark",
        "white_shark/b.JPG": "white shark",
        "7/c.webp": "7",
    }


@pytest.mark.parametrize(
    ("folder_name", "words"),
    [
        ("HTMLPage", "HTML Page"),
        ("YoYo", "Yo Yo"),
        ("table-tennis_shot", "table-tennis shot"),
        ("n01440764", "n01440764"),
    ],
)
def test_class_names_are_read_as_words(folder_name: str, words: str) -> None:
    assert format_class_name(folder_name) == words


def test_class_folders_without_media_are_all_named(tmp_path: Path) -> None:
    for name in ("cats/a.png", "dogs/notes.md", "birds/b.psd"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DitLoraError) as error:
        read_clips(DataConfig(path=str(tmp_path), height=32, width=32))
    for name in ("birds", "dogs"):
        assert f"- {name}: this class folder holds no video and no image" in str(error.value)


def test_one_text_file_makes_it_a_folder_of_captions(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    for name in ("cats/a.png", "cats/b.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "cats" / "a.txt").write_text("a cat")
    with pytest.raises(DitLoraError, match=r"cats/b.png: it has no caption"):
        read_clips(DataConfig(path=str(tmp_path), height=32, width=32))


def test_a_column_of_first_images_is_read_where_it_is_asked_for(folder: Path) -> None:
    (folder / "first.png").write_bytes(b"image")
    rows = [
        {"file_name": "a.mp4", "text": "x", "start": "first.png"},
        {"file_name": "sub/b.mp4", "text": "y", "start": None},
    ]
    write_jsonl(folder, rows)
    assert [clip.image for clip in read_clips(config(folder))] == [None, None]
    clips = read_clips(config(folder, image_column="start"))
    assert [clip.image for clip in clips] == [MediaFile(folder / "first.png"), None]
    with pytest.raises(DitLoraError, match=r"no column for the first image \(image_column\)"):
        read_clips(config(folder, image_column="begin"))
    write_jsonl(folder, [{**rows[0], "start": "gone.png"}])
    with pytest.raises(DitLoraError, match=r"a\.mp4: no such first image: .*gone\.png"):
        read_clips(config(folder, image_column="start"))
    (folder / "metadata.jsonl").unlink()
    for column in ("image_column", "caption_column"):
        with pytest.raises(DitLoraError, match=f"{column} needs metadata"):
            read_clips(config(folder, **{column: "start"}))


def test_a_label_of_zero_is_a_caption(folder: Path) -> None:
    write_jsonl(folder, [{"file_name": "a.mp4", "label": 0}, {"file_name": "sub/b.mp4", "label": 1}])
    assert [clip.caption for clip in read_clips(config(folder))] == ["0", "1"]
    write_jsonl(folder, [{"file_name": "a.mp4", "label": None}])
    with pytest.raises(DitLoraError, match="it has no caption"):
        read_clips(config(folder))


def test_everything_wrong_has_its_file_and_code(folder: Path) -> None:
    rows = [
        {"file_name": "a.mp4", "text": "  "},
        {"file_name": "gone.mp4", "text": ["x"]},
        {"file_name": "sub", "text": "a folder"},
        {"file_name": "sub/b.mp4", "text": "y"},
        {"file_name": "./sub/b.mp4", "text": "z"},
        {"file_name": "", "text": "z"},
    ]
    write_jsonl(folder, rows)
    with (folder / "metadata.jsonl").open("a") as table:
        table.write("{torn\n")
    scan_result = scan_sources(config(folder))
    assert scan_result.clips == []
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [
        ("metadata.jsonl line 7", "unreadable"),
        ("a.mp4", "caption_empty"),
        ("gone.mp4", "missing"),
        ("gone.mp4", "caption_not_text"),
        ("sub", "missing"),
        ("sub/b.mp4", "duplicate_clip"),
        ("metadata.jsonl row 6", "missing"),
    ]


def test_what_is_right_is_found_beside_what_is_wrong(folder: Path) -> None:
    (folder / "a.txt").write_bytes("a café".encode("latin-1"))
    (folder / "sub" / "b.txt").write_text("a cat")
    (folder / "c.png").symlink_to(folder / "gone.png")
    (folder / "c.txt").write_text("a dog")
    scan_result = scan_sources(config(folder))
    assert [clip.id for clip in scan_result.clips] == ["sub/b.mp4"]
    assert [(finding.file, finding.code) for finding in scan_result.problems] == [
        ("c.png", "missing"),
        ("a.mp4", "caption_not_text"),
    ]


def test_links_to_folders_are_followed_and_circles_are_not(folder: Path) -> None:
    write_layout(folder, "txt")
    root = folder / "root"
    root.mkdir()
    (root / "linked").symlink_to(folder / "sub")
    (folder / "sub" / "back").symlink_to(folder / "sub")
    (root / "again").symlink_to(root)
    assert [clip.id for clip in read_clips(config(root))] == ["linked/b.mp4"]


def test_one_caption_stands_for_all_in_every_layout(folder: Path) -> None:
    """DreamBooth's folder of plain images, and any other without its own captions."""
    source = {"path": str(folder), "caption": "a photo of sks dog"}
    for layout in ("plain", "jsonl"):
        if layout == "jsonl":
            write_jsonl(folder, [{"file_name": name} for name in CAPTIONS])
        clips = read_clips(several(source))
        assert {clip.id.partition("/")[2] for clip in clips} == set(CAPTIONS)
        assert {clip.caption for clip in clips} == {"a photo of sks dog"}


def several(*sources: dict, **values: object) -> DataConfig:
    return DataConfig(sources=sources, frames=9, height=32, width=48, fps=8, **values)  # type: ignore[arg-type]


def plain(folder: Path, count: int) -> str:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(b"image")
    return str(folder)


def test_ids_of_several_sources_are_theirs_alone_and_stay_when_one_is_added(tmp_path: Path) -> None:
    first_folder, second_folder = (
        plain(tmp_path / "x" / "dogs", 1),
        plain(tmp_path / "y" / "dogs", 1),
    )
    last_folder = plain(tmp_path / "dogs-2", 1)
    sources = [{"path": path, "caption": path} for path in (first_folder, second_folder, last_folder)]
    ids = [clip.id for clip in read_clips(several(*sources))]
    assert ids == ["dogs/0.png", "dogs-2/0.png", "dogs-2-2/0.png"]
    for count in (1, 2):
        assert [clip.id for clip in read_clips(several(*sources[:count]))] == ids[:count]


def test_repeats_and_weights_say_how_often_a_sample_comes(tmp_path: Path) -> None:
    small_source = {"path": plain(tmp_path / "few", 2), "caption": "x", "loss_weight": 0.5}
    large_source = {"path": plain(tmp_path / "many", 5), "caption": "y"}
    clips = read_clips(several({**small_source, "repeats": 3}, large_source))
    assert [(clip.times_per_epoch, clip.loss_weight) for clip in clips] == [(3, 0.5)] * 2 + [(1, 1)] * 5
    # Shares 3 to 1: the five come once, so the two make 15 in an epoch.
    clips = read_clips(several({**small_source, "weight": 3}, {**large_source, "weight": 1}))
    assert [clip.times_per_epoch for clip in clips] == pytest.approx([7.5] * 2 + [1] * 5)
    clips = read_clips(several({**small_source, "weight": 1}, {**large_source, "weight": 5}))
    assert [clip.times_per_epoch for clip in clips] == pytest.approx([1] * 2 + [2] * 5)


def test_errors_name_the_source(folder: Path, tmp_path: Path) -> None:
    sources = [
        {"path": str(tmp_path / "nowhere")},
        {"path": str(folder), "caption": "x"},
        {"path": str(folder), "caption_column": "long"},
    ]
    with pytest.raises(DitLoraError) as error:
        read_clips(several(*sources))
    assert "data.sources[0]: the folder" in str(error.value)
    assert "data.sources[2]: caption_column needs" in str(error.value)
    assert "data.sources[1]" not in str(error.value)
    with pytest.raises(DitLoraError, match=rf"{folder.name}-2/a\.mp4: it has no caption"):
        read_clips(several(sources[1], {"path": str(folder)}))


def test_a_folder_that_is_yet_to_be_generated_is_empty(tmp_path: Path) -> None:
    own_source = {"path": plain(tmp_path / "own", 2), "caption": "a sks dog", "weight": 1}
    prior = {"path": "prior/dogs", "caption": "a dog", "generate": 3, "weight": 0.1}
    clips = read_clips(several(own_source, prior))
    assert [(clip.caption, clip.times_per_epoch) for clip in clips] == [("a sks dog", 1)] * 2


def test_names_of_classes_come_from_the_captions_and_one_caption_needs_no_reading(
    tmp_path: Path,
) -> None:
    plain(tmp_path / "classes" / "red_fox", 1)
    folders = {"path": str(tmp_path / "classes")}
    prior = {"path": str(tmp_path / "nowhere"), "caption": "a dog"}
    assert find_class_names_in_data(several(folders, prior)) == ["a dog", "red fox"]
    assert find_class_names_in_data(several(prior)) == ["a dog"]
    (tmp_path / "classes" / "empty").mkdir()
    with pytest.raises(DitLoraError, match="empty: this class folder"):
        find_class_names_in_data(several(folders, prior))
    assert find_class_names_in_data(several(folders, rejects="skip")) == ["red fox"]
