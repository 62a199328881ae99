"""Reads folders of clips or images: with a table, a list, a .txt file each, one folder per class, or tars."""

import os
import re
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.config.remedies import hub_hint
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.beside import refuse_folders, with_alpha, with_beside
from dit_lora.data.sources.caption_text import MOST_BYTES, encoding_hint, too_long
from dit_lora.data.sources.clips import Gathered, Scan
from dit_lora.data.sources.kohya import KohyaFolder, kohya_folders, kohya_notes
from dit_lora.data.sources.left_out import orphan_notes, unread_notes
from dit_lora.data.sources.listing import Listing
from dit_lora.data.sources.similar_names import similar_name
from dit_lora.data.sources.tables import TABLES, ListedFiles, read_table, read_text
from dit_lora.data.sources.webdataset import read_tars
from dit_lora.errors import DitLoraError

_TARS, _PAIRED = "tars", "prompts.txt and videos.txt"
_NOT_KOHYA = KohyaFolder("", 1)
_LISTS = (*TABLES, _PAIRED)
"""Layouts in which only files named in a list are samples."""


def read_folder(root: Path, source: SourceConfig, memo: Path | None) -> Scan:
    """Read the clips of a folder, in the first layout that matches, in the order of `_read_layout`.

    Raises `DitLoraError` if the folder contains no sample. A folder that is to be generated may be missing or
    empty.
    """
    if source.generate is not None:
        if source.reference_columns or source.reference_folders or source.has_masks:
            raise DitLoraError(
                f"{source.path} is to be generated, and has no references and no masks; remove them or generate"
            )
        # Generated images need no captions of their own: the source's caption applies to all of them.
        return _plain(Listing(root), source)
    if not root.is_dir():
        raise DitLoraError(
            f"no folder {source.path}; put your clips there, or name their folder in data.path; "
            f"to try things on: dit-lora tiny shapes {source.path}{hub_hint(source.path)}"
        )
    layout, scanned = _read_layout(root, source, memo)
    if not scanned.clips and not scanned.problems:
        raise DitLoraError(
            f"no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, "
            "metadata.parquet, prompts.txt with videos.txt, clips or images each with a .txt of the same name, "
            "one folder a class, or .tar files of WebDataset"
        )
    if layout == _TARS:
        return with_alpha(scanned, source)
    return with_beside(scanned, source, walked=layout not in _LISTS)


def media_in(root: Path) -> list[str]:
    """Paths of the videos and images below a folder, sorted, without hidden ones."""
    return Listing(root).media


def class_name(folder: str) -> str:
    """Name of a class folder as separate words."""
    # Split CamelCase, but keep acronyms: `PlayTVGame` becomes `Play TV Game`.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())


def _read_layout(root: Path, source: SourceConfig, memo: Path | None) -> tuple[str, Scan]:
    """Name and contents of the layout that the folder has."""
    # A table takes precedence over every other layout.
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is not None:
        return table.name, read_table(table, source)
    if source.image_column is not None:
        raise DitLoraError("image_column needs metadata.jsonl, .csv or .parquet, or a dataset")
    listing = Listing(root)
    if listing.tars and not listing.media and source.media is None:
        refuse_folders(source)
        return _TARS, read_tars(root, listing.tars, source, memo)
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
        return _PAIRED, _paired_lines(prompts, videos, source)
    media = listing.media
    if source.caption is not None:
        return "media with one caption", _plain(listing, source)
    # A single .txt file means that captions are written out, so folder names are used as classes
    # only if there is none.
    has_text = any(f"{os.path.splitext(name)[0]}.txt" in listing.texts for name in media)
    if media and not has_text and all("/" in name for name in media):
        return "one folder a class", _class_folders(listing)
    return "clips with a .txt each", _text_files(listing)


