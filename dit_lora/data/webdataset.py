"""Tars in WebDataset's layout, read in place: members of one base name are a sample, such as 7.mp4 and 7.txt."""

import hashlib
import json
import os
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dit_lora.data.caption_text import MOST_BYTES, too_long
from dit_lora.data.clips import Gathered, Scan
from dit_lora.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, TarMember, too_many_bytes
from dit_lora.data.tables import caption_columns
from dit_lora.data_config import SourceConfig
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_PACKED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_CAPTIONS = ("txt", "json", "cls")
_VERSION = 1  # raised when a tar would be indexed otherwise
_MOST_JSON = 2**24  # bytes: beside the caption, whatever else is known of a sample
_END = bytes(tarfile.BLOCKSIZE)

Place = tuple[str, int, int]
"""A member's name, its first byte in the tar, and how many there are."""
Members = dict[str, Place]
"""Of one sample, by extension."""


def is_tar(path: Path) -> bool:
    return path.name.lower().endswith((".tar", *PACKED_SUFFIXES)) and not path.is_dir()


def read_tars(root: Path, tars: Sequence[str], source: SourceConfig, memo: Path | None) -> Scan:
    """The samples of tars below a folder; ids begin with the tar's path below it.

    Reads headers and captions, and of a tar whose index the folder `memo` holds captions alone. Everything is
    listed: members that could write outside a folder if somebody unpacked them, compressed tars, a tar that is
    cut (its samples before the cut are there).
    """
    found = Gathered(source.caption)
    for name in tars:
        _read(root / name, f"{name}/", source, found, memo)
    return found.scan()


def read_tar(path: Path, source: SourceConfig, memo: Path | None) -> Scan:
    """The samples of one tar; ids are members' names."""
    if not path.is_file():
        raise DitLoraError(f"no file {path}")
    found = Gathered(source.caption)
    _read(path, "", source, found, memo)
    return found.scan()


def _read(
    path: Path, prefix: str, source: SourceConfig, found: Gathered, memo: Path | None
) -> None:
    file = prefix.rstrip("/") or path.name
    try:
        with path.open("rb") as stream:
            index = _remembered(path, stream, memo)
            for name, code, words in index.refused:
                found.refuse(prefix + name, code, words)
            adding = _Samples(path, prefix, source, found, stream)
            whole = sum(adding.add(key, members) for key, members in index.samples.items())
    except OSError as error:
        found.refuse(file, "unreadable", error.strerror or str(error))
        return
    if index.fault is not None:
        code, words = index.fault
        there = f"{words}; {whole} whole samples before it can be used; fetch it again"
        found.refuse(file, code, words if code == "unreadable" else there)


@dataclass
class _Index:
    """What the headers of a tar say."""

    samples: dict[str, Members] = field(default_factory=dict)
    """By key, without those that have a member which is refused."""
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    """Member, code and words."""
    fault: tuple[str, str] | None = None
    """Code and words, if the tar is not whole."""


def _remembered(path: Path, stream: BinaryIO, memo: Path | None) -> _Index:
    """The index, made again only if the tar's size or time of change differs."""
    status = os.fstat(stream.fileno())
    if memo is None:
        return _index(stream, status.st_size)
    place = os.path.abspath(path)
    key = [_VERSION, place, status.st_size, status.st_mtime_ns, status.st_ino]
    file = memo / f"{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    try:
        known = parse_json(file.read_bytes())
        if known["key"] == key:
            return _Index(**known["index"])
    except (OSError, ValueError):
        pass  # not there, or torn
    index = _index(stream, status.st_size)
    with suppress(OSError):  # it is only slower without
        write_whole(file, json.dumps({"key": key, "index": vars(index)}))
    return index


def _index(stream: BinaryIO, size: int) -> _Index:
    index, left_out = _Index(), set()
    if stream.read(8).startswith(_PACKED_MAGIC):
        words = "a compressed tar cannot be read in place; decompress it, for example with gunzip"
        index.fault = ("unreadable", words)
        return index
    stream.seek(0)
    for member in _headers(stream, size, index):
        name = posixpath.normpath(member.name)
        folder, base = posixpath.split(name)
        # As webdataset does: the key ends at the first dot.
        stem, _, extension = base.partition(".")
        key, extension = posixpath.join(folder, stem), extension.lower()
        members = index.samples.setdefault(key, {})
        wrong = _wrong(member, size, extension in members)
        if wrong is not None:
            left_out.add(key)
            index.refused.append((member.name, *wrong))
        elif member.isreg() and not any(part.startswith(".") for part in name.split("/")):
            members[extension] = (name, member.offset_data, member.size)
    index.samples = {k: m for k, m in index.samples.items() if m and k not in left_out}
    return index


