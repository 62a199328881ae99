"""Reads the records of a JSON list or of JSON lines one at a time, so that memory holds only one."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from dit_lora.errors import DitLoraError
from dit_lora.files import open_regular_file
from dit_lora.parsing import ParseError, parse_json, parse_json_at

_CHUNK_CHARS = 1 << 20
_WHITESPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class AnnotationRecord:
    """One record of an annotation file, with its position."""

    number: int
    """Number of the record, from 1; for JSON lines, the line number."""
    value: Any
    fault: str | None = None
    """Why the line is not JSON; None if it is."""


def read_records(path: Path) -> Iterator[AnnotationRecord]:
    """Yield the records of an annotation file: a list if it begins with a bracket, else one record per line.

    Raises `DitLoraError`, with line and column, if the file cannot be read or a list is not valid JSON.
    """
    try:
        # A named pipe would wait for its writer.
        with TextIOWrapper(open_regular_file(path), encoding="utf-8-sig") as file:
            head = file.read(1)
            while head and head in _WHITESPACE:
                head = file.read(1)
            # A text file cannot seek back by characters, only to its beginning.
            file.seek(0)
            yield from _JsonListReader(path, file) if head == "[" else _read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DitLoraError(f"cannot read {path} as UTF-8 text: {error}") from error


def _read_lines(file: IO[str]) -> Iterator[AnnotationRecord]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield AnnotationRecord(number, parse_json(line.rstrip()))
        except ParseError as error:
            location = "" if error.position is None else f"column {error.position + 1}: "
            yield AnnotationRecord(number, None, location + error.message)


class _JsonListReader:
    """Iterates over the elements of a JSON list in a file, which is read in chunks."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file
        self._text = ""
        self._position = 0
        """Position in the text up to which it has been parsed."""
        self._line, self._column = 1, 1
        """Line and column in the file at which the text in memory begins."""

    def __iter__(self) -> Iterator[AnnotationRecord]:
        self._expect_character("[", "a list")
        number, separator = 0, ","
        if self._peek_character() == "]":
            separator = self._expect_character("]", "the end of the list")
        while separator == ",":
            number += 1
            yield AnnotationRecord(number, self._parse_value())
            separator = self._expect_character(",]", "a comma or the end of the list")
        # Text after the list means that the file is damaged, for example two lists joined.
        if self._peek_character():
            self._raise_parse_error("unexpected text after the list", self._position)

    def _peek_character(self) -> str:
        """Next character of the file that is not white space; empty at the end of the file."""
        while True:
            while self._position < len(self._text) and self._text[self._position] in _WHITESPACE:
                self._position += 1
            if self._position < len(self._text) or not self._read_next_chunk(_CHUNK_CHARS):
                return self._text[self._position : self._position + 1]

    def _expect_character(self, allowed: str, expected: str) -> str:
        character = self._peek_character()
        if not character or character not in allowed:
            self._raise_parse_error(f"{expected} is expected", self._position)
        self._position += 1
        return character

    def _parse_value(self) -> Any:
        self._peek_character()
        size = _CHUNK_CHARS
        while True:
            try:
                value, end = parse_json_at(self._text, self._position)
            except ParseError as error:
                # The record may continue in the next chunk: read twice as much as before and try again.
                if not self._read_next_chunk(size):
                    self._raise_parse_error(
                        error.message, self._position if error.position is None else error.position
                    )
                size *= 2
                continue
            # At the end of the text, a number may continue in the next chunk.
            if end < len(self._text) or not self._read_next_chunk(size):
                self._position = end
                return value

    def _read_next_chunk(self, size: int) -> bool:
        """Read the next chunk of the file in place of the parsed text; returns False at the end of the file."""
        more = self._file.read(size)
        if more:
            # Count the lines of the dropped text, for messages.
            self._line, self._column = self._locate_position(self._position)
            self._text = self._text[self._position :] + more
            self._position = 0
        return bool(more)

    def _locate_position(self, position: int) -> tuple[int, int]:
        """Line and column in the file of a position in the current chunk."""
        breaks = self._text.count("\n", 0, position)
        if not breaks:
            return self._line, self._column + position
        return self._line + breaks, position - self._text.rindex("\n", 0, position)

    def _raise_parse_error(self, message: str, position: int) -> None:
        line, column = self._locate_position(position)
        raise DitLoraError(f"{self._path} is not valid JSON: line {line}, column {column}: {message}")
