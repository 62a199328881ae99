"""Reader of folders of clips or images: with a table, a list, a .txt each, one folder a class, or tars."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.config.remedies import hub_hint
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile
from dit_lora.data.sources.beside import refuse_folders
from dit_lora.data.sources.caption_text import MOST_BYTES, too_long
from dit_lora.data.sources.clips import Gathered, Scan
from dit_lora.data.sources.tables import TABLES, ListedFiles, read_table, read_text
from dit_lora.data.sources.webdataset import PACKED_SUFFIXES, read_tars
from dit_lora.errors import DitLoraError

_MEDIA = VIDEO_SUFFIXES | IMAGE_SUFFIXES


def read_folder(root: Path, source: SourceConfig, memo: Path | None) -> Scan:
    """Read the clips of a folder; the first layout that it has, in the order of `_read_layout`, decides.

    Raises `DitLoraError` if the folder holds no sample. A folder that is yet to be generated may be missing or empty.
    """
    if source.generate is not None:
        return _plain(_Listing(root), source)
    if not root.is_dir():
        raise DitLoraError(
            f"no folder {source.path}; put your clips there, or name their folder in data.path; "
            f"to try things on: dit-lora shapes {source.path}{hub_hint(source.path)}"
        )
    layout, scanned = _read_layout(root, source, memo)
    if not scanned.clips and not scanned.problems:
        raise DitLoraError(
            f"no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, "
            "metadata.parquet, prompts.txt with videos.txt, clips or images each with a .txt of the same name, "
            "one folder a class, or .tar files of WebDataset"
        )
    return scanned


def media_in(root: Path) -> list[str]:
    """Return the videos and images below a folder, hidden ones left out, in the order of their paths."""
    return _Listing(root).media


def class_name(folder: str) -> str:
    """Return a class folder's name as separate words."""
    # Borders of CamelCase, with acronyms whole: `PlayTVGame` is `Play TV Game`.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())


def _read_layout(root: Path, source: SourceConfig, memo: Path | None) -> tuple[str, Scan]:
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is not None:
        return table.name, read_table(table, source)
    if source.image_column is not None:
        raise DitLoraError("image_column needs metadata.jsonl, .csv or .parquet, or a dataset")
    listing = _Listing(root)
    if listing.tars and not listing.media and source.media is None:
        refuse_folders(source)
        return "tars", read_tars(root, listing.tars, source, memo)
    if source.reference_columns or source.mask_column:
        raise DitLoraError(
            "reference_columns and mask_column need metadata.jsonl, .csv or .parquet, tars, or a dataset; folders are "
            "named in reference_folders and mask_folder"
        )
    prompts, videos = root / "prompts.txt", root / "videos.txt"
    is_paired = prompts.is_file() or videos.is_file()
    if source.media is not None and not is_paired:
        raise DitLoraError(
            "data.media is the folder of files that a list names: metadata.jsonl, .csv, .parquet or videos.txt"
        )
    if source.caption_column is not None:
        raise DitLoraError(
            "caption_column needs metadata.jsonl, .csv or .parquet, tars, or a dataset"
        )
    if is_paired:
        return "prompts.txt and videos.txt", _paired_lines(prompts, videos, source)
    media = listing.media
    if source.caption is not None:
        return "media with one caption", _plain(listing, source)
    # One .txt anywhere says that captions are written out, so a folder's name is taken only where
    # there is none.
    has_text = any(f"{os.path.splitext(name)[0]}.txt" in listing.texts for name in media)
    if media and not has_text and all("/" in name for name in media):
        return "one folder a class", _class_folders(listing)
    return "clips with a .txt each", _text_files(listing)


@dataclass
class _Listing:
    """Listing of the files below a folder by relative path; hidden ones are left out, links are followed."""

    root: Path
    media: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    tars: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Names of the folders directly in the root."""
    broken: set[str] = field(default_factory=set)
    """Links to files that are not there."""

    def __post_init__(self) -> None:
        for name in self._files(str(self.root), "", (os.path.realpath(self.root),)):
            suffix = os.path.splitext(name)[1].lower()
            if suffix in _MEDIA:
                self.media.append(name)
            elif suffix == ".txt":
                self.texts.add(name)
            elif suffix == ".tar" or name.lower().endswith(PACKED_SUFFIXES):
                self.tars.append(name)

    def _files(self, folder: str, prefix: str, above: tuple[str, ...]) -> Iterator[str]:
        # scandir tells a name's kind without a further system call, which would be most of the time.
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
                # A link to a folder that it lies in would be walked for ever.
                if real not in above:
                    yield from self._files(entry.path, f"{prefix}{entry.name}/", (*above, real))
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):
                self.broken.add(prefix + entry.name)
            yield prefix + entry.name


def _paired_lines(prompts: Path, videos: Path, source: SourceConfig) -> Scan:
    """Read CogVideo's layout: line n of prompts.txt is the caption of line n of videos.txt."""
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
    gathered = Gathered(source.caption)
    folder = ListedFiles(prompts.parent, source, gathered)
    for number, (name, caption) in enumerate(zip(names, captions, strict=True), start=1):
        if name.strip():
            folder.add(name.strip(), caption)
        else:
            gathered.refuse(f"{videos.name} line {number}", "missing", "it names no file")
    return gathered.scan()


def _plain(listing: _Listing, source: SourceConfig) -> Scan:
    gathered = _gather_broken(listing, source.caption)
    for name in listing.media:
        gathered.add(name, MediaFile(listing.root / name), None)
    return gathered.scan()


def _gather_broken(listing: _Listing, caption: str | None = None) -> Gathered:
    """Return a `Gathered` that holds the listing's broken links as problems."""
    gathered = Gathered(caption)
    for name in listing.media if listing.broken else ():
        if name in listing.broken:
            gathered.refuse(name, "missing", "no such file: it is a broken link")
    return gathered


def _text_files(listing: _Listing) -> Scan:
    gathered, root = _gather_broken(listing), listing.root
    for name in listing.media:
        beside = f"{name.rpartition('.')[0]}.txt"
        text, fault = None, ("caption_missing", f"it has no caption: there is no {beside}")
        if beside in listing.texts:
            try:
                with open(os.path.join(root, beside), "rb", buffering=0) as file:
                    # One byte more than the limit tells that a file is longer, without reading all of it.
                    data = file.read(MOST_BYTES + 1)
                if len(data) > MOST_BYTES:
                    fault = too_long(f"more than {MOST_BYTES:,} bytes")
                else:
                    text = " ".join(data.decode("utf-8-sig").split())
            except (OSError, UnicodeDecodeError) as error:
                fault = ("caption_not_text", f"{beside} cannot be read as UTF-8 text: {error}")
        gathered.add(name, MediaFile(root / name), text, no_caption=fault)
    return gathered.scan()


def _class_folders(listing: _Listing) -> Scan:
    """Read UCF101's and CIFAR's layout, `class/clip.avi`.

    The caption is the class's name in words: `BoxingPunchingBag` and `boxing_punching_bag` are equal.
    """
    gathered = _gather_broken(listing)
    names = {folder: class_name(folder) for folder in listing.folders}
    for name in listing.media:
        gathered.add(name, MediaFile(listing.root / name), names[name.partition("/")[0]])
    for empty in sorted(names.keys() - {name.partition("/")[0] for name in listing.media}):
        gathered.refuse(empty, "missing", "this class folder holds no video and no image")
    return gathered.scan()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
