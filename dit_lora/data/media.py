"""Where the bytes of a video or image are: a file of its own, or a member of a tar."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dit_lora.errors import DitLoraError

VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"})
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})

Stamp = tuple[int, ...]
"""Numbers that change when the bytes may have."""


class Media(Protocol):
    """One video or image, wherever it is stored; picklable and hashable."""

    @property
    def name(self) -> str:
        """What messages call it; its suffix says what it should be."""

    @property
    def place(self) -> str:
        """Where it is, without ambiguity on this machine."""

    def source(self) -> Path | io.BytesIO:
        """What PyAV and Pillow open: a path, or its bytes. Raises `OSError`."""

    def stamp(self) -> Stamp:
        """Raises `OSError` if it is not there."""

    def exists(self) -> bool: ...


@dataclass(frozen=True)
class MediaFile:
    """A file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def place(self) -> str:
        return str(self.path.resolve())

    def source(self) -> Path:
        return self.path

    def stamp(self) -> Stamp:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def exists(self) -> bool:
        return self.path.is_file()


@dataclass(frozen=True)
class TarMember:
    """A member of an uncompressed tar, read in place."""

    tar: Path
    member: str
    offset: int
    """Of its first byte in the tar."""
    size: int

    @property
    def name(self) -> str:
        return f"{self.tar}:{self.member}"

    @property
    def place(self) -> str:
        return f"{self.tar.resolve()}:{self.member}@{self.offset}"

    def source(self) -> io.BytesIO:
        with self.tar.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(self.size))

    def stamp(self) -> Stamp:
        status = self.tar.stat()
        return self.size, status.st_mtime_ns

    def exists(self) -> bool:
        return self.tar.is_file()


def as_media(media: Media | Path) -> Media:
    return MediaFile(media) if isinstance(media, Path) else media


def read_bytes(media: Media) -> bytes:
    """All of its bytes; raises `DitLoraError` if they cannot be read."""
    try:
        source = media.source()
        if isinstance(source, Path):
            return source.read_bytes()
        with source:
            return source.read()
    except OSError as error:
        raise DitLoraError(f"cannot read {media.name}: {error.strerror or error}") from error


def suffix(media: Media) -> str:
    """Lower case, with its dot."""
    return Path(media.name).suffix.lower()


def is_image(media: Media | Path) -> bool:
    """By its name."""
    return suffix(as_media(media)) in IMAGE_SUFFIXES
