"""File format by the first bytes, and checks that a file is as long as its container says."""

import io
from collections.abc import Iterator
from typing import BinaryIO

from dit_lora.data.media.media import detect_suffix

HEAD_BYTES = 1024
"""Number of bytes that are read to recognize a file's format."""

_FOREIGN_MAGIC = {
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
# Bytes at the end of a file that are searched: cameras and editors append some after an image's end.
_TAIL_BYTES = 4096
# Control bytes that never occur in text. A media header may contain text fields, but also some of these.
_BINARY_BYTES = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1b")
_SOUND_MAGIC = (b"RIFF", b"ID3", b"fLaC", b"OggS", b"FORM")
_EQUIVALENT_SUFFIXES = (
    {".mp4", ".mov", ".m4v"},
    {".mkv", ".webm"},
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"},
    {".png", ".apng"},
    {".bmp", ".dib"},
    {".tif", ".tiff"},
    {".avif", ".avifs"},
    {".jp2", ".jpx", ".jpf"},
)


def find_foreign_format(head: bytes) -> str | None:
    """Name of a file's format if it is not media at all, such as an archive or text; None if it may be media.

    Text must not reach FFmpeg, which reads some texts as playlists and opens the files and addresses in them.
    """
    for magic, kind in _FOREIGN_MAGIC.items():
        if head.startswith(magic):
            return kind
    # A tar's magic is at byte 257 of its first header.
    if head[257:262] == b"ustar":
        return "a tar archive"
    if set(head) & _BINARY_BYTES:
        return None
    try:
        # The head may end in the middle of a character, which has up to 4 bytes in UTF-8.
        text = head[:-3].decode("utf-8") if len(head) == HEAD_BYTES else head.decode("utf-8")
    except UnicodeDecodeError as error:
        # An error further from the end than a cut character means that the bytes are not UTF-8.
        if error.start < len(head) - 6:
            return None
        text = head[: error.start].decode("utf-8")
    # Servers often answer a failed download with an HTML page, so it gets its own name.
    start = text.lstrip("\ufeff \t\r\n").lower()
    if start.startswith(("<!doctype html", "<html")):
        return "an HTML page"
    return "text"


def has_media_signature(head: bytes) -> bool:
    """True if a file's first bytes are those of a known video, image or sound format."""
    return detect_suffix(head[:64]) is not None or head.startswith(_SOUND_MAGIC)


def is_different_format(suffix: str, content_suffix: str) -> bool:
    """True if the suffix in a file's name belongs to a different format than the suffix of its content."""
    return suffix != content_suffix and not any({suffix, content_suffix} <= group for group in _EQUIVALENT_SUFFIXES)


def has_end_marker(stream: BinaryIO, size: int) -> bool:
    """True if a JPEG or PNG has its end marker near the end of the file; always True for other formats."""
    stream.seek(0)
    head = stream.read(8)
    stream.seek(max(0, size - _TAIL_BYTES))
    tail = stream.read(_TAIL_BYTES)
    if head.startswith(b"\xff\xd8"):
        # The marker EOI (ITU-T T.81, B.1.1.3); within coded data, a zero follows every FF.
        return b"\xff\xd9" in tail
    return not head.startswith(b"\x89PNG") or b"IEND" in tail


def count_missing_bytes(stream: BinaryIO, size: int) -> int:
    """Number of bytes missing at the end of a media file, by the container's own lengths; 0 if it states none."""
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        end_offsets = _iter_avi_ends(stream, size)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        # WebP is one RIFF chunk: its length is at byte 4, and does not count the 8 bytes of the chunk's header.
        end_offsets = iter([8 + int.from_bytes(head[4:8], "little")])
    # The EBML signature, with which Matroska and WebM begin.
    elif head[:4] == b"\x1aE\xdf\xa3":
        end_offsets = _iter_matroska_ends(stream, size)
    elif detect_suffix(head) in (".mp4", ".mov"):
        end_offsets = _iter_box_ends(stream, size)
    else:
        return 0
    if size == 0:
        return 0
    # Ends within the file give values of 0 or less.
    return max((end - size for end in end_offsets), default=0)


def _iter_box_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the end of each MP4 box (ISO 14496-12, 4.2) as a byte offset; 0 for boxes without frames or index."""
    offset = 0
    while offset + 8 <= size:
        stream.seek(offset)
        header = stream.read(16)
        length, kind = int.from_bytes(header[:4]), header[4:8]
        # A length of 1 means that the next 8 bytes hold the real, 64-bit length.
        if length == 1:
            length = int.from_bytes(header[8:16])
        # A length of 0 means up to the end of the file; any other below 8 is not a box but trailing data.
        if length < 8 or not all(32 <= byte < 127 for byte in kind):
            return
        offset += length
        yield offset if kind in (b"mdat", b"moov", b"moof") else 0


def _iter_avi_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the end offsets of an AVI's header list and frame list; an interrupted writer leaves a length of 0."""
    # Skip `RIFF`, the length, and `AVI `.
    offset = 12
    while offset + 12 <= size:
        stream.seek(offset)
        header = stream.read(12)
        end = offset + 8 + int.from_bytes(header[4:8], "little")
        if header[:4] == b"LIST":
            yield end
            # `movi` holds the frames; what follows is an index, which players can rebuild.
            if header[8:12] == b"movi":
                return
        # Chunks begin at even bytes.
        offset = end + end % 2


def _iter_matroska_ends(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the end offset of the Matroska segment (RFC 8794), unless its length is unknown, as in live streams."""
    stream.seek(4)
    header = _read_ebml_int(stream)
    if header is None:
        return
    # Skip the contents of the EBML header; the segment comes next.
    stream.seek(header, io.SEEK_CUR)
    # The ID of the segment, 0x18538067.
    if stream.read(4) == b"\x18S\x80g":
        length = _read_ebml_int(stream)
        if length is not None:
            yield stream.tell() + length


def _read_ebml_int(stream: BinaryIO) -> int | None:
    """Read an EBML integer of variable length; None if its value is unknown."""
    lead = stream.read(1)
    if not lead or not lead[0]:
        return None
    # The number of leading zero bits of the first byte gives the number of bytes that follow.
    width = 9 - lead[0].bit_length()
    marker = 1 << (7 * width)
    value = int.from_bytes(lead + stream.read(width - 1)) - marker
    # A value with all bits set means an unknown length.
    return None if value >= marker - 1 else value
