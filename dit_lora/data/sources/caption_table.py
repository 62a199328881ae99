"""The captions of a folder of clips and pictures, in its metadata.jsonl: read, added, and edited in place.

An edit changes only the characters of the caption. Every writer holds `lock_table`, a lock between processes.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.config.data import SourceConfig
from dit_lora.data.media.media import resolve_path_below
from dit_lora.data.sources.caption_lines import set_json_value, to_json_text
from dit_lora.data.sources.caption_text import suggest_encoding
from dit_lora.data.sources.caption_undo import CaptionUndo, UndoStep
from dit_lora.data.sources.listing import FolderListing
from dit_lora.data.sources.tables import CAPTION_COLUMNS, FILE_COLUMNS, TABLE_NAMES, read_text
from dit_lora.environment.operating_system import lock_file
from dit_lora.errors import DitLoraError
from dit_lora.files import overwrite_file_atomically, read_regular_files
from dit_lora.parsing import parse_json

TABLE_NAME = TABLE_NAMES[0]
WORK_FOLDER = ".captions"
"""Hidden folder for locks, and for captions that are not in the table yet."""
_BOM = b"\xef\xbb\xbf"
_OTHER_LISTS = (*TABLE_NAMES[1:], "prompts.txt", "videos.txt")
"""Other lists of captions, which would be ignored once there is a metadata.jsonl."""


@dataclass
class CaptionTable:
    """Media files of a folder, and their captions."""

    root: Path
    captions: dict[str, str]
    """Captions by file, exactly as in the table; without a table, from the .txt file of the same name."""
    media: list[str]
    """Files that may have a caption, sorted by path; without files that a row names in another column."""
    listing: FolderListing
    media_names: set[str] = field(default_factory=set)
    """The files in `media`, for lookup."""
    related_names: set[str] = field(default_factory=set)
    """The media files in `related_files`."""
    _lines: list[str] = field(default_factory=list)
    """Lines of the table without newlines; the last one is empty if the table ends with a newline."""
    _row_indices: dict[str, int] = field(default_factory=dict)
    """Index of each file's row in `_lines`."""
    _columns: tuple[str, str] = (FILE_COLUMNS[0], CAPTION_COLUMNS[0])
    related_files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Column and name of the files that a file's row names in other columns, such as masks and references."""
    other_list: str = ""
    """The list that has the captions, such as metadata.csv, where it is not a metadata.jsonl: it is only read."""
    has_unread_texts: bool = False
    """True if `captions` lacks those of .txt files, except the ones that `read_texts` was called for."""
    _bom: bytes = b""
    _stamp: tuple[object, ...] = ()
    _is_locked: bool = False

    @classmethod
    def read(
        cls,
        root: Path,
        previous: "CaptionTable | None" = None,
        *,
        allow_other_lists: bool = False,
        skip_texts: bool = False,
    ) -> "CaptionTable":
        """Read the media files and captions of a folder; with `skip_texts`, .txt files are left to `read_texts`.

        Parts of `previous`, an earlier result, are reused if their files have not changed. Raises `DitLoraError` if
        the folder is missing, has no media, or keeps its captions in another list, unless `allow_other_lists`.
        """
        if not root.is_dir():
            raise DitLoraError(f"{root} is not a folder; give the folder with your clips and pictures")
        # From a named pipe, reading would wait for a writer.
        if os.path.lexists(root / TABLE_NAME) and not (root / TABLE_NAME).is_file():
            raise DitLoraError(f"{root / TABLE_NAME} is not a regular file; remove it")
        other_lists = [name for name in _OTHER_LISTS if (root / name).is_file()]
        if other_lists and not allow_other_lists:
            raise DitLoraError(
                f"{root} has its captions in {' and '.join(other_lists)}, which a {TABLE_NAME} would replace; "
                f"move them to a {TABLE_NAME} first, or edit them there"
            )
        # Listing a large folder is slow, so reuse the listing while no folder has changed.
        is_listed = previous is not None and previous.listing.is_current()
        listing = previous.listing if previous is not None and is_listed else FolderListing(root)
        if not listing.media:
            contents = "tar files, whose captions lie in them" if listing.tars else "no clip and no picture"
            raise DitLoraError(f"{root} has {contents}; captions are made for a folder of files")
        # Take the stamp before reading the bytes, so that a change in between is noticed next time.
        stamp = _compute_stamp(root, other_lists)
        is_read = previous is not None and not previous.has_unread_texts
        if skip_texts and listing.texts and not stamp and not is_read:
            table = cls(root, {}, listing.media, listing, has_unread_texts=True)
            table._update_media()
            return table
        if previous is not None and is_read and previous._stamp == (stamp or _compute_text_stamp(root, listing)):
            previous.listing = listing
            # Files may have been added, although the table is the same.
            previous._update_media()
            return previous
        table = cls(root, {}, listing.media, listing, other_list=" and ".join(other_lists), _stamp=stamp)
        if other_lists:
            # The readers of all kinds of lists, which other folders do not need.
            from dit_lora.data.sources.scan import read_folder

            scanned = read_folder(root, SourceConfig(path=str(root)), None)
            table.captions = {clip.id: clip.caption for clip in scanned.clips}
            table._update_media()
        elif stamp:
            table._read_rows()
        else:
            table._update_media()
            # The stamp is as of before the bytes were read.
            table._stamp = table.read_texts()
        return table

    @property
    def has_metadata_rows(self) -> bool:
        """True if captions come from a metadata.jsonl that is not empty."""
        return bool(self._lines)

    @property
    def uncaptioned_files(self) -> list[str]:
        """Media files of the folder without a caption, in order."""
        return [name for name in self.media if not self.captions.get(name, "").strip()]

    def has_media(self, name: str) -> bool:
        """True if a media file is a sample of the folder, or a mask or reference of one."""
        return name in self.media_names or name in self.related_names

    def read_texts(self, names: Collection[str] | None = None) -> tuple[int, ...]:
        """Read the captions of the .txt files of all media files, or of these; the result differs if files change.

        Raises:
            DitLoraError: If a file cannot be read, or is not UTF-8.
        """
        stamps: list[int] = []
        # Strings, as `Path` would take half of the time.
        prefix = os.path.join(self.root, "")
        files = list(_list_text_files(self.listing, self.listing.media if names is None else names))
        texts = read_regular_files([prefix + text_file for _, text_file in files])
        text_file = ""
        try:
            for (name, text_file), (data, status) in zip(files, texts, strict=True):
                # Training collapses white space in .txt captions too.
                caption = " ".join(data.removeprefix(_BOM).decode().split())
                # A hash: Python's garbage collector would look through tuples again and again.
                stamps.append(hash((text_file, *_get_stamp(status))))
                # An empty .txt file counts as no caption.
                if caption:
                    self.captions[name] = caption
        except (OSError, UnicodeDecodeError) as error:
            path = getattr(error, "filename", None) or prefix + text_file
            raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}{suggest_encoding(error)}") from error
        return tuple(stamps)

    def write_captions(self, captions: Mapping[str, str]) -> None:
        """Write captions to metadata.jsonl atomically; a new file also gets the captions of the .txt files.

        Only inside `lock_table`. Raises `DitLoraError` if the table cannot be written.
        """
        if not self._is_locked:
            raise RuntimeError("captions are written inside lock_table only")
        new = dict(captions)
        if not new:
            return
        # A new table replaces the .txt files, so their captions are copied into it.
        if not self._lines:
            new = {**self.captions, **new}
        file_column, caption_column = self._columns
        # Work on copies: if writing fails, this object still matches the file.
        lines, rows = list(self._lines), dict(self._row_indices)
        # Drop the empty element after the last newline; it is added again below.
        if lines and not lines[-1]:
            lines.pop()
        # A table with Windows line ends gets new rows with the same line ends.
        line_end = "\r" if lines and lines[0].endswith("\r") else ""
        for name, caption in new.items():
            row_index = rows.get(name)
            if row_index is not None:
                lines[row_index] = set_json_value(lines[row_index], caption_column, caption)
                continue
            rows[name] = len(lines)
            lines.append(to_json_text({file_column: name, caption_column: caption}) + line_end)
        # Without new rows, a table that ends without a newline stays that way.
        if len(lines) > len(self._lines) or not self._lines[-1]:
            lines.append("")
        try:
            self._undo.record(self._bom, self._lines, lines, len(captions))
            overwrite_file_atomically(self.root / TABLE_NAME, self._bom + "\n".join(lines).encode())
        except OSError as error:
            raise DitLoraError(f"cannot write {error.filename or self.root / TABLE_NAME}: {error.strerror}") from error
        self._lines, self._row_indices = lines, rows
        self.captions |= new
        self._stamp = _compute_stamp(self.root)

    @property
    def undo_step(self) -> UndoStep | None:
        """The latest write, if it can be undone."""
        return self._undo.find_step()

    def undo(self, step_id: str | None = None) -> UndoStep:
        """Restore the table's bytes from before its latest write. Only inside `lock_table`.

        This object then has the old captions; read the table again. Raises `DitLoraError` if nothing can be undone,
        or if `step_id` is given and names another step.
        """
        if not self._is_locked:
            raise RuntimeError("captions are undone inside lock_table only")
        return self._undo.undo(step_id)

    @property
    def _undo(self) -> CaptionUndo:
        return CaptionUndo(self.root / TABLE_NAME, self.root / WORK_FOLDER)

    def _read_rows(self) -> None:
        path = self.root / TABLE_NAME
        text = read_text(path)
        with path.open("rb") as file:
            # Kept for writing: an edit must not remove a byte order mark.
            self._bom = _BOM if file.read(len(_BOM)) == _BOM else b""
        self._lines = text.split("\n") if text else []
        # Rows that are not JSON objects are ignored here; the audit reports them.
        records: dict[int, dict[str, Any]] = {}
        for row_index, line in enumerate(self._lines):
            try:
                record = parse_json(line) if line.strip() else None
            except ValueError:
                continue
            if isinstance(record, dict):
                records[row_index] = record
        self._columns = (_choose_column(records, FILE_COLUMNS), _choose_column(records, CAPTION_COLUMNS))
        file_column, caption_column = self._columns
        for row_index, record in records.items():
            # Rows that name a file outside the folder are ignored here; the audit reports them.
            name = resolve_path_below(self.root, str(record.get(file_column) or ""))
            if name is None:
                continue
            self._row_indices[name] = row_index
            caption = record.get(caption_column)
            # Labels may be numbers; an empty caption counts as missing.
            if isinstance(caption, (str, int, float)) and str(caption):
                self.captions[name] = str(caption)
            for key, cell in record.items():
                # Before all else: most tables have no other column, and there are many rows.
                if key in self._columns:
                    continue
                for text in cell if isinstance(cell, list) else [cell]:
                    if isinstance(text, str) and text:
                        related = resolve_path_below(self.root, text) or ""
                        self.related_files.setdefault(name, []).append((key, related))
        self._update_media()

    def _update_media(self) -> None:
        non_samples = {related for files in self.related_files.values() for _, related in files}
        self.related_names = non_samples.intersection(self.listing.media)
        self.media = [
            name
            for name in self.listing.media
            # A mask or reference that also has a row of its own is a sample.
            if name in self._row_indices or name not in non_samples
        ]
        self.media_names = set(self.media)


