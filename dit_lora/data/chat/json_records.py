"""The records of a JSON list or of JSON lines, one after the other; what is in memory is one of them."""

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
    """One of a file's records."""

    number: int
    """From 1 on; of JSON lines, the line's."""
    value: Any
    fault: str | None = None
    """Why a line is no JSON."""


def read_records(path: Path) -> Iterator[Record]:
    """A file that begins with a bracket is a list, any other holds one record a line.

    Raises `DitLoraError`, with line and column, if it cannot be read or a list is no JSON from somewhere on.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.read(1)
            while head and head in _SPACE:
                head = file.read(1)
            file.seek(0)
            yield from _ListReader(path, file) if head == "[" else _lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}") from error


def _lines(file: IO[str]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield Record(number, parse_json(line.rstrip()))
        except ParseError as error:
            where = "" if error.at is None else f"column {error.at + 1}: "
            yield Record(number, None, where + error.words)


class _ListReader:
    """The elements of a JSON list, read by and by."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file
        self._text = ""
        self._at = 0
        """What is before it in the text is done with."""
        self._line, self._column = 1, 1
        """Where the text begins in the file."""
        self._ended = False

    def __iter__(self) -> Iterator[Record]:
        self._take("[", "a list")
        if self._next() == "]":
            self._at += 1
        else:
            number, more = 0, True
            while more:
                number += 1
                yield Record(number, self._value())
                more = self._take(",]", "a comma or the end of the list") == ","
        if self._next():
            self._fail("nothing more is expected after the list", self._at)

    def _next(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._read(_CHUNK):
                return self._text[self._at : self._at + 1]

    def _take(self, wanted: str, what: str) -> str:
        found = self._next()
        if not found or found not in wanted:
            self._fail(f"{what} is expected", self._at)
        self._at += 1
        return found

    def _value(self) -> Any:
        self._next()
        size = _CHUNK
        while True:
            try:
                value, end = parse_json_at(self._text, self._at)
            except ParseError as error:
                # It may go on in what is not read yet, of which each time twice as much is taken.
                if not self._read(size):
                    self._fail(error.words, self._at if error.at is None else error.at)
                size *= 2
                continue
            if end < len(self._text) or not self._read(size):  # else a number may go on
                self._at = end
                return value

    def _read(self, size: int) -> bool:
        """Take more of the file in place of what is done with; False at its end."""
        more = "" if self._ended else self._file.read(size)
        self._ended = not more
        if more:
            self._line, self._column = self._place(self._at)
            self._text = self._text[self._at :] + more
            self._at = 0
        return bool(more)

    def _place(self, at: int) -> tuple[int, int]:
        breaks = self._text.count("\n", 0, at)
        if not breaks:
            return self._line, self._column + at
        return self._line + breaks, at - self._text.rindex("\n", 0, at)

    def _fail(self, words: str, at: int) -> None:
        line, column = self._place(at)
        raise DitLoraError(f"{self._path} is no JSON: line {line}, column {column}: {words}")
