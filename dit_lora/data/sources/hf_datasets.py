"""Reads Hugging Face datasets with a column of videos or images, directly from their Arrow files.

It needs the `datasets` package, an optional dependency: `pip install 'dit-lora[datasets]'`.
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
from dit_lora.config.records import read_typed_json
from dit_lora.config.remedies import HUB_PREFIX, get_hub_name
from dit_lora.data.media.media import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    Media,
    MediaFile,
    Stamp,
    detect_suffix,
    find_size_fault,
    read_file_stamp,
    resolve_path_below,
)
from dit_lora.data.sources.caption_text import Fault
from dit_lora.data.sources.clips import MASK, REFERENCE, DataScan, LossMask, SampleCollector, remove_empty_references
from dit_lora.data.sources.tables import REFERENCES_COLUMN, get_caption_columns
from dit_lora.errors import DitLoraError
from dit_lora.files import require_regular_files

# `save_to_disk` writes the first file for a dataset, and the second for a dictionary of splits.
_DATASET_FILES = ("state.json", "dataset_dict.json")
_MEDIA_SUFFIXES = VIDEO_SUFFIXES | IMAGE_SUFFIXES


@dataclass(frozen=True)
class DatasetCell:
    """A media file in a cell of a Hugging Face dataset; its encoded bytes are read only when they are needed."""

    name: str
    location: str
    """The dataset's fingerprint, the column and the row, which identify the cell."""
    row: int
    column: str
    size: int
    """Number of bytes."""
    changed_ns: int
    """Time of the last change of the dataset's files, in nanoseconds; 0 for a dataset in memory."""
    rows: Any = field(compare=False, repr=False)
    """The dataset without decoding; pickled as the paths of its files."""
    list_index: int | None = None
    """Index in the cell's list; None if the cell is not a list."""

    def get_source(self) -> io.BytesIO:
        cell = self.rows[self.row].column(self.column)[0]
        medium = cell if self.list_index is None else cell.values[self.list_index]
        return io.BytesIO(medium["bytes"].as_buffer())

    def get_file_stamp(self) -> Stamp:
        return self.size, self.changed_ns

    def exists(self) -> bool:
        return True


class _DataFile(TypedDict):
    filename: Annotated[str, StringConstraints(pattern=r"^[^/\\]+$")]


