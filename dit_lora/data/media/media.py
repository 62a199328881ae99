"""Media: a video or image is a file of its own, or a member of a tar."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from dit_lora.data.storage import is_waiting, read_stored
from dit_lora.errors import DitLoraError

T = TypeVar("T")

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"})
# Suffixes of the formats that `opened.open_picture` reads.
IMAGE_SUFFIXES = frozenset(
    {
        *(
            ".png",
            ".apng",
            ".jpg",
            ".jpeg",
            ".jpe",
            ".jfif",
            ".mpo",
            ".webp",
            ".bmp",
            ".dib",
            ".tif",
            ".tiff",
            ".gif",
        ),
        *(".avif", ".avifs", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm", ".pbm", ".pnm"),
    }
)
HEIC = ".heic"
"""Suffix of the pictures that most phones take, which Pillow does not read."""

_MAGIC = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"II*\x00": ".tiff",
    b"MM\x00*": ".tiff",
    b"II+\x00": ".tiff",
    b"MM\x00+": ".tiff",
    b"GIF87a": ".gif",
    b"GIF89a": ".gif",
    b"\0\0\0\x0cjP  \r\n\x87\n": ".jp2",
    b"\xff\x4f\xff\x51": ".j2k",
}
_STILL_BRANDS = (
    b"avif",
    b"avis",
    b"heic",
    b"heix",
    b"heim",
    b"heis",
    b"hevc",
    b"hevx",
    b"mif1",
    b"msf1",
)

MOST_BYTES = 2**31
"""The most bytes of a member of a tar or a cell of a dataset, which is read into memory whole."""
_AT_A_TIME = 2**20
_HEAD = 64

Stamp = tuple[int, ...]
"""Numbers that change when the bytes may have."""


def file_stamp(path: Path) -> Stamp:
    """Return size, time of change, inode and time of the inode's change, which no program can set back; raises `OSError`."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


class Media(Protocol):
    """One video or image, wherever it is stored; picklable and hashable."""

    @property
    def name(self) -> str:
        """Name of the medium in messages; its suffix says which format it should be."""

    @property
    def place(self) -> str:
        """Place of the medium, without ambiguity on this machine."""

    def source(self) -> Path | io.BytesIO:
        """Return what PyAV and Pillow can open: a path, or the bytes. Raises `OSError`."""

    def stamp(self) -> Stamp:
        """Return the stamp; raises `OSError` if the medium is not there."""

    def exists(self) -> bool: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class MediaFile:
    """A video or image that is a file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def place(self) -> str:
        # Following links takes ten times as long, and the stamp tells which file is behind them.
        return os.path.abspath(self.path)

    def source(self) -> Path:
        # The path is absolute, since FFmpeg takes what stands before a colon, as in `concat:a.mp4`,
        # for a protocol.
        return self.path.absolute()

    def stamp(self) -> Stamp:
        return file_stamp(self.path)

    def exists(self) -> bool:
        # isfile is False too for a name that no file system takes, where `Path.stat` raises.
        return os.path.isfile(self.path)


@dataclass(frozen=True)
class TarMember:
    """A member of an uncompressed tar, read in place."""

    tar: Path
    member: str
    offset: int
    """Offset of the member's first byte in the tar."""
    size: int

    @property
    def name(self) -> str:
        return f"{self.tar}:{self.member}"

    @property
    def place(self) -> str:
        return f"{os.path.abspath(self.tar)}:{self.member}@{self.offset}"

    def source(self) -> io.BytesIO:
        with self.tar.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(self.size))

    def stamp(self) -> Stamp:
        return self.size, *file_stamp(self.tar)[1:]

    def exists(self) -> bool:
        return self.tar.is_file()


