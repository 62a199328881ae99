"""The captions of a folder of clips and pictures, in its metadata.jsonl: read, added, and edited in place.

Every line that is not changed keeps its bytes, and every other column of one that is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.data.media.media import below
from dit_lora.data.sources.listing import Listing
from dit_lora.data.sources.tables import CAPTION_COLUMNS, FILE_COLUMNS, TABLES, read_text
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

TABLE = TABLES[0]
_LISTS = (*TABLES[1:], "prompts.txt", "videos.txt")
"""Other lists of captions, in whose place a metadata.jsonl would be read."""


@dataclass
class CaptionTable:
    """A folder's files and their captions."""

    root: Path
    captions: dict[str, str]
    """Captions by file, those of files that have one: the table's, or without a table those of a .txt beside a file."""
    media: list[str]
    """Files that may have a caption, in the order of their paths; what a row names in another column is none of them."""
    _lines: list[str] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)
    """Places of rows in the lines, by file."""
    _columns: tuple[str, str] = (FILE_COLUMNS[0], CAPTION_COLUMNS[0])

    @classmethod
    def read(cls, root: Path) -> "CaptionTable":
        """Read a folder. Raises `DitLoraError` where it is none, has no media, or keeps its captions in another list."""
        if not root.is_dir():
            raise DitLoraError(f"no folder {root}; give the folder with your clips and pictures")
        others = [name for name in _LISTS if (root / name).is_file()]
        if others:
            raise DitLoraError(
                f"{root} has its captions in {' and '.join(others)}, in whose place a {TABLE} would be read; write them "
                f"into a {TABLE} first, or edit them there"
            )
        listing = Listing(root)
        if not listing.media:
            what = (
                "tar files, whose captions lie in them"
                if listing.tars
                else "no clip and no picture"
            )
            raise DitLoraError(f"{root} has {what}; captions are made for a folder of files")
        table = cls(root, {}, listing.media)
        if (root / TABLE).is_file():
            table._read_rows()
        else:
            table._read_texts(listing)
        return table

    @property
    def missing(self) -> list[str]:
        """Return the files without a caption, in order."""
        return [name for name in self.media if not self.captions.get(name, "").strip()]

    def put(self, captions: Mapping[str, str]) -> None:
        """Write captions into metadata.jsonl by one rename; those of .txt files come along where there was no table.

        Raises `DitLoraError` if it cannot be written.
        """
        new = dict(captions)
        if not self._rows and not self._lines:
            new = {**self.captions, **new}
        file_column, caption_column = self._columns
        lines = list(self._lines)
        for name, caption in new.items():
            place = self._rows.get(name)
            row = {file_column: name} if place is None else parse_json(lines[place])
            text = json.dumps({**row, caption_column: caption}, ensure_ascii=False)
            if place is None:
                self._rows[name] = len(lines)
                lines.append(text)
            else:
                # A line's own end of line stays.
                lines[place] = text + ("\r" if lines[place].endswith("\r") else "")
        try:
            write_whole(self.root / TABLE, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise DitLoraError(f"cannot write {self.root / TABLE}: {error.strerror}") from error
        self._lines = lines
        self.captions |= new

    def _read_rows(self) -> None:
        text = read_text(self.root / TABLE)
        self._lines = text.removesuffix("\n").split("\n") if text else []
        records = dict(self._records())
        self._columns = (
            _column(records, FILE_COLUMNS),
            _column(records, CAPTION_COLUMNS),
        )
        file_column, caption_column = self._columns
        beside = set()
        for place, record in records.items():
            name = below(self.root, str(record.get(file_column) or ""))
            if name is None:
                continue
            self._rows[name] = place
            caption = record.get(caption_column)
            if isinstance(caption, str | int | float) and str(caption).strip():
                self.captions[name] = str(caption).strip()
            others = (value for key, value in record.items() if key != file_column)
            beside |= {below(self.root, one) for value in others for one in _texts(value)}
        self.media = [name for name in self.media if name in self._rows or name not in beside]

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows that are objects by their line; `audit` tells of the others."""
        for place, line in enumerate(self._lines):
            try:
                record = parse_json(line) if line.strip() else None
            except ValueError:
                continue
            if isinstance(record, dict):
                yield place, record

    def _read_texts(self, listing: Listing) -> None:
        for name in self.media:
            beside = f"{name.rpartition('.')[0]}.txt"
            if beside in listing.texts:
                caption = " ".join(read_text(self.root / beside).split())
                self.captions |= {name: caption} if caption else {}


def _column(records: Mapping[int, Mapping[str, Any]], names: tuple[str, ...]) -> str:
    """Return the first of these columns that any row has, or the usual one."""
    there = {key for record in records.values() for key in record}
    return next((name for name in names if name in there), names[0])


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a cell, which may hold several."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and one:
            yield one