class _State(TypedDict):
    """Contents of state.json of a Hugging Face dataset on disk; its files are next to it."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]
    _data_files: list[_DataFile]
    _fingerprint: str
    _format_columns: list[str] | None
    _format_kwargs: dict[str, Any]
    _format_type: str | None
    _output_all_columns: bool
    _split: str | None


# Exceptions that datasets and pyarrow raise if features or columns do not match the files.
_DAMAGE_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OverflowError,
    SystemError,
)


def is_saved_dataset(root: Path) -> bool:
    """True if the folder was written by `save_to_disk` of Hugging Face datasets."""
    return any((root / name).is_file() for name in _DATASET_FILES)


def get_dataset_hub_name(source: SourceConfig) -> str | None:
    """The `owner/dataset` that a source names; None if it is local, looks local, or is to be generated."""
    return None if source.generate is not None else get_hub_name(source.path)


def read_dataset(source: SourceConfig) -> DataScan:
    """Read the clips of a Hugging Face dataset's split `train`, or of its only split, without decoding or copying.

    The caption from a ClassLabel column is the name of the class. Raises `DitLoraError` if there is no column
    of media or of captions.
    """
    rows = _load_dataset(source.path)
    try:
        # Validate first: a damaged offset or length would be followed outside the mapped file, and crash the process.
        rows.data.validate(full=True)
        return _read_rows(source, rows)
    except DitLoraError:
        raise
    except _DAMAGE_ERRORS as error:
        raise _make_damaged_error(source.path, error) from error


def _make_damaged_error(path: str, error: Exception) -> DitLoraError:
    reason = " ".join(str(error).split())[:200]
    return DitLoraError(
        f"the dataset in {path} cannot be read: {reason or 'no reason given'} ({type(error).__name__})"
    )


def _read_rows(source: SourceConfig, rows: Any) -> DataScan:
    columns = _choose_columns(source, rows)
    gathered = SampleCollector(source.caption)
    from_hub = get_dataset_hub_name(source) is not None
    cells = _iter_cells(source.path, rows, columns.media, from_hub)
    images = _iter_cells(source.path, rows, columns.image, from_hub)
    masks = _iter_cells(source.path, rows, columns.mask, from_hub)
    references = [_iter_list_cells(source.path, rows, name, from_hub) for name in columns.references]
    # With one caption for the whole source, no column of captions is read.
    captions: Sequence[object] = [None] * len(rows)
    if columns.caption is not None:
        captions = _select_column_rows(rows, rows.data.column(columns.caption)).to_pylist()
    # Class labels are stored as integers; `names` has their texts.
    names = getattr(rows.features[columns.caption], "names", None) if columns.caption else None
    lists = zip(*references, strict=True) if references else repeat((), len(rows))
    cells_by_row = zip(cells, images, masks, lists, captions, strict=True)
    for row, (cell, image, mask, reference_cells, text) in enumerate(cells_by_row):
        # Rows have no names, so the number of the row is the id; the suffix tells images from videos.
        sample_id = f"{row:08d}{cell.suffix}"
        if cell.fault is not None:
            gathered.add_problem(sample_id, *cell.fault)
        ordered_references, faults = _collect_extra_files(
            image, mask, [reference for column_cells in reference_cells for reference in column_cells]
        )
        gathered.add_problems(sample_id, faults)
        if names is not None and isinstance(text, int):
            if 0 <= text < len(names):
                text = names[text]
            else:
                gathered.add_problem(sample_id, "label_unknown", f"its label {text} is none of {len(names)} classes")
        if cell.media is not None:
            loss_mask = LossMask(mask.media) if mask.media else None
            gathered.add(sample_id, cell.media, text, image=image.media, references=ordered_references, mask=loss_mask)
    return gathered.build_scan()


def _collect_extra_files(
    first_image: "_Cell", mask: "_Cell", references: Sequence["_Cell"]
) -> tuple[list[Media], list[Fault]]:
    """Collect a sample's references in order, and the faults of its first image, mask and references."""
    faults: list[Fault] = []
    named_cells = [("first image", first_image), (MASK, mask), *((REFERENCE, reference) for reference in references)]
    for part, cell in named_cells:
        # An empty cell means that the sample has no such file.
        if cell.fault is not None and cell.fault != _EMPTY_CELL_FAULT:
            code, message = cell.fault
            code = f"{part}_missing" if code == "missing" and part in (MASK, REFERENCE) else code
            faults.append((code, f"its {part}: {message}"))
    return remove_empty_references([reference.media for reference in references], faults), faults


def _load_dataset(path: str) -> Any:
    try:
        # Imported here, because the package is optional.
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DitLoraError(
            f"{path} is a dataset, which needs the datasets package; pip install 'dit-lora[datasets]'"
        ) from error
    root = Path(path).expanduser()
    if root.is_dir():
        require_regular_files(root)
        for state in (root / "state.json", *root.glob("*/state.json")):
            if state.is_file():
                # Check the state files first: `datasets` reads them without checking what they refer to.
                read_typed_json(state, _State)
    try:
        loaded = (
            datasets.load_from_disk(root) if root.is_dir() else datasets.load_dataset(path.removeprefix(HUB_PREFIX))
        )
    except (DatasetsError, *_DAMAGE_ERRORS) as error:
        if root.is_dir():
            raise _make_damaged_error(path, error) from error
        # Errors of the Hub have several lines; the first one says enough.
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(f"{path} is not a folder, and it cannot be read as a dataset: {reason}") from error
    if not isinstance(loaded, dict):
        return loaded
    splits = list(loaded)
    if "train" not in splits and len(splits) != 1:
        raise DitLoraError(
            f"{path} has the splits {', '.join(splits)}, and none is called train; save the one to train on "
            "with save_to_disk"
        )
    return loaded["train" if "train" in splits else splits[0]]


class _Columns(NamedTuple):
    media: str
    image: str | None
    references: tuple[str, ...]
    mask: str | None
    caption: str | None


