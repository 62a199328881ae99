"""Reads clips, images and captions from folders, tables, tars and datasets into one list of `Clip`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dit_lora.config.data import SourceConfig
from dit_lora.config.recipe import DataConfig
from dit_lora.data.chat.conversation import Conversation
from dit_lora.data.sources.beside import add_alpha_masks, reject_extra_folders
from dit_lora.data.sources.clips import Clip, ClipProblem, Scan
from dit_lora.data.sources.folders import format_class_name, read_folder
from dit_lora.data.sources.hf_datasets import get_dataset_hub_name, is_saved_dataset, read_dataset
from dit_lora.data.sources.webdataset import is_tar, read_tar
from dit_lora.errors import DitLoraError, format_list
from dit_lora.terminal import make_one_line

__all__ = [
    "Clip",
    "ClipProblem",
    "Scan",
    "find_class_names_in_data",
    "format_class_name",
    "read_clips",
    "scan_sources",
]

Sample = TypeVar("Sample", Clip, Conversation)


def scan_sources(data: DataConfig, cache: Path | None = None) -> Scan:
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

    return Scan(*read_all_sources(data, read_source), tuple(notes))


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


def _read_source(source: SourceConfig, memo_folder: Path | None) -> Scan:
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
    names = _make_id_prefixes(data.sources)
    merged: tuple[list[Sample], list[ClipProblem]] = ([], [])
    for source, (samples, problems), name, repeats in zip(data.sources, results, names, times, strict=True):
        weight = source.loss_weight
        merged[0].extend(
            replace(sample, id=name + sample.id, times_per_epoch=repeats * sample.times_per_epoch, loss_weight=weight)
            for sample in samples
        )
        merged[1].extend(replace(problem, file=name + problem.file) for problem in problems)
    return merged


def _make_id_prefixes(sources: Sequence[SourceConfig]) -> list[str]:
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
