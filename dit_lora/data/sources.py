"""Where clips and captions come from: four layouts of a folder, one list of `Clip`."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dit_lora.config import DataConfig
from dit_lora.errors import DitLoraError, listed

VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"}
CAPTION_COLUMNS = ("text", "caption", "prompt")
# `file_name` is the Hugging Face videofolder layout's.
FILE_COLUMNS = ("file_name", "video", "path")


@dataclass(frozen=True)
class Clip:
    """One video file and what it shows; `id` is its path below the data folder."""

    id: str
    path: Path
    caption: str


def read_clips(data: DataConfig) -> list[Clip]:
    """Every clip of `data.path`; raises one error that lists all missing files and empty captions."""
    root = Path(data.path).expanduser()
    if not root.is_dir():
        raise DitLoraError(f"data.path: no folder {data.path}")
    layout, rows = _rows(root, data.caption_column)
    clips = [Clip(name, root / name, caption.strip()) for name, caption in rows]
    if not clips:
        raise DitLoraError(
            f"data.path: no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, "
            "prompts.txt with videos.txt, or clips each with a .txt of the same name"
        )
    names = [clip.id for clip in clips]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    wrong = [f"{name}: listed twice" for name in twice]
    wrong += [
        f"{clip.id or '(no name)'}: no such file" for clip in clips if not clip.path.is_file()
    ]
    wrong += [f"{clip.id}: its caption is empty" for clip in clips if not clip.caption]
    wrong = list(dict.fromkeys(wrong))
    if wrong:
        raise DitLoraError(listed(f"{root} ({layout}): correct or remove these clips", wrong))
    return clips


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


def _rows(root: Path, caption_column: str | None) -> tuple[str, Iterator[tuple[str, str]]]:
    """The layout's name and its (file, caption) rows; the first layout found is read."""
    jsonl, table = root / "metadata.jsonl", root / "metadata.csv"
    prompts, videos = root / "prompts.txt", root / "videos.txt"
    if jsonl.is_file():
        return jsonl.name, _records(jsonl, _read_jsonl(jsonl), caption_column)
    if table.is_file():
        return table.name, _records(table, _read_csv(table), caption_column)
    if prompts.is_file() or videos.is_file():
        return "prompts.txt and videos.txt", _paired_lines(prompts, videos)
    return "clips with a .txt each", _text_files(root)


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


def _records(
    path: Path, records: list[dict[str, object]], caption_column: str | None
) -> Iterator[tuple[str, str]]:
    columns = list(dict.fromkeys(key for record in records for key in record if key))
    if not records:
        return
    file_column = _column(path, columns, FILE_COLUMNS, "the clip's file")
    wanted = (caption_column,) if caption_column else CAPTION_COLUMNS
    text_column = _column(path, columns, wanted, "the caption (data.caption_column)")
    for record in records:
        yield str(record.get(file_column) or ""), str(record.get(text_column) or "")


def _column(path: Path, columns: list[str], wanted: tuple[str, ...], what: str) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DitLoraError(
        f"{path}: no column for {what}; looked for {', '.join(wanted)} among {', '.join(columns)}"
    )


def _paired_lines(prompts: Path, videos: Path) -> Iterator[tuple[str, str]]:
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
    return zip((name.strip() for name in names), captions, strict=True)


def _text_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in VIDEO_SUFFIXES or any(
            part.startswith(".") for part in path.relative_to(root).parts
        ):
            continue
        caption = path.with_suffix(".txt")
        text = _read_text(caption) if caption.is_file() else ""
        yield path.relative_to(root).as_posix(), " ".join(text.split())