def below(folder: Path, name: str) -> str | None:
    """Return the path below `folder` that a list in it means by `name`; None if `..` or an absolute path leads out.

    Only the name is judged: links in the folder are its owner's, and are followed.
    """
    whole = os.path.join(os.path.abspath(folder), "")
    path = os.path.normpath(os.path.join(whole, name))
    return path[len(whole) :] if path.startswith(whole) else None


def too_many_bytes(size: int) -> tuple[str, str] | None:
    """Return code and message if a member or cell of this size is not read; None if it is."""
    if size <= MOST_BYTES:
        return None
    message = f"it has {size:,} bytes, and {MOST_BYTES:,} are read into memory at most; give it as a file of its own"
    return "too_large", message


def as_media(media: Media | Path) -> Media:
    return MediaFile(media) if isinstance(media, Path) else media


def open_bytes(media: Media) -> io.BufferedReader | io.BytesIO:
    """Open a medium's bytes; raises `OSError`."""
    source = media.source()
    return source.open("rb") if isinstance(source, Path) else source


def read_bytes(media: Media) -> bytes:
    """Return all bytes of a medium; raises `DitLoraError` if they cannot be read."""
    try:
        with open_bytes(media) as stream:
            return stream.read()
    except OSError as error:
        raise DitLoraError(f"cannot read {media.name}: {error.strerror or error}") from error


def read_head(media: Media) -> bytes:
    """Return the first 64 bytes, by which `sniffed_suffix` knows a format; raises `OSError`."""
    if isinstance(media, TarMember):
        with media.tar.open("rb") as stream:
            stream.seek(media.offset)
            return stream.read(min(_HEAD, media.size))
    with open_bytes(media) as stream:
        return stream.read(_HEAD)


def require_readable(media: Media) -> bool:
    """Wait until a medium's bytes can be read, all of them; return True if that took more than one try.

    Decoders call a file damaged where the storage is at fault. Raises `UnreadableError` if it does not come back.
    """
    tries = 0

    def read() -> None:
        nonlocal tries
        tries += 1
        with open_bytes(media) as stream:
            while stream.read(_AT_A_TIME):
                pass

    read_stored(read, Path(media.place).parent)
    return tries > 1


def read_media(
    media: Media, read: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)
) -> T:
    """Return `read()`; in a run, wait for a medium that is away.

    There, an error counts as the medium's own only if its bytes can be read, and it comes again.

    Args:
        media: The medium that `read` reads.
        read: Reads the medium; it may be called several times.
        errors: What `read` raises at a damaged medium.

    Raises:
        UnreadableError: The bytes cannot be read.
    """
    is_again = False
    while True:
        try:
            return read()
        except errors:
            if not is_waiting():
                raise
            was_away = require_readable(media)
            if is_again and not was_away:
                raise
        is_again = True


def sniffed_suffix(head: bytes) -> str | None:
    """Return the suffix that a file with these first 64 bytes should have; None if the format is not known here."""
    if head[:4] == b"RIFF":
        return {b"WEBP": ".webp", b"AVI ": ".avi"}.get(head[8:12])
    # `ftyp` names the brand and then compatible ones (ISO 14496-12); AVIF and HEIC are images in the same container.
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in _STILL_BRANDS:
            return ".avif" if b"avif" in head or b"avis" in head else HEIC
        return ".mov" if brand == b"qt  " else ".mp4"
    # QuickTime files from before ftyp.
    if head[4:8] in (b"moov", b"mdat") or head[:8] == b"\0\0\0\x08wide":
        return ".mov"
    # Two letters are little to go by, so BMP's reserved zeros are asked for too.
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return ".bmp"
    # EBML: WebM says so in its DocType, and the rest is Matroska.
    if head[:4] == b"\x1aE\xdf\xa3":
        return ".webm" if b"webm" in head else ".mkv"
    return next((end for magic, end in _MAGIC.items() if head.startswith(magic)), None)


def suffix(media: Media) -> str:
    """Return the suffix of a medium's name in lower case, with its dot."""
    return Path(media.name).suffix.lower()