def _choose_columns(source: SourceConfig, rows: Any) -> _Columns:
    """Choose a dataset's columns of media, captions and additional files; raises `DitLoraError` if one is missing."""
    from datasets import ClassLabel, Image, LargeList, List, Value, Video

    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    videos = [name for name, feature in features.items() if isinstance(feature, Video)]
    lists = [
        name
        for name, feature in features.items()
        if isinstance(feature, List | LargeList) and isinstance(feature.feature, Image | Video)
    ]
    reference_columns = source.reference_columns
    if reference_columns is None:
        reference_columns = tuple({REFERENCES_COLUMN} & {*images, *videos, *lists})
    # A column of references never contains samples, even if references are not used.
    not_media = {source.image_column, source.mask_column, REFERENCES_COLUMN, *reference_columns}
    media = [name for name in (*videos, *images) if name not in not_media]
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    texts = [
        name
        for name, feature in features.items()
        if isinstance(feature, Value) and ("string" in feature.dtype or "int" in feature.dtype)
    ]
    captions = get_caption_columns(source)
    caption_names = [name for name in captions if name in (*labels, *texts)]
    # A column of classes is used regardless of its name, unless `caption_column` is set.
    if not caption_names and source.caption_column is None:
        caption_names = labels
    # Collect everything that is missing, so that one run reports all of it.
    missing_columns = []
    if not media:
        missing_columns.append("videos or images")
    if source.caption is None and not caption_names:
        missing_columns.append(f"text or classes among {', '.join(captions)}")
    for name in (source.image_column, source.mask_column):
        if name is not None and name not in images:
            missing_columns.append(f"images called {name}")
    media_columns = (*images, *videos, *lists)
    missing_columns += [f"images called {name}" for name in reference_columns if name not in media_columns]
    if missing_columns:
        existing_columns = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        message = f"{source.path} has no column of {', none of '.join(missing_columns)}; it has {existing_columns}"
        if not media:
            message += ". Arrays of pixels are not read; store them as an Image() or Video() column"
        raise DitLoraError(message)
    caption = caption_names[0] if source.caption is None else None
    return _Columns(media[0], source.image_column, reference_columns, source.mask_column, caption)


def _select_column_rows(rows: Any, column: Any) -> Any:
    """Take a column of the Arrow table in the order of the dataset's rows, which `select` or `shuffle` may change."""
    # `_indices` has no public equivalent, and getting the column from the dataset would read all of its bytes.
    return column if rows._indices is None else column.take(rows._indices.column(0))


_EMPTY_CELL_FAULT = ("missing", "no bytes")


@dataclass(frozen=True, slots=True)
class _Cell:
    suffix: str
    media: Media | None = None
    """The cell's media; None if it contains nothing readable."""
    fault: tuple[str, str] | None = None
    """Code and message if something is wrong."""


@dataclass(frozen=True)
class _Column:
    """A column of media in a Hugging Face dataset, whose cells are not decoded."""

    path: str
    name: str
    is_from_hub: bool
    arrow_dataset: Any
    """The dataset with only this column, as Arrow: a cell has bytes and a path, or is a list of such pairs."""
    fingerprint: str
    changed_ns: int
    """Time of the last change of the dataset's files, in nanoseconds."""

    @classmethod
    def from_dataset(cls, path: str, rows: Any, name: str, is_from_hub: bool) -> "_Column":
        # The Arrow format decodes nothing, while casting a column of lists would copy all of it.
        encoded = rows.select_columns([name]).with_format("arrow")
        files = [Path(file["filename"]) for file in rows.cache_files]
        stamps = [read_file_stamp(file) for file in files]
        # Part of the cell's stamp, so that a rewritten dataset is read again.
        written = max((max(mtime, ctime) for _, mtime, _, ctime in stamps), default=0)
        # `_fingerprint` has no public equivalent either.
        return cls(path, name, is_from_hub, encoded, rows._fingerprint, written)

    def read_cell(
        self,
        row: int,
        size: int | None,
        file_name: str | None,
        read_first_bytes: Callable[[], bytes],
        list_index: int | None = None,
    ) -> _Cell:
        """Read one cell of media without decoding.

        `size` is None if it has no bytes but a path, `list_index` if it is not a list. `read_first_bytes` returns the
        first bytes; it is called only if the name does not tell the format.
        """
        suffix: str | None = os.path.splitext(file_name or "")[1].lower()
        if size is None:
            external_file = _resolve_external_file(file_name, suffix or "", self.is_from_hub) if file_name else None
            return external_file or _Cell("", None, _EMPTY_CELL_FAULT)
        too_large = find_size_fault(size)
        if too_large is not None:
            return _Cell("", None, too_large)
        if suffix not in _MEDIA_SUFFIXES:
            head_bytes = read_first_bytes()
            suffix = detect_suffix(head_bytes)
            if suffix is None:
                message = f"its bytes are not a video or an image of a known format: {head_bytes[:8]!r} ..."
                return _Cell("", None, ("not_media", message) if size else ("empty_file", "it has no bytes"))
        number = "" if list_index is None else f".{list_index}"
        name = f"{self.path}:{self.name}/{row:08d}{number}{suffix}"
        location = f"{self.fingerprint}:{self.name}:{row}{number}"
        cell = DatasetCell(name, location, row, self.name, size, self.changed_ns, self.arrow_dataset, list_index)
        return _Cell(suffix, cell)


