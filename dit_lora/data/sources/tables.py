"""Reads metadata.jsonl, metadata.csv and metadata.parquet: a folder's table of files and captions."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dit_lora.config.data import SourceConfig
from dit_lora.data.media.media import MediaFile, resolve_path_below
from dit_lora.data.sources.caption_text import Fault, suggest_encoding
from dit_lora.data.sources.clips import MASK, REFERENCE, DataScan, LossMask, SampleCollector, remove_empty_references
from dit_lora.data.sources.left_out import describe_media_missing_from_table, describe_unread_files
from dit_lora.data.sources.listing import FolderListing
from dit_lora.data.sources.similar_names import describe_similar_name
from dit_lora.errors import DitLoraError
from dit_lora.files import open_regular_file
from dit_lora.parsing import parse_json

CAPTION_COLUMNS = ("text", "caption", "prompt", "label")
# `file_name` is the name in Hugging Face's videofolder layout.
FILE_COLUMNS = ("file_name", "video", "path")
REFERENCES_COLUMN = "references"
"""The column of references that is used by default."""
TABLE_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")

Record = dict[str, Any]
_TableRows = tuple[list[str], Callable[[list[str]], Iterable[Record]]]
"""The table's columns, and a function that returns its rows with at least the requested columns."""


def read_table(table: Path, source: SourceConfig) -> DataScan:
    """Read the clips of a table (metadata file): one per row, with files below the table's folder or `media`.

    Raises `DitLoraError` if the table cannot be read or lacks a column.
    """
    gathered = SampleCollector(source.caption)
    # `rows` reads only the requested columns, which matters for Parquet files with images in them.
    columns, rows = _READERS[table.suffix](table, gathered)
    # An empty table has no columns; `read_folder` reports that there is no clip.
    if not columns:
        return gathered.build_scan()
    file_column = _find_column(table, columns, FILE_COLUMNS, "the clip's file")
    needed, caption_column = [file_column], ""
    if source.caption is None:
        caption_column = _find_column(table, columns, get_caption_columns(source), "the caption (caption_column)")
        needed.append(caption_column)
    if source.image_column:
        needed.append(_find_column(table, columns, (source.image_column,), "the first image (image_column)"))
    named_columns = source.reference_columns
    if named_columns is None:
        named_columns = (REFERENCES_COLUMN,) if REFERENCES_COLUMN in columns else ()
    reference_columns: list[str] = []
    if not source.reference_folders:
        purpose = "a reference (reference_columns)"
        reference_columns += [_find_column(table, columns, (name,), purpose) for name in named_columns]
    needed += reference_columns
    if source.mask_column:
        needed.append(_find_column(table, columns, (source.mask_column,), "the mask (mask_column)"))
    folder = ListedFiles(table.parent, source, gathered)
    for number, row in enumerate(rows(needed), start=1):
        name = row.get(file_column)
        folder.add_listed_names(row.values())
        if name:
            extra_cells = ExtraCells(
                image=row.get(source.image_column) if source.image_column else None,
                references=tuple(n for column in reference_columns for n in _list_names(row.get(column))),
                mask=row.get(source.mask_column) if source.mask_column else None,
            )
            folder.add(str(name), row.get(caption_column), extra_cells)
        else:
            gathered.add_problem(f"{table.name} row {number}", "missing", f"its {file_column} is empty")
    return gathered.build_scan(folder.describe_unlisted_media(table.name))


def _list_names(cell: object) -> list[object]:
    """File names in a table cell, which has one, a list, or none; in CSV, a list is written as JSON."""
    if isinstance(cell, str) and cell.startswith("["):
        # A file name may begin with a bracket too, and is not JSON then.
        with suppress(ValueError):
            cell = parse_json(cell)
    # An empty cell gives a list with an empty name, which keeps the order of references.
    return cell if isinstance(cell, list) else [cell]


def get_caption_columns(source: SourceConfig) -> tuple[str, ...]:
    """Columns that may contain the caption; the first that the table has is used."""
    return (source.caption_column,) if source.caption_column else CAPTION_COLUMNS


class ExtraCells(NamedTuple):
    """Table cells that name the additional files of a sample; None and "" are empty."""

    image: object = None
    references: tuple[object, ...] = ()
    mask: object = None


NO_EXTRA_CELLS = ExtraCells()


