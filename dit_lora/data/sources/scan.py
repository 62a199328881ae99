"""Reads clips, images and captions from folders, tables, tars and datasets into one list of `Clip`.

Folders are read here: clips with a .txt file each, one folder per class, a list, or one caption for all. Tables, tars
and Hugging Face datasets have modules of their own.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dit_lora.config.data import SourceConfig
from dit_lora.config.recipe import DataConfig
from dit_lora.config.remedies import describe_missing_clips
from dit_lora.data.chat.conversation import Conversation
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.beside import add_alpha_masks, add_references_and_masks, reject_extra_folders
from dit_lora.data.sources.caption_text import MAX_CAPTION_BYTES, make_too_long_fault, suggest_encoding
from dit_lora.data.sources.clips import Clip, ClipProblem, DataScan, SampleCollector
from dit_lora.data.sources.hf_datasets import get_dataset_hub_name, is_saved_dataset, read_dataset
from dit_lora.data.sources.kohya import KohyaFolder, describe_kohya_folders, parse_kohya_folders
from dit_lora.data.sources.left_out import describe_orphans, describe_unread_files
from dit_lora.data.sources.listing import FolderListing, is_tar
from dit_lora.data.sources.similar_names import describe_similar_name
from dit_lora.data.sources.tables import TABLE_NAMES, ListedFiles, read_table, read_text
from dit_lora.data.sources.webdataset import read_tar, read_tars
from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import open_regular_file
from dit_lora.terminal import make_one_line

Sample = TypeVar("Sample", Clip, Conversation)
_TARS, _PAIRED = "tars", "prompts.txt and videos.txt"
_DEFAULT_FOLDER = KohyaFolder("", 1)
_LIST_LAYOUTS = (*TABLE_NAMES, _PAIRED)
"""Layouts in which only files named in a list are samples."""


def scan_sources(data: DataConfig, cache: Path | None = None) -> DataScan:
    """List every clip of the data sources and every problem of a sample, without reading the media files.

    The folder `cache` stores the indices of tars. With `data.sources`, ids begin with the source's name, which
    does not change if sources are appended later. Raises `DitLoraError` that lists every unreadable source.
    """
    notes: list[str] = []

    def read_source(source: SourceConfig) -> tuple[list[Clip], list[ClipProblem]]:
        scanned = _read_source(source, cache / "tars" if cache else None)
        # Name the source in each note: several sources may have the same kind of note.
        notes.extend(f"{source.path}: {note}" for note in scanned.notes)
        return scanned.clips, scanned.problems

    return DataScan(*read_all_sources(data, read_source), tuple(notes))


def read_clips(data: DataConfig, cache: Path | None = None) -> list[Clip]:
    """List every clip of the sources; raises one `DitLoraError` that lists all problems found by `scan_sources`."""
    scanned = scan_sources(data, cache)
    if scanned.problems:
        location = data.path or "data.sources"
        problems = [make_one_line(f"{problem.file}: {problem.message}") for problem in scanned.problems]
        raise DitLoraError(format_list(f"{location}: correct or remove these samples", problems))
    return scanned.clips


def find_class_names_in_data(data: DataConfig, cache: Path | None = None) -> list[str]:
    """The classes that a model needs, sorted: `data.classes`, or else those in the data."""
    if data.classes is not None:
        return sorted(set(data.classes))
    names = {source.caption for source in data.all_sources if source.caption is not None}
    uncaptioned = tuple(source for source in data.all_sources if source.caption is None)
    # A source with one caption for all samples is not read: it may not be generated yet.
    if uncaptioned:
        remaining = data.model_copy(update={"sources": uncaptioned}) if data.sources else data
        # With `data.rejects: skip`, faulty samples are left out instead of stopping the run.
        clips = scan_sources(remaining, cache).clips if data.rejects == "skip" else read_clips(remaining, cache)
        names |= {clip.caption for clip in clips}
    return sorted(names)


def _read_source(source: SourceConfig, memo_folder: Path | None) -> DataScan:
    root = Path(source.path).expanduser()
    is_dataset = is_saved_dataset(root) or get_dataset_hub_name(source) is not None
    if source.media is not None and (is_tar(root) or is_dataset):
        raise DitLoraError(f"data.media is for lists of files; {source.path} holds its media itself")
    if not (is_tar(root) or is_dataset):
        return read_folder(root, source, memo_folder)
    reject_extra_folders(source)
    scanned = read_tar(root, source, memo_folder) if is_tar(root) else read_dataset(source)
    return add_alpha_masks(scanned, source)


def read_all_sources(
    data: DataConfig, read_source: Callable[[SourceConfig], tuple[list[Sample], list[ClipProblem]]]
) -> tuple[list[Sample], list[ClipProblem]]:
    """List samples and problems of all data sources; with `data.sources`, the sources' names and weights are applied.

    Raises one `DitLoraError` for all sources that `read_source` cannot read.
    """
    results, faults = [], []
    for number, source in enumerate(data.all_sources):
        try:
            results.append(read_source(source))
        except DitLoraError as error:
            location = f"data.sources[{number}]" if data.sources else "data.path"
            faults.append(f"{location}: {error}")
    if faults:
        raise DitLoraError(faults[0] if len(faults) == 1 else format_list("these sources cannot be read", faults))
    if not data.sources:
        return results[0]
    # A weight is relative to the other sources, so it is applied once all of them are read.
    times = _compute_source_repeats(
        data.sources, [sum(sample.times_per_epoch for sample in samples) for samples, _ in results]
    )
    names = make_id_prefixes(data.sources)
    merged: tuple[list[Sample], list[ClipProblem]] = ([], [])
    for source, (samples, problems), name, repeats in zip(data.sources, results, names, times, strict=True):
        weight = source.loss_weight
        merged[0].extend(
            replace(sample, id=name + sample.id, times_per_epoch=repeats * sample.times_per_epoch, loss_weight=weight)
            for sample in samples
        )
        merged[1].extend(replace(problem, file=name + problem.file) for problem in problems)
    return merged


def make_id_prefixes(sources: Sequence[SourceConfig]) -> list[str]:
    """Prefix of each source's sample ids: the name of its folder or file, with a number if that is taken."""
    names: list[str] = []
    for source in sources:
        base = Path(source.path).expanduser().absolute().name
        name, number = f"{base}/", 2
        # Two sources may have folders of the same name, such as `train`.
        while name in names:
            name, number = f"{base}-{number}/", number + 1
        names.append(name)
    return names


