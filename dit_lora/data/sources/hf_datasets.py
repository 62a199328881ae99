"""Reader of Hugging Face datasets with a column of videos or images, in place from their Arrow files.

It needs the `datasets` package, which is no dependency of ours: `pip install 'dit-lora[datasets]'`.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, StringConstraints
from typing_extensions import TypedDict

from dit_lora.config.data import SourceConfig
from dit_lora.config.records import read_typed
from dit_lora.config.remedies import HUB, hub_name
from dit_lora.data.media.media import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    Media,
    MediaFile,
    Stamp,
    below,
    file_stamp,
    sniffed_suffix,
    too_many_bytes,
)
from dit_lora.data.sources.caption_text import Fault
from dit_lora.data.sources.clips import MASK, REFERENCE, Gathered, LossMask, Scan, by_code, in_order
from dit_lora.data.sources.tables import REFERENCES, caption_columns
from dit_lora.errors import DitLoraError
from dit_lora.files import require_regular

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
    place_in_list: int | None = None
    """The place in the cell, where it holds a list."""

    def source(self) -> io.BytesIO:
        cell = self.rows[self.row].column(self.column)[0]
        medium = cell if self.place_in_list is None else cell.values[self.place_in_list]
        return io.BytesIO(medium["bytes"].as_buffer())

    def stamp(self) -> Stamp:
        return self.size, self.written

    def exists(self) -> bool:
        return True


class _DataFile(TypedDict):
    filename: Annotated[str, StringConstraints(pattern=r"^[^/\\]+$")]


class _State(TypedDict):
    """state.json of a dataset on disk; its files lie beside it."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    _data_files: list[_DataFile]
    _fingerprint: str
    _format_columns: list[str] | None
    _format_kwargs: dict[str, Any]
    _format_type: str | None
    _output_all_columns: bool
    _split: str | None


# What datasets and pyarrow raise for features and columns that are not what the files say.
_OF_DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError),
    *(RuntimeError, OverflowError, SystemError),
)


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
    try:
        # A damaged offset or length would be followed out of the file's memory, and end the process.
        rows.data.validate(full=True)
        return _read_rows(source, rows)
    except DitLoraError:
        raise
    except _OF_DAMAGE as error:
        raise _damaged(source.path, error) from error


def _damaged(path: str, error: Exception) -> DitLoraError:
    reason = " ".join(str(error).split())[:200]
    return DitLoraError(
        f"the dataset in {path} cannot be read: {reason or 'no reason given'} ({type(error).__name__})"
    )


def _read_rows(source: SourceConfig, rows: Any) -> Scan:
    columns = _columns(source, rows)
    gathered = Gathered(source.caption)
    from_hub = name_on_hub(source) is not None
    cells = _cells(source.path, rows, columns.media, from_hub)
    images = _cells(source.path, rows, columns.image, from_hub)
    masks = _cells(source.path, rows, columns.mask, from_hub)
    references = [_lists(source.path, rows, name, from_hub) for name in columns.references]
    captions: Sequence[object] = [None] * len(rows)
    if columns.caption is not None:
        captions = _stored(rows, rows.data.column(columns.caption)).to_pylist()
    names = getattr(rows.features[columns.caption], "names", None) if columns.caption else None
    lists = zip(*references, strict=True) if references else repeat((), len(rows))
    every = zip(cells, images, masks, lists, captions, strict=True)
    for row, (cell, first, mask, given, text) in enumerate(every):
        sample_id = f"{row:08d}{cell.suffix}"
        if cell.fault is not None:
            gathered.refuse(sample_id, *cell.fault)
        own, faults = _belonging(first, mask, [one for of_column in given for one in of_column])
        for fault in faults:
            gathered.refuse(sample_id, *fault)
        if names is not None and isinstance(text, int):
            if 0 <= text < len(names):
                text = names[text]
            else:
                gathered.refuse(
                    sample_id, "label_unknown", f"its label {text} is none of {len(names)} classes"
                )
        if cell.media is not None:
            masked = LossMask(mask.media) if mask.media else None
            gathered.add(
                sample_id, cell.media, text, image=first.media, references=own, mask=masked
            )
    return gathered.scan()


