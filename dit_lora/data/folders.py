"""A folder of clips or images: with a table, a list, a .txt each, one folder a class, or tars."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dit_lora.data.caption_text import MOST_BYTES, too_long
from dit_lora.data.clips import Gathered, Scan
from dit_lora.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile
from dit_lora.data.tables import TABLES, ListedFiles, read_table, read_text
from dit_lora.data.webdataset import PACKED_SUFFIXES, read_tars
from dit_lora.data_config import SourceConfig
from dit_lora.errors import DitLoraError
from dit_lora.remedies import hub_hint

_MEDIA = VIDEO_SUFFIXES | IMAGE_SUFFIXES


def read_folder(root: Path, source: SourceConfig, memo: Path | None) -> Scan:
    """The clips of a folder by its layout; the first layout found is read.

    Raises `DitLoraError` if it holds none; a folder that is yet to be generated is empty without it.
    """
    if source.generate is not None:
        return _plain(_Listing(root), source)
    if not root.is_dir():
        raise DitLoraError(
            f"no folder {source.path}; put your clips there, or name their folder in data.path; "
            f"to try things on: dit-lora shapes {source.path}{hub_hint(source.path)}"
        )
    layout, found = _read_layout(root, source, memo)
    if not found.clips and not found.problems:
        raise DitLoraError(
            f"no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, "
            "metadata.parquet, prompts.txt with videos.txt, clips or images each with a .txt of the same name, "
            "one folder a class, or .tar files of WebDataset"
        )
    return found


def media_in(root: Path) -> list[str]:
    """Videos and images below a folder, in the order of their names, without what is hidden."""
    return _Listing(root).media


def class_name(folder: str) -> str:
    """A class folder's name as words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())


def _read_layout(root: Path, source: SourceConfig, memo: Path | None) -> tuple[str, Scan]:
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is not None:
        return table.name, read_table(table, source)
    if source.image_column is not None:
        raise DitLoraError("image_column needs metadata.jsonl, .csv or .parquet, or a dataset")
    prompts, videos = root / "prompts.txt", root / "videos.txt"
    is_paired = prompts.is_file() or videos.is_file()
    if source.media is not None and not is_paired:
        raise DitLoraError(
            "data.media is the folder of files that a list names: metadata.jsonl, .csv, .parquet or videos.txt"
        )
    listing = _Listing(root)
    if listing.tars and not listing.media:
        return "tars", read_tars(root, listing.tars, source, memo)
    if source.caption_column is not None:
        raise DitLoraError(
            "caption_column needs metadata.jsonl, .csv or .parquet, tars, or a dataset"
        )
    if is_paired:
        return "prompts.txt and videos.txt", _paired_lines(prompts, videos, source)
    media = listing.media
    if source.caption is not None:
        return "media with one caption", _plain(listing, source)
    has_text = any(f"{os.path.splitext(name)[0]}.txt" in listing.texts for name in media)
    if media and not has_text and all("/" in name for name in media):
        return "one folder a class", _class_folders(listing)
    return "clips with a .txt each", _text_files(listing)


@dataclass
class _Listing:
    """What is below a folder, by paths relative to it; what is hidden is left out, links are followed."""

    root: Path
    media: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    tars: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Those in the root."""
    broken: set[str] = field(default_factory=set)
    """Links to files that are not there."""

    def __post_init__(self) -> None:
        for name in self._files(str(self.root), "", (os.path.realpath(self.root),)):
            end = os.path.splitext(name)[1].lower()
            if end in _MEDIA:
                self.media.append(name)
            elif end == ".txt":
                self.texts.add(name)
            elif end == ".tar" or name.lower().endswith(PACKED_SUFFIXES):
                self.tars.append(name)

    def _files(self, folder: str, prefix: str, above: tuple[str, ...]) -> Iterator[str]:
        # Kinds come with the names: a system call a file would be most of the time.
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DitLoraError(f"cannot read the folder {folder}: {error.strerror}") from error
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                if not prefix:
                    self.folders.append(entry.name)
                real = os.path.realpath(entry.path)
                if real not in above:  # else a link to a folder that it is in
                    yield from self._files(entry.path, f"{prefix}{entry.name}/", (*above, real))
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):
                self.broken.add(prefix + entry.name)
            yield prefix + entry.name


def _paired_lines(prompts: Path, videos: Path, source: SourceConfig) -> Scan:
    """CogVideo's layout: line n of prompts.txt is the caption of line n of videos.txt."""
    missing = [path.name for path in (prompts, videos) if not path.is_file()]
    if missing:
        raise DitLoraError(
            f"{prompts.parent}: {missing[0]} is missing; the layout needs both files"
        )
    captions = read_text(prompts).rstrip("\n").splitlines()
    names = read_text(videos).rstrip("\n").splitlines()
    if len(captions) != len(names):
        raise DitLoraError(
            f"{prompts.parent}: prompts.txt has {len(captions)} lines and videos.txt {len(names)}; "
            "line n of one belongs to line n of the other"
        )
    found = Gathered(source.caption)
    folder = ListedFiles(prompts.parent, source, found)
    for number, (name, caption) in enumerate(zip(names, captions, strict=True), start=1):
        if name.strip():
            folder.add(name.strip(), caption)
        else:
            found.refuse(f"{videos.name} line {number}", "missing", "it names no file")
    return found.scan()


def _plain(listing: _Listing, source: SourceConfig) -> Scan:
    found = _found(listing, source.caption)
    for name in listing.media:
        found.add(name, MediaFile(listing.root / name), None)
    return found.scan()


def _found(listing: _Listing, caption: str | None = None) -> Gathered:
    found = Gathered(caption)
    for name in listing.media if listing.broken else ():
        if name in listing.broken:
            found.refuse(name, "missing", "no such file: it is a broken link")
    return found


def _text_files(listing: _Listing) -> Scan:
    found, root = _found(listing), listing.root
    for name in listing.media:
        beside = f"{name.rpartition('.')[0]}.txt"
        text, wrong = None, ("caption_missing", f"it has no caption: there is no {beside}")
        if beside in listing.texts:
            try:
                with open(os.path.join(root, beside), "rb", buffering=0) as file:
                    data = file.read(MOST_BYTES + 1)
                if len(data) > MOST_BYTES:
                    wrong = too_long(f"more than {MOST_BYTES:,} bytes")
                else:
                    text = " ".join(data.decode("utf-8-sig").split())
            except (OSError, UnicodeDecodeError) as error:
                wrong = ("caption_not_text", f"{beside} cannot be read as UTF-8 text: {error}")
        found.add(name, MediaFile(root / name), text, no_caption=wrong)
    return found.scan()


def _class_folders(listing: _Listing) -> Scan:
    """UCF101's and CIFAR's layout: `class/clip.avi`. `BoxingPunchingBag` and `boxing_punching_bag` are
    read as words."""
    found = _found(listing)
    names = {folder: class_name(folder) for folder in listing.folders}
    for name in listing.media:
        found.add(name, MediaFile(listing.root / name), names[name.partition("/")[0]])
    for empty in sorted(names.keys() - {name.partition("/")[0] for name in listing.media}):
        found.refuse(empty, "missing", "this class folder holds no video and no image")
    return found.scan()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