def _headers(stream: BinaryIO, size: int, index: _Index) -> Iterator[tarfile.TarInfo]:
    """All members; sets the index's fault if headers end before the tar does."""
    try:
        opened = tarfile.TarFile(fileobj=stream)
    except (tarfile.TarError, ValueError) as error:
        index.fault = ("unreadable", f"it cannot be read as a tar: {error}")
        return
    try:
        yield from opened
    except (tarfile.TarError, ValueError) as error:
        index.fault = ("truncated", f"it ends before its end, at byte {size}: {error}")
        return
    # It takes a damaged header for the end.
    stream.seek(opened.offset)
    block = stream.read(len(_END))
    if len(block) < len(_END):
        index.fault = ("truncated", f"it ends before its end, at byte {size}")
    elif block != _END:
        index.fault = ("corrupt", f"the header at byte {opened.offset} is damaged")


def _wrong(member: tarfile.TarInfo, size: int, is_there: bool) -> tuple[str, str] | None:
    """Code and words, if nothing should be read from a member of a tar of `size` bytes."""
    unsafe = _unsafe(member)
    if unsafe is not None:
        return "unsafe_name", unsafe
    if is_there:
        return "duplicate_clip", "a member of this name is there twice"
    if member.offset_data + member.size > size:
        return "truncated", "the tar ends before it does"
    return ("unreadable", "it is stored as a sparse file") if member.issparse() else None


@dataclass(frozen=True)
class _Samples:
    """The samples of one tar, with their captions."""

    path: Path
    prefix: str
    source: SourceConfig
    found: Gathered
    stream: BinaryIO

    def add(self, key: str, members: Members) -> bool:
        """Whether it is a sample."""
        media = _media(members)
        captions = [name for name in _CAPTIONS if name in members]
        if not media:
            if captions:  # others are files about the data, such as a README
                there = ", ".join(f".{name}" for name in members)
                words = f"it has no video and no image, but {there}"
                self.found.refuse(self.prefix + key, "missing", words)
            return False
        if len(media) > 1:
            there = ", ".join(f".{name}" for name in media)
            words = f"it has {len(media)} videos or images, and a sample has one: {there}"
            self.found.refuse(self.prefix + key, "duplicate_clip", words)
            return False
        member = TarMember(self.path, *members[media[0]])
        too_large = too_many_bytes(member.size)
        if too_large is not None:
            self.found.refuse(self.prefix + member.member, *too_large)
            return False
        caption, wrong = self._caption(members, captions)
        self.found.add(self.prefix + member.member, member, caption, no_caption=wrong)
        return True

    def _caption(self, members: Members, captions: Sequence[str]) -> tuple[object, tuple[str, str]]:
        """The caption, or None and code and words."""
        if self.source.caption is not None:
            return None, ("", "")
        if self.source.caption_column is not None:
            captions = [name for name in captions if name == "json"]
        if not captions:
            wanted = ".json" if self.source.caption_column else ".txt, .json or .cls"
            return None, ("caption_missing", f"it has no caption: there is no {wanted} of its name")
        _, offset, size = members[captions[0]]
        if size > (_MOST_JSON if captions[0] == "json" else MOST_BYTES):
            return None, too_long(f"{size:,} bytes, in its .{captions[0]},")
        self.stream.seek(offset)
        try:
            text = self.stream.read(size).decode("utf-8-sig")
            if captions[0] != "json":
                return " ".join(text.split()), ("", "")
            return _chosen(parse_json(text), caption_columns(self.source))
        except ValueError as error:  # UnicodeDecodeError is one
            return None, ("caption_not_text", f"its .{captions[0]} cannot be read: {error}")


def _unsafe(member: tarfile.TarInfo) -> str | None:
    """Why nothing should be read from it, or unpacked."""
    if member.issym() or member.islnk():
        return f"a link, to {member.linkname}"
    if not (member.isreg() or member.isdir()):
        return "a device or a pipe"
    if member.name.startswith("/"):
        return "its name is absolute"
    return "its name leaves the folder" if ".." in member.name.split("/") else None


def _media(members: Members) -> list[str]:
    """The video's or image's extension: a video before its thumbnail, `jpg` before `mask.jpg`."""
    ranks: dict[tuple[bool, bool], list[str]] = {}
    for extension in members:
        end = f".{extension.rpartition('.')[2]}"
        if end in VIDEO_SUFFIXES or end in IMAGE_SUFFIXES:
            ranks.setdefault((end in IMAGE_SUFFIXES, "." in extension), []).append(extension)
    return ranks[min(ranks)] if ranks else []


def _chosen(record: object, columns: Sequence[str]) -> tuple[object, tuple[str, str]]:
    if not isinstance(record, dict):
        return None, ("caption_not_text", "its .json is not an object")
    for name in columns:
        if name in record:
            return record[name], ("caption_missing", f"its .json has null for {name}")
    words = f"its .json has no {' or '.join(columns)}; it has {', '.join(map(str, record))}"
    return None, ("caption_missing", words)