def _belonging(
    first: "_Cell", mask: "_Cell", references: Sequence["_Cell"]
) -> tuple[list[Media], list[Fault]]:
    """Return a sample's references in their order, and the faults of what it has beside its own media."""
    faults = []
    named = [("first image", first), (MASK, mask), *((REFERENCE, one) for one in references)]
    for what, cell in named:
        # A cell that holds nothing is a sample without one.
        if cell.fault is not None and cell.fault != _NOTHING:
            code, message = cell.fault
            code = f"{what}_missing" if code == "missing" and what in (MASK, REFERENCE) else code
            faults.append((code, f"its {what}: {message}"))
    held, gap = in_order([one.media for one in references])
    # A cell that cannot be read leaves a gap too.
    if gap is not None and not faults:
        faults.append(gap)
    return held, by_code(faults)


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
    if root.is_dir():
        require_regular(root)
        for state in (root / "state.json", *root.glob("*/state.json")):
            if state.is_file():
                read_typed(state, _State)
    try:
        loaded = (
            datasets.load_from_disk(root)
            if root.is_dir()
            else datasets.load_dataset(path.removeprefix(HUB))
        )
    except (DatasetsError, *_OF_DAMAGE) as error:
        if root.is_dir():
            raise _damaged(path, error) from error
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"no folder {path}, and as a dataset it cannot be read: {reason}"
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


class _Columns(NamedTuple):
    """The columns of a dataset that are read."""

    media: str
    image: str | None
    references: tuple[str, ...]
    mask: str | None
    caption: str | None


def _columns(source: SourceConfig, rows: Any) -> _Columns:
    """Return the columns of media and what belongs to them; raise `DitLoraError` if one is missing."""
    from datasets import ClassLabel, Image, LargeList, List, Value, Video

    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    videos = [name for name, feature in features.items() if isinstance(feature, Video)]
    lists = [
        name
        for name, feature in features.items()
        if isinstance(feature, List | LargeList) and isinstance(feature.feature, Image | Video)
    ]
    of_references = source.reference_columns
    if of_references is None:
        of_references = tuple({REFERENCES} & {*images, *videos, *lists})
    # A column of references is none of samples, also where it is left out.
    beside = {source.image_column, source.mask_column, REFERENCES, *of_references}
    media = [name for name in (*videos, *images) if name not in beside]
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
    for name in (source.image_column, source.mask_column):
        if name is not None and name not in images:
            lacks.append(f"images called {name}")
    there = (*images, *videos, *lists)
    lacks += [f"images called {name}" for name in of_references if name not in there]
    if lacks:
        has = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        message = f"{source.path} has no column of {', none of '.join(lacks)}; it has {has}"
        if not media:
            message += (
                ". Arrays of pixels are not read: encode them, as an Image() or Video() column"
            )
        raise DitLoraError(message)
    caption = wanted[0] if source.caption is None else None
    return _Columns(media[0], source.image_column, of_references, source.mask_column, caption)


def _stored(rows: Any, column: Any) -> Any:
    """Return a column of the table behind the dataset in the order of the rows, which `select` or `shuffle` changed."""
    # `_indices` has no public name, and asking the dataset itself for a column would read all the bytes in it.
    return column if rows._indices is None else column.take(rows._indices.column(0))


_NOTHING = ("missing", "no bytes")


@dataclass(frozen=True, slots=True)
class _Cell:
    suffix: str
    media: Media | None = None
    """The cell's media; None where it holds nothing that can be read."""
    fault: tuple[str, str] | None = None
    """Code and message of what is wrong, if anything is."""


