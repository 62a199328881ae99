"""Media: a video or image that is a file, or a member of a tar."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from dit_lora.data.storage import read_with_retry, waits_for_storage
from dit_lora.errors import DitLoraError

T = TypeVar("T")

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"})
# Suffixes of the formats that `opened.open_picture` reads.
IMAGE_SUFFIXES = frozenset(
    {
        *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"),
        *(".avif", ".avifs", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm", ".pbm", ".pnm"),
    }
)
HEIC = ".heic"
"""Suffix of pictures from most phones, a format that Pillow does not read."""

_MAGIC_SUFFIXES = {
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
_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

MAX_BYTES = 2**31
"""Maximum size of a tar member or dataset cell, in bytes, because it is read into memory as a whole."""
_CHUNK_BYTES = 2**20
_HEAD_BYTES = 64

Stamp = tuple[int, ...]
"""Numbers that differ if the bytes may have changed."""


def read_file_stamp(path: Path) -> Stamp:
    """Stamp of a file: size, modification time, inode, and change time, which programs cannot set back.

    Raises `OSError`.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


class Media(Protocol):
    """Interface of one video or image, wherever it is stored; must be picklable and hashable."""

    @property
    def name(self) -> str:
        """Name of a media file for messages; its suffix is that of its format."""

    @property
    def location(self) -> str:
        """Location of a media file, unique on this machine."""

    def get_source(self) -> Path | io.BytesIO:
        """Path or bytes of a media file that PyAV and Pillow can open; raises `OSError`."""

    def get_file_stamp(self) -> Stamp:
        """Numbers that differ if a media file's bytes may have changed; raises `OSError` if it does not exist."""

    def exists(self) -> bool: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class MediaFile:
    """A video or image in a file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def location(self) -> str:
        # Resolving links takes ten times as long, and the stamp identifies the file behind them.
        return os.path.abspath(self.path)

    def get_source(self) -> Path:
        # An absolute path, since FFmpeg would read the text before a colon, as in `concat:a.mp4`, as a protocol.
        return self.path.absolute()

    def get_file_stamp(self) -> Stamp:
        return read_file_stamp(self.path)

    def exists(self) -> bool:
        # isfile is also False for a name that no file system accepts, for which `Path.stat` raises.
        return os.path.isfile(self.path)


@dataclass(frozen=True)
class TarMember:
    """A member of an uncompressed tar, read directly from it."""

    tar: Path
    member: str
    offset: int
    """Offset of the member's content in the tar, in bytes."""
    size: int

    @property
    def name(self) -> str:
        return f"{self.tar}:{self.member}"

    @property
    def location(self) -> str:
        # The offset distinguishes members of the same name.
        return f"{os.path.abspath(self.tar)}:{self.member}@{self.offset}"

    def get_source(self) -> io.BytesIO:
        with self.tar.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(self.size))

    def get_file_stamp(self) -> Stamp:
        # The member's size replaces the tar's; the times and the inode are those of the tar.
        return self.size, *read_file_stamp(self.tar)[1:]

    def exists(self) -> bool:
        return self.tar.is_file()


def resolve_path_below(folder: Path, name: str) -> str | None:
    """Resolve a relative name below `folder`; None if `..` or an absolute path leads out of the folder.

    Only the name is checked: links in the folder belong to its owner, and are followed.
    """
    # The usual name, much faster: hidden names, drives and absolute paths take the long way.
    if name[:1] not in "./\\" and ":" not in name and os.path.normpath(name) == name:
        return name
    # The empty part gives the prefix a separator at its end, so that `/data2` is not below `/data`.
    prefix = os.path.join(os.path.abspath(folder), "")
    path = os.path.normpath(os.path.join(prefix, name))
    return path[len(prefix) :] if path.startswith(prefix) else None


def find_size_fault(size: int) -> tuple[str, str] | None:
    """Code and message if a tar member or dataset cell of this size is too large to be read; None if it is not."""
    if size <= MAX_BYTES:
        return None
    message = f"it has {size:,} bytes, and {MAX_BYTES:,} are read at most; store it as a separate file"
    return "too_large", message


