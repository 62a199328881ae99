"""Reads metadata.jsonl, metadata.csv and metadata.parquet: a folder's table of files and captions."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dit_lora.config.data import SourceConfig
from dit_lora.data.media.media import MediaFile, below
from dit_lora.data.sources.caption_text import Fault, encoding_hint
from dit_lora.data.sources.clips import MASK, REFERENCE, Gathered, LossMask, Scan, by_code, in_order
from dit_lora.data.sources.left_out import unlisted_notes, unread_notes
from dit_lora.data.sources.listing import Listing
from dit_lora.data.sources.similar_names import similar_name
from dit_lora.errors import DitLoraError
from dit_lora.parsing import parse_json

CAPTION_COLUMNS = ("text", "caption", "prompt", "label")
# `file_name` is the name in Hugging Face's videofolder layout.
FILE_COLUMNS = ("file_name", "video", "path")
REFERENCES = "references"
"""The column of references that is used by default."""
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")

Record = dict[str, Any]
_Read = tuple[list[str], Callable[[list[str]], Iterable[Record]]]
"""The table's columns, and a function that returns its rows with at least the requested columns."""


def read_table(table: Path, source: SourceConfig) -> Scan:
    """Read the clips of a table: one per row, with files below the table's folder or below `media`.

    Raises `DitLoraError` if the table cannot be read or lacks a column.
    """
    gathered = Gathered(source.caption)
    # `rows` reads only the requested columns, which matters for Parquet files with images in them.
    columns, rows = _READERS[table.suffix](table, gathered)
    # An empty table has no columns; `read_folder` reports that there is no clip.
    if not columns:
        return gathered.scan()
    file_column = _column(table, columns, FILE_COLUMNS, "the clip's file")
    needed, caption_column = [file_column], ""
    if source.caption is None:
        purpose = "the caption (caption_column)"
        caption_column = _column(table, columns, caption_columns(source), purpose)
        needed.append(caption_column)
    if source.image_column:
        purpose = "the first image (image_column)"
        needed.append(_column(table, columns, (source.image_column,), purpose))
    reference_columns = _reference_columns(table, columns, source)
    needed += reference_columns
    if source.mask_column:
        purpose = "the mask (mask_column)"
        needed.append(_column(table, columns, (source.mask_column,), purpose))
    folder = ListedFiles(table.parent, source, gathered)
    for number, row in enumerate(rows(needed), start=1):
        name = row.get(file_column)
        # A file in any column is used, so it is not reported as left out.
        folder.note_names(row.values())
        if name:
            extra_cells = Beside(
                image=row.get(source.image_column) if source.image_column else None,
                references=tuple(
                    n for column in reference_columns for n in _names(row.get(column))
                ),
                mask=row.get(source.mask_column) if source.mask_column else None,
            )
            folder.add(str(name), row.get(caption_column), extra_cells)
        else:
            gathered.refuse(f"{table.name} row {number}", "missing", f"its {file_column} is empty")
    return gathered.scan(folder.left_out(table.name))


def _reference_columns(
    table: Path, columns: Sequence[str], source: SourceConfig
) -> tuple[str, ...]:
    """The columns of references; raises `DitLoraError` if the table lacks one that the source names."""
    if source.reference_folders:
        return ()
    if source.reference_columns is None:
        return (REFERENCES,) if REFERENCES in columns else ()
    purpose = "a reference (reference_columns)"
    return tuple(_column(table, columns, (name,), purpose) for name in source.reference_columns)


def _names(cell: object) -> list[object]:
    """The names in a cell, which has one, a list, or none; in CSV, a list is written as JSON."""
    if isinstance(cell, str) and cell.startswith("["):
        # A file name may begin with a bracket too, and is not JSON then.
        with suppress(ValueError):
            cell = parse_json(cell)
    # An empty cell gives a list with an empty name, which keeps the order of references.
    return cell if isinstance(cell, list) else [cell]


def caption_columns(source: SourceConfig) -> tuple[str, ...]:
    """The columns that may contain the caption; the first that the table has is used."""
    return (source.caption_column,) if source.caption_column else CAPTION_COLUMNS


class Beside(NamedTuple):
    """Cells that name the additional files of a sample; None and "" are empty."""

    image: object = None
    references: tuple[object, ...] = ()
    mask: object = None


NOTHING = Beside()