def _paired_lines(prompts: Path, videos: Path, source: SourceConfig) -> Scan:
    """Read CogVideo's layout: line n of prompts.txt is the caption of the file in line n of videos.txt."""
    missing = [path.name for path in (prompts, videos) if not path.is_file()]
    if missing:
        raise DitLoraError(
            f"{prompts.parent}: {missing[0]} is missing; the layout needs both files"
        )
    # Trailing newlines would count as empty lines.
    captions = read_text(prompts).rstrip("\n").splitlines()
    names = read_text(videos).rstrip("\n").splitlines()
    # Pairing unequal lists would silently shift captions.
    if len(captions) != len(names):
        raise DitLoraError(
            f"{prompts.parent}: prompts.txt has {len(captions)} lines and videos.txt {len(names)}; "
            "line n of one belongs to line n of the other"
        )
    gathered = Gathered(source.caption)
    folder = ListedFiles(prompts.parent, source, gathered)
    for number, (name, caption) in enumerate(zip(names, captions, strict=True), start=1):
        # Listed names are not reported as left out.
        folder.note_names([name.strip()])
        if name.strip():
            folder.add(name.strip(), caption)
        else:
            gathered.refuse(f"{videos.name} line {number}", "missing", "it names no file")
    return gathered.scan(folder.left_out(videos.name))


def _plain(listing: Listing, source: SourceConfig) -> Scan:
    """Read media without captions of their own."""
    gathered = _gather_broken(listing, source.caption)
    for name in listing.media:
        gathered.add(name, MediaFile(listing.root / name), None)
    return gathered.scan(unread_notes(listing))


def _gather_broken(listing: Listing, caption: str | None = None) -> Gathered:
    """A `Gathered` with the listing's broken links as problems."""
    gathered = Gathered(caption)
    for name in listing.media if listing.broken else ():
        if name in listing.broken:
            gathered.refuse(name, "missing", "no such file: it is a broken link")
    return gathered


def _text_files(listing: Listing) -> Scan:
    """Read media with a .txt file each."""
    gathered, root = _gather_broken(listing), listing.root
    kohya = kohya_folders(listing)
    for name in listing.media:
        text_file = f"{name.rpartition('.')[0]}.txt"
        text, fault = None, ("caption_missing", f"it has no caption: there is no {text_file}")
        if text_file not in listing.texts:
            # The .txt may exist under a name that differs only in case, which is hard to see.
            similar = similar_name(root / text_file)
            fault = (fault[0], f"{fault[1]}; {similar}") if similar else fault
        else:
            try:
                with open(os.path.join(root, text_file), "rb", buffering=0) as file:
                    # Read one byte more than the limit, to notice a longer file without reading all of it.
                    data = file.read(MOST_BYTES + 1)
                if len(data) > MOST_BYTES:
                    fault = too_long(f"more than {MOST_BYTES:,} bytes")
                else:
                    text = " ".join(data.decode("utf-8-sig").split())
            except (OSError, UnicodeDecodeError) as error:
                message = f"{text_file} cannot be read as UTF-8 text: {error}{encoding_hint(error)}"
                fault = ("caption_not_text", message)
        # In kohya's layout, the name of the top folder says how often its pictures come.
        folder = kohya.get(name.partition("/")[0], _NOT_KOHYA)
        gathered.add(name, MediaFile(root / name), text, times=folder.repeats, no_caption=fault)
    return gathered.scan((*kohya_notes(kohya), *unread_notes(listing), *orphan_notes(listing)))


def _class_folders(listing: Listing) -> Scan:
    """Read the layout of UCF101 and CIFAR, `class/clip.avi`.

    The caption is the class name in words: `BoxingPunchingBag` and `boxing_punching_bag` are equal.
    """
    gathered = _gather_broken(listing)
    kohya = kohya_folders(listing)
    names = {folder: class_name(folder) for folder in listing.folders}
    names |= {folder: kohya_folder.caption for folder, kohya_folder in kohya.items()}
    for name in listing.media:
        top = name.partition("/")[0]
        times = kohya.get(top, _NOT_KOHYA).repeats
        gathered.add(name, MediaFile(listing.root / name), names[top], times=times)
    # A class without samples is usually a mistake, such as files of an unsupported format.
    for empty in sorted(names.keys() - {name.partition("/")[0] for name in listing.media}):
        gathered.refuse(empty, "missing", "this class folder holds no video and no image")
    return gathered.scan((*kohya_notes(kohya), *unread_notes(listing)))
