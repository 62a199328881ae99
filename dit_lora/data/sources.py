"""Where clips, images and captions come from: folders, tables, tars and datasets; one list of `Clip`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dit_lora.config import DataConfig
from dit_lora.data.clips import Clip, Problem, Scan
from dit_lora.data.datasets_source import is_saved_dataset, name_on_hub, read_dataset
from dit_lora.data.folders import class_name, read_folder
from dit_lora.data.webdataset import is_tar, read_tar
from dit_lora.data_config import SourceConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.terminal import one_line

__all__ = ["Clip", "Problem", "Scan", "class_name", "class_names", "read_clips", "scan"]

Found = TypeVar("Found")
"""What the reader of a source gives."""


def scan(data: DataConfig, cache: Path | None = None) -> Scan:
    """Every clip of the sources, and everything that is wrong with a sample; of media, no byte is read.

    In `cache`, the indices of tars are kept. Of `data.sources`, ids begin with the source's name, which those appended later do not change. Raises
    `DitLoraError`, with what is wrong of every source, if one cannot be read at all.
    """
    sources = data.all_sources
    scans = read_sources(data, lambda source: _read(source, cache / "tars" if cache else None))
    if not data.sources:
        return scans[0]
    found, times = Scan([], []), times_of(sources, [len(one.clips) for one in scans])
    for source, one, name, often in zip(sources, scans, names_of(sources), times, strict=True):
        found.clips.extend(
            Clip(name + clip.id, clip.media, clip.caption, clip.image, often, source.loss_weight)
            for clip in one.clips
        )
        found.problems.extend(Problem(name + p.file, p.code, p.words) for p in one.problems)
    return found


def read_clips(data: DataConfig, cache: Path | None = None) -> list[Clip]:
    """Every clip of the sources; raises one `DitLoraError` that lists all that `scan` finds wrong."""
    found = scan(data, cache)
    if found.problems:
        where = data.path or "data.sources"
        wrong = [one_line(f"{problem.file}: {problem.words}") for problem in found.problems]
        raise DitLoraError(listed(f"{where}: correct or remove these samples", wrong))
    return found.clips


def class_names(data: DataConfig, cache: Path | None = None) -> list[str]:
    """The classes that a model needs, sorted: `data.classes`, else those of the data."""
    if data.classes is not None:
        return sorted(set(data.classes))
    names = {source.caption for source in data.all_sources if source.caption is not None}
    others = tuple(source for source in data.all_sources if source.caption is None)
    if others:  # a source with one caption need not be read, nor be there yet
        rest = data.model_copy(update={"sources": others}) if data.sources else data
        skips = data.rejects == "skip"
        clips = scan(rest, cache).clips if skips else read_clips(rest, cache)
        names |= {clip.caption for clip in clips}
    return sorted(names)


def _read(source: SourceConfig, memo: Path | None) -> Scan:
    root = Path(source.path).expanduser()
    is_dataset = is_saved_dataset(root) or name_on_hub(source) is not None
    if source.media is not None and (is_tar(root) or is_dataset):
        raise DitLoraError(
            f"data.media is for lists of files; {source.path} holds its media itself"
        )
    if is_tar(root):
        return read_tar(root, source, memo)
    if is_dataset:
        return read_dataset(source)
    return read_folder(root, source, memo)


def read_sources(data: DataConfig, read: Callable[[SourceConfig], Found]) -> list[Found]:
    """What `read` finds in each of the sources; raises one `DitLoraError` for all that it cannot read."""
    found, faults = [], []
    for number, source in enumerate(data.all_sources):
        try:
            found.append(read(source))
        except DitLoraError as error:
            where = f"data.sources[{number}]" if data.sources else "data.path"
            faults.append(f"{where}: {error}")
    if faults:
        several = listed("these sources cannot be read", faults)
        raise DitLoraError(faults[0] if len(faults) == 1 else several)
    return found


def names_of(sources: Sequence[SourceConfig]) -> list[str]:
    """What ids of each source begin with: its folder's or file's name, and a number where that is taken."""
    names: list[str] = []
    for source in sources:
        wanted = Path(source.path).expanduser().absolute().name
        name, number = f"{wanted}/", 2
        while name in names:
            name, number = f"{wanted}-{number}/", number + 1
        names.append(name)
    return names


def times_of(sources: Sequence[SourceConfig], counts: Sequence[int]) -> list[float]:
    """How often the samples of each source come in an epoch; the rarest once, where there are weights.

    `counts`: samples of each.
    """
    shares = [
        (source.weight or 0.0) / max(1, count)
        for source, count in zip(sources, counts, strict=True)
    ]
    least = min((share for share, count in zip(shares, counts, strict=True) if count), default=0.0)
    if not least:
        return [float(source.repeats) for source in sources]
    return [share / least for share in shares]