class ListedFiles:
    """Adds the files named in a list, which must be below the list's folder or the source's `media`."""

    def __init__(self, folder: Path, source: SourceConfig, found: Gathered) -> None:
        self._root = Path(source.media).expanduser() if source.media else folder
        if not self._root.is_dir():
            raise DitLoraError(f"no folder of media {self._root}")
        self._found = found
        self._source = source
        self._named: set[str] = set()
        """Files that the list names, relative to the root."""

    def note_names(self, cells: Iterable[object]) -> None:
        """Remember all files that a row names in any column, because they are not left out."""
        for cell in cells:
            for name in _names(cell):
                if isinstance(name, str) and name:
                    self._named.add(below(self._root, name) or "")

    def left_out(self, table: str) -> list[str]:
        """Notes about files that the list does not name; none with `media`, which several lists may share."""
        if self._source.media is not None:
            return []
        # Listing the folder is needed only for the notes; the samples come from the list.
        listing = Listing(self._root)
        folders = (*self._source.reference_folders, self._source.mask_folder)
        extra_folders = {Path(folder).expanduser().absolute() for folder in folders if folder}
        unlisted = unlisted_notes(listing, table, self._named, extra_folders)
        return [*unlisted, *unread_notes(listing, self._named)]

    def add(self, name: str, caption: object, beside: Beside = NOTHING) -> None:
        """Add one sample; its id is its path below the root, or the name as written if that is refused."""
        path = below(self._root, name)
        if path is None:
            # The sample has no path below the root, so its name as written is its id.
            self._found.refuse(name, *self._leads_out(name))
            return
        # Continue with a missing file: its other faults are reported as well.
        media = MediaFile(self._root / path)
        if not media.exists():
            similar = similar_name(self._root / path)
            self._found.refuse(
                path, "missing", f"no such file; {similar}" if similar else "no such file"
            )
        faults: list[Fault] = []
        image = self._other("first image", beside.image, faults)
        references = [self._other(REFERENCE, cell, faults) for cell in beside.references]
        mask = self._other(MASK, beside.mask, faults)
        ordered_references, gap = in_order(references)
        # A missing file leaves a gap too, but is already reported.
        if gap is not None and not faults:
            faults.append(gap)
        for fault in by_code(faults):
            self._found.refuse(path, *fault)
        loss_mask = LossMask(mask) if mask else None
        self._found.add(
            path, media, caption, image=image, references=ordered_references, mask=loss_mask
        )

    def _other(self, what: str, cell: object, faults: list[Fault]) -> MediaFile | None:
        """An additional file of a sample; None if there is none, with a fault if one was named."""
        if cell is None or cell == "":
            return None
        # A cell of another type than text cannot be a name.
        path = below(self._root, cell) if isinstance(cell, str) else None
        if path is not None and MediaFile(self._root / path).exists():
            return MediaFile(self._root / path)
        faults.append(self._fault(what, cell, path))
        return None

    def _fault(self, what: str, cell: object, path: str | None) -> Fault:
        """The fault of an additional file that cannot be used."""
        if not isinstance(cell, str):
            return f"{what}_missing", f"its {what} is of type {type(cell).__name__}, not a name"
        if path is None:
            return self._leads_out(cell)
        code = f"{what}_missing" if what in (REFERENCE, MASK) else "missing"
        return code, f"no such {what}: {self._root / path}"

    def _leads_out(self, name: str) -> Fault:
        message = f"{name} leads out of {self._root}; set data.media to a folder that it is below"
        return "unsafe_path", message


def read_text(path: Path) -> str:
    """Text of a UTF-8 file without byte order mark; raises `DitLoraError` if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {path} as UTF-8 text: {error}{encoding_hint(error)}"
        raise DitLoraError(message) from error


def _read_jsonl(path: Path, gathered: Gathered) -> _Read:
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
            gathered.refuse(f"{path.name} line {number}", "unreadable", fault)
    # Rows may have different keys; a column is any key of any row.
    columns = dict.fromkeys(key for record in records for key in record)
    return list(columns), lambda wanted: records


def _read_csv(path: Path, gathered: Gathered) -> _Read:
    # Keep the line ends of the file, because a quoted caption may contain some.
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        records = list(reader)
    except csv.Error as error:
        raise DitLoraError(f"cannot read {path} after line {reader.line_num}: {error}") from error
    return list(reader.fieldnames or ()), lambda wanted: records


def _read_parquet(path: Path, gathered: Gathered) -> _Read:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DitLoraError(
            f"{path} needs the pyarrow package; pip install 'dit-lora[datasets]'"
        ) from error

    def read(function: Callable[..., Any], **options: object) -> Any:
        try:
            return function(path, **options)
        except (OSError, pyarrow.ArrowException) as error:
            raise DitLoraError(f"cannot read {path}: {error}") from error

    # Other columns, which may contain whole images, are never read.
    return read(parquet.read_schema).names, lambda wanted: read(
        parquet.read_table, columns=wanted, partitioning=None
    ).to_pylist()


_READERS: dict[str, Callable[[Path, Gathered], _Read]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _column(path: Path, columns: Sequence[str], wanted: Sequence[str], what: str) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DitLoraError(
        f"{path}: no column for {what}; looked for {', '.join(wanted)} among {', '.join(columns)}"
    )
