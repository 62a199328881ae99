"""Kind of a file by its first bytes, and its end by its own account."""

import io
from collections.abc import Iterator
from typing import BinaryIO

from dit_lora.data.media.media import sniffed_suffix

HEAD = 1024
"""Number of bytes that tell a file's kind."""

_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "an empty zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"\xfd7zXZ": "an xz archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a rar archive",
    b"%PDF": "a PDF",
    b"SQLite format 3": "a database",
    b"\x93NUMPY": "a NumPy array",
    b"\x7fELF": "a program",
}
# Cameras and editors add some bytes behind an image's end.
_TAIL = 4096
# Fields of a file's head may hold text; these bytes are in no text.
_BINARY = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1b")
_SOUND = (b"RIFF", b"ID3", b"fLaC", b"OggS", b"FORM")
_SAME = (
    {".mp4", ".mov", ".m4v"},
    {".mkv", ".webm"},
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"},
    {".png", ".apng"},
    {".bmp", ".dib"},
    {".tif", ".tiff"},
    {".avif", ".avifs"},
    {".jp2", ".jpx", ".jpf"},
)


def foreign_kind(head: bytes) -> str | None:
    """Return what a file is if it is no media at all, such as an archive or text; None if it may be media.

    Text is never given to FFmpeg, which takes some for playlists and opens the files and addresses they name.
    """
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            return kind
    # A tar's magic is at byte 257 of its first header.
    if head[257:262] == b"ustar":
        return "a tar archive"
    if set(head) & _BINARY:
        return None
    try:
        # The head may end within a character, of which UTF-8 has up to 4 bytes.
        text = head[:-3].decode("utf-8") if len(head) == HEAD else head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 6:
            return None
        text = head[: error.start].decode("utf-8")
    start = text.lstrip("\ufeff \t\r\n").lower()
    if start.startswith(("<!doctype html", "<html")):
        return "an HTML page"
    return "text"


def is_known(head: bytes) -> bool:
    """Return True if the first bytes are those of a video, image or sound format."""
    return sniffed_suffix(head[:64]) is not None or head.startswith(_SOUND)


def is_other_kind(suffix: str, content: str) -> bool:
    """Return True if a name's suffix belongs to another format than the content's."""
    return suffix != content and not any({suffix, content} <= group for group in _SAME)


def has_end(stream: BinaryIO, size: int) -> bool:
    """Return True if the last bytes of a JPEG or PNG are those that end it; True for any other file."""
    stream.seek(0)
    head = stream.read(8)
    stream.seek(max(0, size - _TAIL))
    tail = stream.read(_TAIL)
    if head.startswith(b"\xff\xd8"):
        # The marker EOI (ITU-T T.81, B.1.1.3); within coded data, a zero follows every FF.
        return b"\xff\xd9" in tail
    return not head.startswith(b"\x89PNG") or b"IEND" in tail


def missing_bytes(stream: BinaryIO, size: int) -> int:
    """Return how many bytes of frames or index the file lacks by its own account; 0 if it does not tell."""
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        ends = _avi_ends(stream, size)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        ends = iter([8 + int.from_bytes(head[4:8], "little")])
    elif head[:4] == b"\x1aE\xdf\xa3":
        ends = _matroska_ends(stream, size)
    elif sniffed_suffix(head) in (".mp4", ".mov"):
        ends = _box_ends(stream, size)
    else:
        return 0
    if size == 0:
        return 0
    lacking = [end - size for end in ends]
    return max(lacking, default=0)


def _box_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the ends of an mp4's boxes (ISO 14496-12, 4.2) in bytes; 0 for a box without frames or index."""
    at = 0
    while at + 8 <= size:
        stream.seek(at)
        header = stream.read(16)
        length, kind = int.from_bytes(header[:4]), header[4:8]
        # A length of 1 says that 8 more bytes hold it.
        if length == 1:
            length = int.from_bytes(header[8:16])
        # A length of 0 reaches to the end of the file; others are no box, but something behind the last one.
        if length < 8 or not all(32 <= byte < 127 for byte in kind):
            return
        at += length
        yield at if kind in (b"mdat", b"moov", b"moof") else 0


def _avi_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the ends, in bytes, of an AVI's lists of headers and of frames; an interrupted writer leaves 0 there."""
    at = 12
    while at + 12 <= size:
        stream.seek(at)
        header = stream.read(12)
        end = at + 8 + int.from_bytes(header[4:8], "little")
        if header[:4] == b"LIST":
            yield end
            if header[8:12] == b"movi":
                return
        # Chunks begin at even bytes.
        at = end + end % 2


def _matroska_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the end of the segment in bytes (RFC 8794), which a live one does not know."""
    stream.seek(4)
    header = _variable(stream)
    if header is None:
        return
    stream.seek(header, io.SEEK_CUR)
    if stream.read(4) == b"\x18S\x80g":
        length = _variable(stream)
        if length is not None:
            yield stream.tell() + length


def _variable(stream: BinaryIO) -> int | None:
    """Read an EBML number of variable length; None if it is unknown."""
    first = stream.read(1)
    if not first or not first[0]:
        return None
    width = 9 - first[0].bit_length()
    marker = 1 << (7 * width)
    value = int.from_bytes(first + stream.read(width - 1)) - marker
    # All bits set stand for an unknown length.
    return None if value >= marker - 1 else value