@dataclass(frozen=True)
class _Column:
    """A column of media, whose cells are not decoded."""

    path: str
    name: str
    from_hub: bool
    encoded: Any
    """The dataset of this column alone, as Arrow: a cell is its bytes and its path, or a list of such."""
    fingerprint: str
    written: int
    """Nanoseconds at which the dataset's files last changed."""

    @classmethod
    def of(cls, path: str, rows: Any, name: str, from_hub: bool) -> "_Column":
        # As Arrow, nothing is decoded; casting a column of lists would copy all of it.
        encoded = rows.select_columns([name]).with_format("arrow")
        files = [Path(file["filename"]) for file in rows.cache_files]
        stamps = [file_stamp(file) for file in files]
        written = max((max(mtime, ctime) for _, mtime, _, ctime in stamps), default=0)
        # No public name for it either.
        return cls(path, name, from_hub, encoded, rows._fingerprint, written)

    def cell(
        self,
        row: int,
        size: int | None,
        name: str | None,
        head: Callable[[], bytes],
        place: int | None = None,
    ) -> _Cell:
        """Return what is in a cell of that many bytes and that path, of which `head` gives the first bytes.

        `place` is that in a list.
        """
        suffix: str | None = os.path.splitext(name or "")[1].lower()
        if size is None:
            elsewhere = _elsewhere(name, suffix or "", self.from_hub) if name else None
            return elsewhere or _Cell("", None, _NOTHING)
        too_large = too_many_bytes(size)
        if too_large is not None:
            return _Cell("", None, too_large)
        if suffix not in _SUFFIXES:
            first = head()
            suffix = sniffed_suffix(first)
            if suffix is None:
                message = (
                    f"its bytes are no video or image of a format known here: {first[:8]!r} ..."
                )
                fault = ("not_media", message) if size else ("empty_file", "it has no bytes")
                return _Cell("", None, fault)
        number = "" if place is None else f".{place}"
        cell = DatasetCell(
            f"{self.path}:{self.name}/{row:08d}{number}{suffix}",
            f"{self.fingerprint}:{self.name}:{row}{number}",
            row,
            self.name,
            size,
            self.written,
            self.encoded,
            place,
        )
        return _Cell(suffix, cell)


def _cells(path: str, rows: Any, name: str | None, from_hub: bool) -> Iterator[_Cell]:
    """Yield the media of a column, or nothing for each row; only sizes and names are read, and some first bytes."""
    from pyarrow import compute

    if name is None:
        yield from repeat(_Cell(""), len(rows))
        return
    column = _Column.of(path, rows, name, from_hub)
    content = compute.struct_field(rows.data.column(name), "bytes")
    names = compute.struct_field(rows.data.column(name), "path")
    place = _places(rows)
    sizes = _stored(rows, compute.binary_length(content)).to_pylist()
    for row, (size, file) in enumerate(zip(sizes, _stored(rows, names).to_pylist(), strict=True)):
        yield column.cell(row, size, file, partial(_head_of, content, place[row]))


def _lists(path: str, rows: Any, name: str, from_hub: bool) -> Iterator[list[_Cell]]:
    """Yield the media of a column whose cells may be lists."""
    if not hasattr(rows.features[name], "feature"):
        yield from ([cell] for cell in _cells(path, rows, name, from_hub))
        return
    column, stored = _Column.of(path, rows, name, from_hub), rows.data.column(name)
    for row, place in enumerate(_places(rows)):
        made = []
        for number, cell in enumerate(stored[place].values or ()):
            content = cell["bytes"]
            # The bytes stay in their Arrow buffer.
            size = content.as_buffer().size if content.is_valid else None
            file = cell["path"].as_py()
            made.append(column.cell(row, size, file, partial(_head, content), number))
        yield made


def _places(rows: Any) -> Sequence[int]:
    """Return the places of the rows in the table behind the dataset."""
    places: Sequence[int] = (
        range(len(rows)) if rows._indices is None else rows._indices.column(0).to_pylist()
    )
    return places


def _head_of(contents: Any, place: int) -> bytes:
    return _head(contents[place])


def _head(content: Any) -> bytes:
    """Return the first bytes of an Arrow scalar; a slice of its buffer copies no more."""
    head: bytes = content.as_buffer()[:64].to_pybytes()
    return head


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