class ListedFiles:
    """Adds the samples named in a list file; their files must be below the list's folder or the source's `media`."""

    def __init__(self, folder: Path, source: SourceConfig, collector: SampleCollector) -> None:
        self._root = Path(source.media).expanduser() if source.media else folder
        if not self._root.is_dir():
            raise DitLoraError(f"the folder of media {self._root} does not exist")
        self._collector = collector
        self._source = source
        self._listed_names: set[str] = set()
        """Files that the list names, relative to the root."""

    def add_listed_names(self, cells: Iterable[object]) -> None:
        """Remember the files that a row names in any column, so that they are not reported as left out of the list."""
        for cell in cells:
            for name in _list_names(cell):
                if isinstance(name, str) and name:
                    self._listed_names.add(resolve_path_below(self._root, name) or "")

    def describe_unlisted_media(self, table: str) -> list[str]:
        """Notes about media files that the list does not name; none with `media`, which several lists may share."""
        if self._source.media is not None:
            return []
        # Listing the folder is needed only for the notes; the samples come from the list.
        listing = FolderListing(self._root)
        folders = (*self._source.reference_folders, self._source.mask_folder)
        extra_folders = {Path(folder).expanduser().absolute() for folder in folders if folder}
        unlisted = describe_media_missing_from_table(listing, table, self._listed_names, extra_folders)
        return [*unlisted, *describe_unread_files(listing, self._listed_names)]

    def add(self, name: str, caption: object, extra_cells: ExtraCells = NO_EXTRA_CELLS) -> None:
        """Add one sample; its id is its path below the root, or the name as written if that is refused."""
        path = resolve_path_below(self._root, name)
        if path is None:
            # The sample has no path below the root, so its name as written is its id.
            self._collector.add_problem(name, *self._make_outside_fault(name))
            return
        # Continue with a missing file: its other faults are reported as well.
        media = MediaFile(self._root / path)
        if not media.exists():
            similar = describe_similar_name(self._root / path)
            self._collector.add_problem(path, "missing", f"no such file; {similar}" if similar else "no such file")
        faults: list[Fault] = []
        image = self._find_extra_file("first image", extra_cells.image, faults)
        references = [self._find_extra_file(REFERENCE, cell, faults) for cell in extra_cells.references]
        mask = self._find_extra_file(MASK, extra_cells.mask, faults)
        ordered_references = remove_empty_references(references, faults)
        self._collector.add_problems(path, faults)
        loss_mask = LossMask(mask) if mask else None
        self._collector.add(path, media, caption, image=image, references=ordered_references, mask=loss_mask)

    def _find_extra_file(self, role: str, cell: object, faults: list[Fault]) -> MediaFile | None:
        """Find an additional file of a sample, such as a mask.

        None if there is none; adds a fault if one was named.
        """
        if cell is None or cell == "":
            return None
        if not isinstance(cell, str):
            faults.append((f"{role}_missing", f"its {role} is of type {type(cell).__name__}, not a name"))
            return None
        path = resolve_path_below(self._root, cell)
        if path is None:
            faults.append(self._make_outside_fault(cell))
            return None
        media = MediaFile(self._root / path)
        if not media.exists():
            code = f"{role}_missing" if role in (REFERENCE, MASK) else "missing"
            faults.append((code, f"no such {role}: {media.path}"))
            return None
        return media

    def _make_outside_fault(self, name: str) -> Fault:
        return "unsafe_path", f"{name} is outside of {self._root}; set data.media to a folder that contains it"


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, without its byte order mark; raises `DitLoraError` if it cannot be read."""
    try:
        # A named pipe would wait for its writer.
        with open_regular_file(path) as file:
            return file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}{suggest_encoding(error)}") from error


def _read_jsonl(path: Path, collector: SampleCollector) -> _TableRows:
    records: list[Record] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        # A bad line is a problem of that line, and the others are still read.
        fault = "not an object"
        try:
            record = parse_json(line)
        except ValueError as error:
            record, fault = None, f"not JSON: {error}"
        if isinstance(record, dict):
            records.append(record)
        else:
            collector.add_problem(f"{path.name} line {number}", "unreadable", fault)
    # Rows may have different keys; a column is any key of any row.
    return list(dict.fromkeys(key for record in records for key in record)), lambda _: records


def _read_csv(path: Path, collector: SampleCollector) -> _TableRows:
    # Keep the line ends of the file, because a quoted caption may contain some.
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        records = list(reader)
    except csv.Error as error:
        raise DitLoraError(f"cannot read {path} after line {reader.line_num}: {error}") from error
    return list(reader.fieldnames or ()), lambda _: records


def _read_parquet(path: Path, collector: SampleCollector) -> _TableRows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DitLoraError(f"{path} needs the pyarrow package; pip install 'dit-lora[datasets]'") from error

    def call_parquet(function: Callable[..., Any], **options: object) -> Any:
        try:
            return function(path, **options)
        except (OSError, pyarrow.ArrowException) as error:
            raise DitLoraError(f"cannot read {path}: {error}") from error

    # Other columns, which may contain whole images, are never read.
    return call_parquet(parquet.read_schema).names, lambda columns: call_parquet(
        parquet.read_table, columns=columns, partitioning=None
    ).to_pylist()


_READERS: dict[str, Callable[[Path, SampleCollector], _TableRows]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _find_column(path: Path, columns: Sequence[str], candidates: Sequence[str], purpose: str) -> str:
    for name in candidates:
        if name in columns:
            return name
    raise DitLoraError(
        f"{path}: no column for {purpose}; looked for {', '.join(candidates)} among {', '.join(columns)}"
    )
