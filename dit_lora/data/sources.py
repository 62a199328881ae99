"""Where clips, images and captions come from: five layouts of a folder, and datasets; one list of `Clip`."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dit_lora.config import DataConfig
from dit_lora.data.datasets_source import exported, is_hub_name, is_saved_dataset
from dit_lora.data.media import VIDEO_SUFFIXES, Media, MediaFile, is_image
from dit_lora.errors import DitLoraError, listed

CAPTION_COLUMNS = ("text", "caption", "prompt", "label")
# `file_name` is the Hugging Face videofolder layout's.
FILE_COLUMNS = ("file_name", "video", "path")


@dataclass(frozen=True)
class Clip:
    """One video or image file and what it shows; `id` is its path below the data folder."""

    id: str
    media: Media
    caption: str
    """Of a folder a class, the class's name."""
    image: Media | None = None
    """Its first image, where the data has one of its own."""


def read_clips(data: DataConfig, cache: Path | None = None) -> list[Clip]:
    """Every clip of `data.path`; raises one error that lists all missing files and empty captions.

    The images of a dataset are written below `cache` first.
    """
    root = Path(data.path).expanduser()
    if is_saved_dataset(root) or (not root.exists() and is_hub_name(data.path)):
        wanted = (data.caption_column,) if data.caption_column else CAPTION_COLUMNS
        root = exported(data.path, wanted, cache or Path("cache"))
        data = data.model_copy(update={"caption_column": "text"})
    if not root.is_dir():
        raise DitLoraError(f"data.path: no folder {data.path}")
    layout, rows = _rows(root, data)
    clips = [
        Clip(
            name,
            MediaFile(root / name),
            caption.strip(),
            MediaFile(root / image) if image else None,
        )
        for name, caption, image in rows
    ]
    if not clips:
        raise DitLoraError(
            f"data.path: no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, "
            "prompts.txt with videos.txt, clips or images each with a .txt of the same name, or one folder "
            "a class"
        )
    names = [clip.id for clip in clips]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    wrong = [f"{name}: listed twice" for name in twice]
    wrong += [
        f"{clip.id or '(no name)'}: no such file" for clip in clips if not clip.media.exists()
    ]
    wrong += [f"{clip.id}: its caption is empty" for clip in clips if not clip.caption]
    wrong += [
        f"{clip.id}: no such first image: {clip.image.name}"
        for clip in clips
        if clip.image is not None and not clip.image.exists()
    ]
    wrong = list(dict.fromkeys(wrong))
    if wrong:
        raise DitLoraError(listed(f"{root} ({layout}): correct or remove these clips", wrong))
    return clips


def class_names(data: DataConfig, cache: Path | None = None) -> list[str]:
    """The classes that a model needs, sorted: `data.classes`, else those of the data."""
    if data.classes is None:
        return sorted({clip.caption for clip in read_clips(data, cache)})
    return sorted(set(data.classes))


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


Row = tuple[str, str, str]
"""File, caption, and the first image's file or nothing."""


def _rows(root: Path, data: DataConfig) -> tuple[str, Iterator[Row]]:
    """The layout's name and its rows; the first layout found is read."""
    jsonl, table = root / "metadata.jsonl", root / "metadata.csv"
    prompts, videos = root / "prompts.txt", root / "videos.txt"
    if jsonl.is_file():
        return jsonl.name, _records(jsonl, _read_jsonl(jsonl), data)
    if table.is_file():
        return table.name, _records(table, _read_csv(table), data)
    for name in ("image_column", "caption_column"):
        if getattr(data, name) is not None:
            raise DitLoraError(f"data.{name} needs metadata.jsonl or metadata.csv, or a dataset")
    if prompts.is_file() or videos.is_file():
        return "prompts.txt and videos.txt", _paired_lines(prompts, videos)
    media = _media(root)
    has_text = any((root / name).with_suffix(".txt").is_file() for name in media)
    if media and not has_text and all("/" in name for name in media):
        return "one folder a class", _class_folders(root, media)
    return "clips with a .txt each", _text_files(root, media)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}") from error


def _read_jsonl(path: Path) -> list[dict[str, object]]:
    records, wrong = [], []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            wrong.append(f"line {number}: not an object")
    if wrong:
        raise DitLoraError(listed(f"{path} must hold one JSON object a line", wrong))
    return records


def _read_csv(path: Path) -> list[dict[str, object]]:
    # As one text, line ends kept: a quoted caption may hold some.
    return list(csv.DictReader(io.StringIO(_read_text(path), newline="")))


def _records(path: Path, records: list[dict[str, object]], data: DataConfig) -> Iterator[Row]:
    columns = list(dict.fromkeys(key for record in records for key in record if key))
    if not records:
        return
    file_column = _column(path, columns, FILE_COLUMNS, "the clip's file")
    wanted = (data.caption_column,) if data.caption_column else CAPTION_COLUMNS
    text_column = _column(path, columns, wanted, "the caption (data.caption_column)")
    image_column = data.image_column
    if image_column:
        _column(path, columns, (image_column,), "the first image (data.image_column)")
    for record in records:
        text = record.get(text_column)
        yield (
            str(record.get(file_column) or ""),
            "" if text is None else str(text),
            str(record.get(image_column) or "") if image_column else "",
        )


def _column(path: Path, columns: list[str], wanted: tuple[str, ...], what: str) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DitLoraError(
        f"{path}: no column for {what}; looked for {', '.join(wanted)} among {', '.join(columns)}"
    )


def _paired_lines(prompts: Path, videos: Path) -> Iterator[Row]:
    """CogVideo's layout: line n of prompts.txt is the caption of line n of videos.txt."""
    missing = [path.name for path in (prompts, videos) if not path.is_file()]
    if missing:
        raise DitLoraError(
            f"{prompts.parent}: {missing[0]} is missing; the layout needs both files"
        )
    captions = _read_text(prompts).rstrip("\n").splitlines()
    names = _read_text(videos).rstrip("\n").splitlines()
    if len(captions) != len(names):
        raise DitLoraError(
            f"{prompts.parent}: prompts.txt has {len(captions)} lines and videos.txt {len(names)}; "
            "line n of one belongs to line n of the other"
        )
    return ((name.strip(), caption, "") for name, caption in zip(names, captions, strict=True))


def _media(root: Path) -> list[str]:
    """Videos and images below the folder, by name; what is hidden is left out."""
    names = (path.relative_to(root) for path in sorted(root.rglob("*")))
    return [
        name.as_posix()
        for name in names
        if (name.suffix.lower() in VIDEO_SUFFIXES or is_image(name))
        and not any(part.startswith(".") for part in name.parts)
    ]


def _text_files(root: Path, media: list[str]) -> Iterator[Row]:
    for name in media:
        caption = (root / name).with_suffix(".txt")
        text = _read_text(caption) if caption.is_file() else ""
        yield name, " ".join(text.split()), ""


def _class_folders(root: Path, media: list[str]) -> Iterator[Row]:
    """UCF101's and CIFAR's layout: `class/clip.avi`. `BoxingPunchingBag` and `boxing_punching_bag` are
    read as words."""
    found = {name.split("/")[0] for name in media}
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    empty = sorted(name for name in folders - found if not name.startswith("."))
    if empty:
        raise DitLoraError(listed(f"{root}: these class folders hold no video and no image", empty))
    for name in media:
        yield name, class_name(name.split("/")[0]), ""


def class_name(folder: str) -> str:
    """A class folder's name as words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())
