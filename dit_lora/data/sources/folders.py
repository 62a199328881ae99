"""Reads folders of clips or images: with a table, a list, a .txt file each, one folder per class, or tars."""

import os
import re
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.config.remedies import suggest_hub_prefix
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.beside import add_alpha_masks, add_references_and_masks, reject_extra_folders
from dit_lora.data.sources.caption_text import MAX_CAPTION_BYTES, make_too_long_fault, suggest_encoding
from dit_lora.data.sources.clips import SampleCollector, Scan
from dit_lora.data.sources.kohya import KohyaFolder, describe_kohya_folders, parse_kohya_folders
from dit_lora.data.sources.left_out import describe_orphans, describe_unread_files
from dit_lora.data.sources.listing import Listing
from dit_lora.data.sources.similar_names import describe_similar_name
from dit_lora.data.sources.tables import TABLE_NAMES, ListedFiles, read_table, read_text
from dit_lora.data.sources.webdataset import read_tars
from dit_lora.errors import DitLoraError

_TARS, _PAIRED = "tars", "prompts.txt and videos.txt"
_DEFAULT_FOLDER = KohyaFolder("", 1)
_LIST_LAYOUTS = (*TABLE_NAMES, _PAIRED)
"""Layouts in which only files named in a list are samples."""


def read_folder(root: Path, source: SourceConfig, memo_folder: Path | None) -> Scan:
    """Read the clips of a folder in the first layout that matches, in the order of `_read_layout`.

    Raises `DitLoraError` if the folder contains no sample. A folder that is to be generated may be missing or empty.
    """
    if source.generate is not None:
        if source.reference_columns or source.reference_folders or source.has_masks:
            raise DitLoraError(
                f"{source.path} is generated, so it has no references and no masks; remove them, or remove generate"
            )
        # Generated images need no captions of their own: the source's caption applies to all of them.
        return _read_media_only(Listing(root), source)
    if not root.is_dir():
        raise DitLoraError(
            f"the folder {source.path} does not exist; put your clips there, or set data.path to their "
            f"folder; for a first test: dit-lora tiny shapes {source.path}{suggest_hub_prefix(source.path)}"
        )
    layout, scanned = _read_layout(root, source, memo_folder)
    if not scanned.clips and not scanned.problems:
        raise DitLoraError(
            f"no clips in {root} (read as {layout}); it takes metadata.jsonl, metadata.csv, metadata.parquet, "
            "prompts.txt with videos.txt, clips or images each with a .txt of the same name, one folder for "
            "each class, or .tar files of WebDataset"
        )
    if layout == _TARS:
        return add_alpha_masks(scanned, source)
    return add_references_and_masks(scanned, source, is_unlisted=layout not in _LIST_LAYOUTS)


def list_media(root: Path) -> list[str]:
    """List the videos and images below a folder, sorted by path, without hidden ones."""
    return Listing(root).media


def format_class_name(folder: str) -> str:
    """Convert the name of a class folder to separate words."""
    # Split CamelCase, but keep acronyms: `PlayTVGame` becomes `Play TV Game`.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())


def _read_layout(root: Path, source: SourceConfig, memo_folder: Path | None) -> tuple[str, Scan]:
    table = next((root / name for name in TABLE_NAMES if (root / name).is_file()), None)
    if table is not None:
        return table.name, read_table(table, source)
    if source.image_column is not None:
        raise DitLoraError("image_column needs metadata.jsonl, .csv or .parquet, or a dataset")
    listing = Listing(root)
    if listing.tars and not listing.media and source.media is None:
        reject_extra_folders(source)
        return _TARS, read_tars(root, listing.tars, source, memo_folder)
    if source.reference_columns or source.mask_column:
        raise DitLoraError(
            "reference_columns and mask_column need metadata.jsonl, .csv or .parquet, tars, or a dataset; "
            "for folders, use reference_folders and mask_folder"
        )
    prompts, videos = root / "prompts.txt", root / "videos.txt"
    is_paired = prompts.is_file() or videos.is_file()
    if source.media is not None and not is_paired:
        raise DitLoraError(
            "data.media is the folder of files that a list names: metadata.jsonl, .csv, .parquet or videos.txt"
        )
    if source.caption_column is not None:
        raise DitLoraError("caption_column needs metadata.jsonl, .csv or .parquet, tars, or a dataset")
    if is_paired:
        return _PAIRED, _read_paired_lines(prompts, videos, source)
    media = listing.media
    if source.caption is not None:
        return "media with one caption", _read_media_only(listing, source)
    # A single .txt file means that captions are written out, so folder names are used as classes
    # only if there is none.
    has_text = any(f"{os.path.splitext(name)[0]}.txt" in listing.texts for name in media)
    if media and not has_text and all("/" in name for name in media):
        return "one folder a class", _read_class_folders(listing)
    return "clips with a .txt each", _read_text_files(listing)


