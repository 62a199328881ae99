"""Captions, labels and lists of samples that are odd or bad."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.media.kind import IMAGES, Kind, write_caption, write_good
from dit_lora.data.audit.finding import Verdict

CLASSES: Mapping[str, Any] = {**IMAGES, "classes": ("blue", "red")}
_LISTING = "metadata.jsonl"


def _caption(name: str, text: bytes | None, verdict: Verdict = "ok", code: str | None = None) -> Kind:
    """A good clip with these bytes as its caption, or without a caption."""

    def make(folder: Path) -> None:
        write_good(folder / "clip.mp4")
        path = folder / "clip.txt"
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text)

    return Kind(name, make, "clip.mp4", verdict, code)


def _one_for_all(folder: Path) -> None:
    for name in ("clip.mp4", "second.mp4", "third.mp4"):
        write_good(folder / name)
        write_caption(folder / name, "a video")


def _colliding(folder: Path) -> None:
    """Write two clips of one stem that differ in picture and caption."""
    for scene in ("one", "two"):
        write_good(folder / f"{scene}.mp4")
        (folder / scene).mkdir()
        for suffix in (".mp4", ".txt"):
            (folder / f"{scene}{suffix}").rename(folder / scene / f"clip{suffix}")


def _classes(name: str, files: Sequence[str], code: str, verdict: Verdict) -> Kind:
    """A class-folder dataset. The first of the files is the bad one."""

    def make(folder: Path) -> None:
        for file in files:
            write_good(folder / file)
        for text in folder.rglob("*.txt"):
            text.unlink()

    return Kind(name, make, files[0], verdict, code, CLASSES, good="red/good.png")


Line = Mapping[str, str] | str


def _listed(name: str, lines: Sequence[Line], file: str, code: str | None) -> Kind:
    """A metadata.jsonl with a line for the good clip, followed by these lines."""

    def make(folder: Path) -> None:
        write_good(folder / "clip.mp4")
        # For the line that names a folder.
        (folder / "clips.mp4").mkdir()
        sound = {"file_name": "good.mp4", "text": "what is good"}
        rows = [line if isinstance(line, str) else json.dumps(line) for line in (sound, *lines)]
        (folder / _LISTING).write_text("\n".join(rows) + "\n", encoding="utf-8")

    return Kind(name, make, file, "reject" if code else "ok", code)


_CLIP = {"file_name": "clip.mp4", "text": "a clip"}
KINDS = (
    _caption("no caption", None, "reject", "caption_missing"),
    _caption("an empty caption", b"", "reject", "caption_empty"),
    _caption("a caption of white space", b" \n\t \r\n", "reject", "caption_empty"),
    _caption("a caption of invisible signs", "\u200b\u2060\ufeff".encode(), "reject", "caption_empty"),
    _caption("a caption that ends itself", b"a cat</s> sits", "warn", "caption_reserved_token"),
    _caption("a caption far too long", b"a cat and " * 2000, "warn", "caption_long"),
    _caption("a caption with a mark of order", "\ufeffa cat sits".encode()),
    _caption("a caption in Latin-1", "caf\xe9 at night".encode("latin-1"), "reject", "caption_not_text"),
    Kind("one caption for all", _one_for_all, "clip.mp4", "warn", "caption_duplicate"),
    Kind("two clips of one stem", _colliding, "two/clip.mp4", "ok"),
    _classes(
        "a label outside the table",
        ("green/clip.png", "blue/one.png"),
        "label_unknown",
        "reject",
    ),
    _classes(
        "a class with a tenth of the others",
        ("blue/clip.png", *(f"red/{number}.png" for number in range(24))),
        "label_imbalance",
        "warn",
    ),
    _listed(
        "a line for a file that is not there",
        [{**_CLIP, "file_name": "gone.mp4"}],
        "gone.mp4",
        "missing",
    ),
    _listed("a line for a folder", [{**_CLIP, "file_name": "clips.mp4"}], "clips.mp4", "missing"),
    _listed("a file on two lines", [_CLIP, _CLIP], "clip.mp4", "duplicate_clip"),
    _listed("a line without caption", [{"file_name": "clip.mp4"}], "clip.mp4", "caption_missing"),
    _listed(
        "a line with null for caption",
        ['{"file_name": "clip.mp4", "text": null}'],
        "clip.mp4",
        "caption_missing",
    ),
    _listed("a line that is no JSON", [_CLIP, '{"file_name": "clip'], f"{_LISTING} line 3", "unreadable"),
)
