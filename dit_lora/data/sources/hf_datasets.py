"""Reader of Hugging Face datasets with a column of videos or images, in place from their Arrow files.

It needs the `datasets` package, which is no dependency of ours: `pip install 'dit-lora[datasets]'`.
"""

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

from dit_lora.config.data import SourceConfig
from dit_lora.config.remedies import HUB, hub_name
from dit_lora.data.media.media import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    Media,
    MediaFile,
    Stamp,
    below,
    sniffed_suffix,
    too_many_bytes,
)
from dit_lora.data.sources.clips import Gathered, Scan
from dit_lora.data.sources.tables import caption_columns
from dit_lora.errors import DitLoraError

# `save_to_disk` writes the first for a dataset, the second for a dictionary of splits.
_SAVED = ("state.json", "dataset_dict.json")
_SUFFIXES = VIDEO_SUFFIXES | IMAGE_SUFFIXES


@dataclass(frozen=True)
class DatasetCell:
    """Encoded bytes in one cell of a dataset, which stay there until they are asked for."""

    name: str
    place: str
    """The dataset's fingerprint, the column and the row."""
    row: int
    column: str
    size: int
    """Number of bytes."""
    written: int
    """Nanoseconds at which the dataset's files last changed; 0 for a dataset in memory."""
    rows: Any = field(compare=False, repr=False)
    """The dataset, with nothing decoded. It is pickled by the paths of its files."""

    def source(self) -> io.BytesIO:
        return io.BytesIO(self.rows[self.row][self.column]["bytes"])

    def stamp(self) -> Stamp:
        return self.size, self.written

    def exists(self) -> bool:
        return True


def is_saved_dataset(root: Path) -> bool:
    return any((root / name).is_file() for name in _SAVED)


def name_on_hub(source: SourceConfig) -> str | None:
    """Return the `owner/dataset` that a source names; None if it is local, looks local, or is to be generated."""
    return None if source.generate is not None else hub_name(source.path)


def read_dataset(source: SourceConfig) -> Scan:
    """Read the clips of the split `train`, or of the only split; nothing is decoded or copied.

    A ClassLabel column gives the class's name. Raises `DitLoraError` if there is no column of media or of captions.
    """
    rows = _load(source.path)
    media, image, caption = _columns(source, rows)
    gathered = Gathered(source.caption)
    from_hub = name_on_hub(source) is not None
    cells = _cells(source.path, rows, media, from_hub)
    images = _cells(source.path, rows, image, from_hub) if image else repeat(_Cell(""), len(rows))
    captions: Sequence[object] = [None] * len(rows)
    if caption is not None:
        captions = _stored(rows, rows.data.column(caption)).to_pylist()
    names = getattr(rows.features[caption], "names", None) if caption else None
    for row, (cell, first, text) in enumerate(zip(cells, images, captions, strict=True)):
        sample_id = f"{row:08d}{cell.suffix}"
        if cell.fault is not None:
            gathered.refuse(sample_id, *cell.fault)
        if first.fault is not None and first.media is not None:
            gathered.refuse(sample_id, first.fault[0], f"its first image: {first.fault[1]}")
        if names is not None and isinstance(text, int):
            if 0 <= text < len(names):
                text = names[text]
            else:
                gathered.refuse(
                    sample_id, "label_unknown", f"its label {text} is none of {len(names)} classes"
                )
        if cell.media is not None:
            gathered.add(sample_id, cell.media, text, image=first.media)
    return gathered.scan()


def _load(path: str) -> Any:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DitLoraError(
            f"{path} is a dataset, and the datasets package is not installed; "
            "pip install 'dit-lora[datasets]'"
        ) from error
    root = Path(path).expanduser()
    try:
        loaded = (
            datasets.load_from_disk(root)
            if root.is_dir()
            else datasets.load_dataset(path.removeprefix(HUB))
        )
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"no folder {path}, and as a dataset it cannot be read: {reason}"
            if not root.is_dir()
            else f"the dataset in {path} cannot be read: {reason}"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    splits = list(loaded)
    if "train" not in splits and len(splits) != 1:
        raise DitLoraError(
            f"{path} has the splits {', '.join(splits)}, none called train; save the one "
            "to train on with save_to_disk"
        )
    return loaded["train" if "train" in splits else splits[0]]