def make_work_folder(root: Path) -> Path:
    """Make the hidden folder in a data set's folder, if it is not there, and return its path.

    Raises `DitLoraError` if it cannot be made, or is a link: files of another folder would be overwritten.
    """
    folder = root / WORK_FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DitLoraError(f"cannot write {folder}: {error.strerror}") from error
    if folder.is_symlink():
        raise DitLoraError(f"{folder} is a link; remove it")
    return folder


@contextmanager
def lock_table(root: Path, previous: CaptionTable | None = None) -> Iterator[CaptionTable]:
    """Yield the folder's current captions, and keep all other writers out, in any process.

    Raises `DitLoraError` if the lock file cannot be written.
    """
    if not root.is_dir():
        # Raises the error for a missing folder, before one is created.
        CaptionTable.read(root)
    folder = make_work_folder(root)
    try:
        handle = os.open(folder / "table.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise DitLoraError(f"cannot write {folder}: {error.strerror}") from error
    try:
        try:
            # The kernel releases the lock if the process dies.
            lock_file(handle, waits=True)
        except OSError as error:
            raise DitLoraError(
                f"cannot lock {folder / 'table.lock'}: {error.strerror}; to edit captions, use a file system that "
                "has locks"
            ) from error
        table = CaptionTable.read(root, previous)
        table._is_locked = True
        try:
            yield table
        finally:
            table._is_locked = False
    finally:
        os.close(handle)


def _compute_stamp(root: Path, other_lists: Sequence[str] = ()) -> tuple[object, ...]:
    """Values that differ if other lists or else metadata.jsonl may have changed; empty if there is no list."""
    if other_lists:
        return tuple(_get_stamp((root / name).stat()) for name in other_lists)
    with suppress(OSError):
        return _get_stamp((root / TABLE_NAME).stat())
    return ()


def _compute_text_stamp(root: Path, listing: FolderListing) -> tuple[object, ...]:
    """Values that differ if the .txt files may have changed."""
    stamps: list[int] = []
    prefix = os.path.join(root, "")
    for _, text_file in _list_text_files(listing, listing.media):
        with suppress(OSError):
            stamps.append(hash((text_file, *_get_stamp(os.stat(prefix + text_file)))))
    return tuple(stamps)


def _get_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and times of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _list_text_files(listing: FolderListing, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield those of these media files that have a .txt file of the same name, and the .txt file."""
    for name in names:
        text_file = f"{name.rpartition('.')[0]}.txt"
        if text_file in listing.texts:
            yield name, text_file


def _choose_column(records: Mapping[int, Mapping[str, Any]], names: tuple[str, ...]) -> str:
    """Choose the first of these columns that any row of a table has, or the default one."""
    columns = {key for record in records.values() for key in record}
    return next((name for name in names if name in columns), names[0])