def to_media(media: Media | Path) -> Media:
    """Convert a path to a `MediaFile`; other media are returned unchanged."""
    return MediaFile(media) if isinstance(media, Path) else media


def open_media_bytes(media: Media) -> io.BufferedReader | io.BytesIO:
    """Open the bytes of a media file; raises `OSError`."""
    source = media.get_source()
    return source.open("rb") if isinstance(source, Path) else source


def read_bytes(media: Media) -> bytes:
    """Read all bytes of a media file; raises `DitLoraError` if they cannot be read."""
    try:
        with open_media_bytes(media) as stream:
            return stream.read()
    except OSError as error:
        raise DitLoraError(f"cannot read {media.name}: {error.strerror or error}") from error


def read_first_bytes(media: Media) -> bytes:
    """Read the first 64 bytes of a media file, from which `detect_suffix` recognizes its format; raises `OSError`."""
    if isinstance(media, TarMember):
        with media.tar.open("rb") as stream:
            stream.seek(media.offset)
            return stream.read(min(_HEAD_BYTES, media.size))
    with open_media_bytes(media) as stream:
        return stream.read(_HEAD_BYTES)


def wait_until_readable(media: Media) -> bool:
    """Wait until all bytes of a media file can be read; returns True if that took more than one try.

    Decoders report a damaged file when in fact the storage is at fault. Raises `UnreadableError` if the storage
    does not come back.
    """
    tries = 0

    def read() -> None:
        nonlocal tries
        tries += 1
        with open_media_bytes(media) as stream:
            # Read to the end: the first bytes may be readable although a later block is not.
            while stream.read(_CHUNK_BYTES):
                pass

    read_with_retry(read, Path(media.location).parent)
    return tries > 1


def read_media(media: Media, read: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)) -> T:
    """Read a media file with `read`; in a run, wait if it cannot be reached.

    In a run, an error counts as the medium's own only if its bytes can be read and the error occurs again.

    Args:
        media: The medium that `read` reads.
        read: Reads the medium; it may be called several times.
        errors: Exceptions that `read` raises for a damaged medium.

    Raises:
        UnreadableError: The bytes cannot be read.
    """
    has_failed_before = False
    while True:
        try:
            return read()
        except errors:
            # Outside a run, errors are reported at once.
            if not waits_for_storage():
                raise
            was_unreachable = wait_until_readable(media)
            # All bytes can be read and the error is the same: the medium itself is damaged.
            if has_failed_before and not was_unreachable:
                raise
        has_failed_before = True


def detect_suffix(head: bytes) -> str | None:
    """Suffix of the format of a file with these first 64 bytes; None if the format is not known here."""
    if head[:4] == b"RIFF":
        return {b"WEBP": ".webp", b"AVI ": ".avi"}.get(head[8:12])
    # `ftyp` lists the brand and compatible ones (ISO 14496-12); AVIF and HEIC are images in the same container.
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in _STILL_BRANDS:
            return ".avif" if b"avif" in head or b"avis" in head else HEIC
        return ".mov" if brand == b"qt  " else ".mp4"
    # QuickTime files that are older than `ftyp`.
    if head[4:8] in (b"moov", b"mdat") or head[:8] == b"\0\0\0\x08wide":
        return ".mov"
    # Two letters are a weak signature, so BMP's reserved zeros are checked too.
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return ".bmp"
    # EBML: WebM is named in the DocType; everything else is Matroska.
    if head[:4] == b"\x1aE\xdf\xa3":
        return ".webm" if b"webm" in head else ".mkv"
    return next((end for magic, end in _MAGIC_SUFFIXES.items() if head.startswith(magic)), None)


def get_suffix(media: Media) -> str:
    """Suffix of a media file's name in lower case, with its dot."""
    return Path(media.name).suffix.lower()