def _columns(source: SourceConfig, rows: Any) -> tuple[str, str | None, str | None]:
    """Return the columns of media, first image and caption; raise `DitLoraError` if one is missing."""
    from datasets import ClassLabel, Image, Value, Video

    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    videos = [name for name, feature in features.items() if isinstance(feature, Video)]
    media = [name for name in (*videos, *images) if name != source.image_column]
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    texts = [
        name
        for name, feature in features.items()
        if isinstance(feature, Value) and ("string" in feature.dtype or "int" in feature.dtype)
    ]
    captions = caption_columns(source)
    wanted = [name for name in captions if name in (*labels, *texts)]
    # Classes are taken whatever their column's name, unless one was asked for.
    if not wanted and source.caption_column is None:
        wanted = labels
    lacks = []
    if not media:
        lacks.append("videos or images")
    if source.caption is None and not wanted:
        lacks.append(f"text or classes among {', '.join(captions)}")
    if source.image_column is not None and source.image_column not in images:
        lacks.append(f"images called {source.image_column}")
    if lacks:
        there = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        message = f"{source.path} has no column of {', none of '.join(lacks)}; it has {there}"
        if not media:
            message += (
                ". Arrays of pixels are not read: encode them, as an Image() or Video() column"
            )
        raise DitLoraError(message)
    return media[0], source.image_column, wanted[0] if source.caption is None else None


def _stored(rows: Any, column: Any) -> Any:
    """Return a column of the table behind the dataset in the order of the rows, which `select` or `shuffle` changed."""
    # `_indices` has no public name, and asking the dataset itself for a column would read all the bytes in it.
    return column if rows._indices is None else column.take(rows._indices.column(0))


@dataclass(frozen=True, slots=True)
class _Cell:
    suffix: str
    media: Media | None = None
    """The cell's media; None where it holds nothing that can be read."""
    fault: tuple[str, str] | None = None
    """Code and message of what is wrong, if anything is."""


def _cells(path: str, rows: Any, column: str, from_hub: bool) -> Iterator[_Cell]:
    """Yield the media of a column; only sizes and names are read, and the first bytes of a cell without a name."""
    from pyarrow import compute

    encoded = rows.select_columns([column])
    # Undecoded, a cell is its bytes and its path.
    encoded = encoded.cast_column(column, type(rows.features[column])(decode=False))
    content = compute.struct_field(rows.data.column(column), "bytes")
    names = compute.struct_field(rows.data.column(column), "path")
    place = range(len(rows)) if rows._indices is None else rows._indices.column(0).to_pylist()
    files = [Path(file["filename"]) for file in rows.cache_files]
    written = max((file.stat().st_mtime_ns for file in files), default=0)
    sizes = _stored(rows, compute.binary_length(content)).to_pylist()
    for row, (size, name) in enumerate(zip(sizes, _stored(rows, names).to_pylist(), strict=True)):
        suffix: str | None = os.path.splitext(name or "")[1].lower()
        if size is None:
            elsewhere = _elsewhere(name, suffix or "", from_hub) if name else None
            yield elsewhere or _Cell("", None, ("missing", "no bytes"))
            continue
        too_large = too_many_bytes(size)
        if too_large is not None:
            yield _Cell("", None, too_large)
            continue
        if suffix not in _SUFFIXES:
            # A slice of the Arrow buffer copies no more of the cell than its first bytes.
            head = content[place[row]].as_buffer()[:64].to_pybytes()
            suffix = sniffed_suffix(head)
            if suffix is None:
                message = (
                    f"its bytes are no video or image of a format known here: {head[:8]!r} ..."
                )
                fault = ("not_media", message) if size else ("empty_file", "it has no bytes")
                yield _Cell("", None, fault)
                continue
        yield _Cell(
            suffix,
            DatasetCell(
                f"{path}:{column}/{row:08d}{suffix}",
                f"{rows._fingerprint}:{column}:{row}",  # no public name for it either
                row,
                column,
                size,
                written,
                encoded,
            ),
        )


def _elsewhere(name: str, end: str, from_hub: bool) -> _Cell:
    """Return the file whose path a row holds; a dataset from the Hub may only name files that came with it."""
    media = MediaFile(Path(name))
    if from_hub and not _is_downloaded(name):
        message = f"{name} is none of the files that were downloaded with it"
        return _Cell(end, media, ("unsafe_path", message))
    fault = None if media.exists() else ("missing", f"no such file: {name}")
    return _Cell(end, media, fault)


def _is_downloaded(name: str) -> bool:
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    caches = (config.HF_DATASETS_CACHE, HF_HUB_CACHE)
    return any(below(Path(cache), name) is not None for cache in caches)