def _iter_cells(path: str, rows: Any, name: str | None, is_from_hub: bool) -> Iterator[_Cell]:
    """Yield the media of a dataset column, or empty cells without a column.

    Reads only sizes, names and some first bytes.
    """
    from pyarrow import compute

    if name is None:
        yield from repeat(_Cell(""), len(rows))
        return
    column = _Column.from_dataset(path, rows, name, is_from_hub)
    # The encoded bytes of each cell; nothing is decoded.
    content = compute.struct_field(rows.data.column(name), "bytes")
    names = compute.struct_field(rows.data.column(name), "path")
    table_rows = _list_table_rows(rows)
    sizes = _select_column_rows(rows, compute.binary_length(content)).to_pylist()
    for row, (size, file) in enumerate(zip(sizes, _select_column_rows(rows, names).to_pylist(), strict=True)):
        yield column.read_cell(row, size, file, partial(_read_head_at, content, table_rows[row]))


def _iter_list_cells(path: str, rows: Any, name: str, is_from_hub: bool) -> Iterator[list[_Cell]]:
    """Yield the media of each row of a dataset column whose cells may be lists."""
    if not hasattr(rows.features[name], "feature"):
        yield from ([cell] for cell in _iter_cells(path, rows, name, is_from_hub))
        return
    column, stored = _Column.from_dataset(path, rows, name, is_from_hub), rows.data.column(name)
    for row, table_row in enumerate(_list_table_rows(rows)):
        list_cells = []
        for number, cell in enumerate(stored[table_row].values or ()):
            content = cell["bytes"]
            # The bytes are not copied from their Arrow buffer.
            size = content.as_buffer().size if content.is_valid else None
            list_cells.append(column.read_cell(row, size, cell["path"].as_py(), partial(_read_head, content), number))
        yield list_cells


def _list_table_rows(rows: Any) -> Sequence[int]:
    """Index of each row of the dataset in the table behind it."""
    return range(len(rows)) if rows._indices is None else rows._indices.column(0).to_pylist()


def _read_head_at(contents: Any, index: int) -> bytes:
    """Read the first bytes of the cell at an index of a column."""
    return _read_head(contents[index])


def _read_head(content: Any) -> bytes:
    """Read the first bytes of an Arrow scalar; slicing its buffer avoids copying the rest."""
    return content.as_buffer()[:64].to_pybytes()


def _resolve_external_file(name: str, suffix: str, is_from_hub: bool) -> _Cell:
    """Find the file whose path is in a row; for a dataset from the Hub, it must be among the downloaded files."""
    media = MediaFile(Path(name))
    if is_from_hub:
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        caches = (config.HF_DATASETS_CACHE, HF_HUB_CACHE)
        if all(resolve_path_below(Path(cache), name) is None for cache in caches):
            return _Cell(
                suffix, media, ("unsafe_path", f"{name} is not one of the files that were downloaded with it")
            )
    return _Cell(suffix, media, None if media.exists() else ("missing", f"no such file: {name}"))