def _compute_source_repeats(sources: Sequence[SourceConfig], counts: Sequence[float]) -> list[float]:
    """How often the samples of each source come in an epoch; `counts` includes a folder's own repeats."""
    shares = [(source.weight or 0.0) / max(1, count) for source, count in zip(sources, counts, strict=True)]
    # With weights, the samples of the rarest source come once. An empty source cannot be the rarest.
    min_share = min((share for share, count in zip(shares, counts, strict=True) if count), default=0.0)
    if not min_share:
        return [float(source.repeats) for source in sources]
    return [share / min_share for share in shares]


def read_folder(root: Path, source: SourceConfig, memo_folder: Path | None) -> DataScan:
    """Read the clips of a folder in the first layout that matches, in the order of `_read_layout`.

    Raises `DitLoraError` if the folder contains no sample. A folder that is to be generated may be missing or empty.
    """
    if source.generate is not None:
        if source.reference_columns or source.reference_folders or source.has_masks:
            raise DitLoraError(
                f"{source.path} is generated, so it has no references and no masks; remove them, or remove generate"
            )
        # Generated images need no captions of their own: the source's caption applies to all of them.
        return _read_media_only(FolderListing(root), source)
    if not root.is_dir():
        raise DitLoraError(describe_missing_clips(source.path))
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
    return FolderListing(root).media


def format_class_name(folder: str) -> str:
    """Convert the name of a class folder to separate words."""
    # Split CamelCase, but keep acronyms: `PlayTVGame` becomes `Play TV Game`.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", folder)
    return " ".join(spaced.replace("_", " ").split())


def _read_layout(root: Path, source: SourceConfig, memo_folder: Path | None) -> tuple[str, DataScan]:
    table = next((root / name for name in TABLE_NAMES if (root / name).is_file()), None)
    if table is not None:
        return table.name, read_table(table, source)
    if source.image_column is not None:
        raise DitLoraError("image_column needs metadata.jsonl, .csv or .parquet, or a dataset")
    listing = FolderListing(root)
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


def _read_paired_lines(prompts: Path, videos: Path, source: SourceConfig) -> DataScan:
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
    return gathered.build_scan(folder.describe_unlisted_media(videos.name))


def _read_media_only(listing: FolderListing, source: SourceConfig) -> DataScan:
    gathered = _collect_broken_links(listing, source.caption)
    for name in listing.media:
        gathered.add(name, MediaFile(listing.root / name), None)
    return gathered.build_scan(describe_unread_files(listing))


def _collect_broken_links(listing: FolderListing, caption: str | None = None) -> SampleCollector:
    gathered = SampleCollector(caption)
    for name in listing.media if listing.broken_links else ():
        if name in listing.broken_links:
            gathered.add_problem(name, "missing", "no such file: it is a broken link")
    return gathered


def _read_text_files(listing: FolderListing) -> DataScan:
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
                # A named pipe would wait for its writer.
                with open_regular_file(root / text_file) as file:
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
    return gathered.build_scan(
        (*describe_kohya_folders(kohya), *describe_unread_files(listing), *describe_orphans(listing))
    )


def _read_class_folders(listing: FolderListing) -> DataScan:
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
    return gathered.build_scan((*describe_kohya_folders(kohya), *describe_unread_files(listing)))
