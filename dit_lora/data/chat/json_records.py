"""Reads the records of a JSON list or of JSON lines one at a time, so that memory holds only one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dit_lora.errors import DitLoraError
from dit_lora.parsing import ParseError, parse_json, parse_json_at

_CHUNK = 1 << 20
_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file."""

    number: int
    """Number of the record, from 1; for JSON lines, the line number."""
    value: Any
    fault: str | None = None
    """Why the line is not JSON; None if it is."""


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file: a list if it begins with a bracket, otherwise one record per line.

    Raises `DitLoraError`, with line and column, if the file cannot be read or a list is not valid JSON.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.read(1)
            while head and head in _SPACE:
                head = file.read(1)
            # A text file cannot seek back by characters, only to its beginning.
            file.seek(0)
            yield from _ListReader(path, file) if head == "[" else _lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}") from error


def _lines(file: IO[str]) -> Iterator[Record]:
    """Yield one record per line that is not blank."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield Record(number, parse_json(line.rstrip()))
        except ParseError as error:
            location = "" if error.at is None else f"column {error.at + 1}: "
            yield Record(number, None, location + error.words)


class _ListReader:
    """Iterates over the elements of a JSON list, which is read in chunks."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file
        self._text = ""
        self._at = 0
        """Position in the text up to which it has been parsed."""
        self._line, self._column = 1, 1
        """Line and column in the file at which the text in memory begins."""

    def __iter__(self) -> Iterator[Record]:
        self._take("[", "a list")
        number, separator = 0, ","
        if self._next() == "]":
            separator = self._take("]", "the end of the list")
        while separator == ",":
            number += 1
            yield Record(number, self._value())
            separator = self._take(",]", "a comma or the end of the list")
        # Text after the list means that the file is damaged, for example two lists joined.
        if self._next():
            self._fail("nothing more is expected after the list", self._at)

    def _next(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._read(_CHUNK):
                return self._text[self._at : self._at + 1]

    def _take(self, wanted: str, what: str) -> str:
        """Consume the next character, which must be one of `wanted`."""
        character = self._next()
        if not character or character not in wanted:
            self._fail(f"{what} is expected", self._at)
        self._at += 1
        return character

    def _value(self) -> Any:
        """Parse the next JSON value, reading more of the file as needed."""
        self._next()
        size = _CHUNK
        while True:
            try:
                value, end = parse_json_at(self._text, self._at)
            except ParseError as error:
                # The record may continue in the next chunk: read twice as much as before and try again.
                if not self._read(size):
                    self._fail(error.words, self._at if error.at is None else error.at)
                size *= 2
                continue
            # At the end of the text, a number may continue in the next chunk.
            if end < len(self._text) or not self._read(size):
                self._at = end
                return value

    def _read(self, size: int) -> bool:
        """Replace the parsed text with more of the file; returns False at the end of the file."""
        more = self._file.read(size)
        if more:
            # Count the lines of the dropped text, for messages.
            self._line, self._column = self._place(self._at)
            self._text = self._text[self._at :] + more
            self._at = 0
        return bool(more)

    def _place(self, at: int) -> tuple[int, int]:
        """Line and column in the file of a position in the text."""
        # Line breaks between the start of the text in memory and the position.
        breaks = self._text.count("\n", 0, at)
        if not breaks:
            return self._line, self._column + at
        return self._line + breaks, at - self._text.rindex("\n", 0, at)

    def _fail(self, message: str, at: int) -> None:
        line, column = self._place(at)
        raise DitLoraError(f"{self._path} is no JSON: line {line}, column {column}: {message}")