def _read_paired_lines(prompts: Path, videos: Path, source: SourceConfig) -> Scan:
    """Read CogVideo's layout: line n of prompts.txt is the caption of the file in line n of videos.txt."""
    missing = [path.name for path in (prompts, videos) if not path.is_file()]
    if missing:
        raise DitLoraError(f"{prompts.parent}: {missing[0]} is missing; the layout needs both files")
    # Trailing newlines would count as empty lines.
    captions = read_text(prompts).rstrip("\n").splitlines()
    names = read_text(videos).rstrip("\n").splitlines()
    # Pairing unequal lists would silently shift captions.
    if len(captions) != len(names):
        raise DitLoraError(
            f"{prompts.parent}: prompts.txt has {len(captions)} lines and videos.txt {len(names)}; "
            "line n of one belongs to line n of the other"
        )
    gathered = SampleCollector(source.caption)
    folder = ListedFiles(prompts.parent, source, gathered)
    for number, (name, caption) in enumerate(zip(names, captions, strict=True), start=1):
        # Listed names are not reported as left out.
        folder.add_listed_names([name.strip()])
        if name.strip():
            folder.add(name.strip(), caption)
        else:
            gathered.add_problem(f"{videos.name} line {number}", "missing", "it does not name a file")
    return gathered.to_scan(folder.describe_left_out(videos.name))


def _read_media_only(listing: Listing, source: SourceConfig) -> Scan:
    gathered = _collect_broken_links(listing, source.caption)
    for name in listing.media:
        gathered.add(name, MediaFile(listing.root / name), None)
    return gathered.to_scan(describe_unread_files(listing))


def _collect_broken_links(listing: Listing, caption: str | None = None) -> SampleCollector:
    gathered = SampleCollector(caption)
    for name in listing.media if listing.broken_links else ():
        if name in listing.broken_links:
            gathered.add_problem(name, "missing", "no such file: it is a broken link")
    return gathered


def _read_text_files(listing: Listing) -> Scan:
    gathered, root = _collect_broken_links(listing), listing.root
    kohya = parse_kohya_folders(listing)
    for name in listing.media:
        text_file = f"{name.rpartition('.')[0]}.txt"
        text, fault = None, ("caption_missing", f"it has no caption: there is no {text_file}")
        if text_file not in listing.texts:
            # The .txt may exist under a name that differs only in case, which is hard to see.
            similar = describe_similar_name(root / text_file)
            fault = (fault[0], f"{fault[1]}; {similar}") if similar else fault
        else:
            try:
                with open(os.path.join(root, text_file), "rb", buffering=0) as file:
                    # Read one byte more than the limit, to notice a longer file without reading all of it.
                    data = file.read(MAX_CAPTION_BYTES + 1)
                if len(data) > MAX_CAPTION_BYTES:
                    fault = make_too_long_fault(f"more than {MAX_CAPTION_BYTES:,} bytes")
                else:
                    text = " ".join(data.decode("utf-8-sig").split())
            except (OSError, UnicodeDecodeError) as error:
                message = f"cannot read {text_file} as UTF-8 text: {error}{suggest_encoding(error)}"
                fault = ("caption_not_text", message)
        # In kohya's layout, the name of the top folder says how often its pictures come.
        folder = kohya.get(name.partition("/")[0], _DEFAULT_FOLDER)
        gathered.add(name, MediaFile(root / name), text, times_per_epoch=folder.repeats, missing_caption_fault=fault)
    return gathered.to_scan(
        (*describe_kohya_folders(kohya), *describe_unread_files(listing), *describe_orphans(listing))
    )


def _read_class_folders(listing: Listing) -> Scan:
    """Read the layout of UCF101 and CIFAR, `class/clip.avi`; the caption is the class name as separate words."""
    gathered = _collect_broken_links(listing)
    kohya = parse_kohya_folders(listing)
    names = {folder: format_class_name(folder) for folder in listing.folders}
    names |= {folder: kohya_folder.caption for folder, kohya_folder in kohya.items()}
    for name in listing.media:
        top = name.partition("/")[0]
        times = kohya.get(top, _DEFAULT_FOLDER).repeats
        gathered.add(name, MediaFile(listing.root / name), names[top], times_per_epoch=times)
    # A class without samples is usually a mistake, such as files of an unsupported format.
    for empty in sorted(names.keys() - {name.partition("/")[0] for name in listing.media}):
        gathered.add_problem(empty, "missing", "this class folder holds no video and no image")
    return gathered.to_scan((*describe_kohya_folders(kohya), *describe_unread_files(listing)))
