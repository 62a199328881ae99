"""Reader of tars in WebDataset's layout, in place: members of one base name are a sample, such as 7.mp4 and 7.txt."""

import hashlib
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import TypedDict

from dit_lora.config.data import SourceConfig
from dit_lora.config.records import read_typed
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, TarMember, too_many_bytes
from dit_lora.data.sources.caption_text import MOST_BYTES, Fault, encoding_hint, too_long
from dit_lora.data.sources.clips import MASK, REFERENCE, Gathered, LossMask, Scan, by_code
from dit_lora.data.sources.listing import PACKED_SUFFIXES
from dit_lora.data.sources.tables import caption_columns
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

# gzip, bzip2, xz and zstd.
_PACKED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_CAPTIONS = ("txt", "json", "cls")
_VERSION = 1  # raised when a tar would be indexed otherwise
_MOST_JSON = 2**24  # bytes: beside the caption, whatever else is known of a sample
# A tar ends with blocks of zeros.
_END = bytes(tarfile.BLOCKSIZE)

Place = tuple[str, int, int]
"""A member's name, its first byte in the tar, and its number of bytes."""
Members = dict[str, Place]
"""The members of one sample, by extension."""


def is_tar(path: Path) -> bool:
    return path.name.lower().endswith((".tar", *PACKED_SUFFIXES)) and not path.is_dir()


def read_tars(root: Path, tars: Sequence[str], source: SourceConfig, memo: Path | None) -> Scan:
    """Read the samples of tars below a folder; ids begin with the tar's path below it.

    Only headers and captions are read, and only captions of a tar whose index is in the folder `memo`. All
    problems are listed: members that could write outside a folder if somebody unpacked them, compressed
    tars, a tar that is cut (its samples before the cut are there).
    """
    gathered = Gathered(source.caption)
    for name in tars:
        _read(root / name, f"{name}/", source, gathered, memo)
    return gathered.scan()


def read_tar(path: Path, source: SourceConfig, memo: Path | None) -> Scan:
    """Read the samples of one tar; ids are members' names. Raises `DitLoraError` if there is no such file."""
    if not path.is_file():
        raise DitLoraError(f"no file {path}")
    gathered = Gathered(source.caption)
    _read(path, "", source, gathered, memo)
    return gathered.scan()


def _read(
    path: Path, prefix: str, source: SourceConfig, gathered: Gathered, memo: Path | None
) -> None:
    file = prefix.rstrip("/") or path.name
    try:
        with path.open("rb") as stream:
            index = _remembered(path, stream, memo)
            for name, code, message in index.refused:
                gathered.refuse(prefix + name, code, message)
            adding = _Samples(path, prefix, source, gathered, stream)
            whole = sum(adding.add(key, members) for key, members in index.samples.items())
    except OSError as error:
        gathered.refuse(file, "unreadable", error.strerror or str(error))
        return
    if index.fault is not None:
        code, message = index.fault
        there = f"{message}; {whole} whole samples before it can be used; fetch it again"
        gathered.refuse(file, code, message if code == "unreadable" else there)


@dataclass
class _Index:
    """Index of a tar, from the headers of its members."""

    samples: dict[str, Members] = field(default_factory=dict)
    """The members of each sample, by key; a sample that has a refused member is left out."""
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, code and message of each member that is refused."""
    fault: tuple[str, str] | None = None
    """Code and message, if the tar is not whole."""


class _Memo(TypedDict):
    """The memory of a tar: its key (path, size and times), and the fields of `_Index`."""

    key: list[Any]
    index: dict[str, Any]


def _remembered(path: Path, stream: BinaryIO, memo: Path | None) -> _Index:
    """Return the index, which is made again only if the tar's size, time of change or inode differs."""
    status = os.fstat(stream.fileno())
    if memo is None:
        return _index(stream, status.st_size)
    place = os.path.abspath(path)
    key = [_VERSION, place, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
    file = memo / f"{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    try:
        stored = read_typed(file, _Memo)
        if stored["key"] == key:
            return _Index(**stored["index"])
    except (OSError, ValueError, TypeError):
        # There is no memo of this tar, or a killed process tore it.
        pass
    index = _index(stream, status.st_size)
    # A run without the memo is only slower.
    with suppress(OSError):
        write_whole(file, json.dumps({"key": key, "index": vars(index)}))
    return index


def _index(stream: BinaryIO, size: int) -> _Index:
    index, left_out = _Index(), set()
    if stream.read(8).startswith(_PACKED_MAGIC):
        message = "a compressed tar cannot be read in place; decompress it, for example with gunzip"
        index.fault = ("unreadable", message)
        return index
    stream.seek(0)
    for member in _headers(stream, size, index):
        name = posixpath.normpath(member.name)
        folder, base = posixpath.split(name)
        # The key ends at the first dot, as in the webdataset package.
        stem, _, extension = base.partition(".")
        key, extension = posixpath.join(folder, stem), extension.lower()
        members = index.samples.setdefault(key, {})
        fault = _wrong(member, size, extension in members)
        if fault is not None:
            left_out.add(key)
            index.refused.append((member.name, *fault))
        elif member.isreg() and not any(part.startswith(".") for part in name.split("/")):
            members[extension] = (name, member.offset_data, member.size)
    # A sample goes whole, since what is left of it would have another caption or medium.
    index.samples = {k: m for k, m in index.samples.items() if m and k not in left_out}
    return index


def _headers(stream: BinaryIO, size: int, index: _Index) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of all members; set the index's fault if they end before the tar does."""
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
    # TarFile takes a damaged header for the end of the tar; the true end is a block of zeros.
    stream.seek(opened.offset)
    block = stream.read(len(_END))
    if len(block) < len(_END):
        index.fault = ("truncated", f"it ends before its end, at byte {size}")
    elif block != _END:
        index.fault = ("corrupt", f"the header at byte {opened.offset} is damaged")


def _wrong(member: tarfile.TarInfo, size: int, is_there: bool) -> tuple[str, str] | None:
    """Return code and message if nothing should be read from a member of a tar of `size` bytes."""
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
    """Adds the samples of one tar, with their captions, to `found`."""

    path: Path
    prefix: str
    source: SourceConfig
    found: Gathered
    stream: BinaryIO

    def add(self, key: str, members: Members) -> bool:
        """Add a sample; return False if the members are not one, or it is refused."""
        beside = _Beside.of(members, self.source)
        media = _media([name for name in _pictured(members) if name not in beside.all])
        captions = [name for name in _CAPTIONS if name in members]
        if not media:
            # Members without media or caption are files about the data, such as a README.
            if captions or beside.all:
                there = ", ".join(f".{name}" for name in members)
                message = f"it has no video and no image of its own, but {there}"
                self.found.refuse(self.prefix + key, "missing", message)
            return False
        if len(media) > 1:
            there = ", ".join(f".{name}" for name in media)
            message = f"it has {len(media)} videos or images, and a sample has one: {there}"
            self.found.refuse(self.prefix + key, "duplicate_clip", message)
            return False
        member = TarMember(self.path, *members[media[0]])
        too_large = too_many_bytes(member.size)
        if too_large is not None:
            self.found.refuse(self.prefix + member.member, *too_large)
            return False
        caption, fault = self._caption(members, captions)
        references = [TarMember(self.path, *members[name]) for name in beside.references]
        masks = [TarMember(self.path, *members[name]) for name in beside.masks]
        for one in (*references, *masks):
            too_large = too_many_bytes(one.size)
            if too_large is not None:
                beside.faults.append((too_large[0], f"{one.member}: {too_large[1]}"))
        for code, words in by_code(beside.faults):
            self.found.refuse(self.prefix + member.member, code, words)
        self.found.add(
            self.prefix + member.member,
            member,
            caption,
            references=references,
            mask=LossMask(masks[0]) if masks else None,
            no_caption=fault,
        )
        return True

    def _caption(self, members: Members, captions: Sequence[str]) -> tuple[object, tuple[str, str]]:
        """Return the caption and a pair that is not used, or None with code and message of what is wrong."""
        if self.source.caption is not None:
            return None, ("", "")
        if self.source.caption_column is not None:
            captions = [name for name in captions if name == "json"]
        if not captions:
            wanted = ".json" if self.source.caption_column else ".txt, .json or .cls"
            return None, ("caption_missing", f"it has no caption: there is no {wanted} of its name")
        _, offset, size = members[captions[0]]
        # A .json may hold more than the caption, so its limit is higher.
        if size > (_MOST_JSON if captions[0] == "json" else MOST_BYTES):
            return None, too_long(f"{size:,} bytes, in its .{captions[0]},")
        self.stream.seek(offset)
        try:
            text = self.stream.read(size).decode("utf-8-sig")
            if captions[0] != "json":
                return " ".join(text.split()), ("", "")
            return _chosen(parse_json(text), caption_columns(self.source))
        # UnicodeDecodeError is a ValueError.
        except ValueError as error:
            hint = encoding_hint(error)
            return None, ("caption_not_text", f"its .{captions[0]} cannot be read: {error}{hint}")


def _unsafe(member: tarfile.TarInfo) -> str | None:
    """Return why nothing should be read from a member, or unpacked; None if it is safe."""
    if member.issym() or member.islnk():
        return f"a link, to {member.linkname}"
    if not (member.isreg() or member.isdir()):
        return "a device or a pipe"
    if member.name.startswith("/"):
        return "its name is absolute"
    return "its name leaves the folder" if ".." in member.name.split("/") else None


def _media(pictured: Sequence[str]) -> list[str]:
    """Return the extensions of a sample's media that rank first: videos before images, `jpg` before `depth.jpg`."""
    ranks: dict[tuple[bool, bool], list[str]] = {}
    for extension in pictured:
        is_image = _end(extension) in IMAGE_SUFFIXES
        ranks.setdefault((is_image, "." in extension), []).append(extension)
    return ranks[min(ranks)] if ranks else []


def _pictured(members: Members) -> list[str]:
    """Return the extensions of a sample's pictures and videos."""
    return [name for name in members if _end(name) in VIDEO_SUFFIXES | IMAGE_SUFFIXES]


@dataclass(frozen=True)
class _Beside:
    """The extensions of a sample's references, in their order, and of its mask, such as `mask.png`."""

    references: list[str]
    masks: list[str]
    faults: list[Fault]

    @property
    def all(self) -> tuple[str, ...]:
        return *self.references, *self.masks

    @classmethod
    def of(cls, members: Members, source: SourceConfig) -> "_Beside":
        """Return what the source's columns name; without any, references are `reference.png`, `reference_1.jpg` ..."""
        by_middle: dict[str, list[str]] = {}
        for name in _pictured(members):
            by_middle.setdefault(name.rpartition(".")[0], []).append(name)
        found = cls([], [], [])
        columns: Sequence[str] | None = source.reference_columns
        if columns is None:
            columns = sorted(filter(_NUMBERED.fullmatch, by_middle), key=_number)
        named = [(REFERENCE, column, found.references) for column in columns]
        if source.mask_column is not None:
            named.append((MASK, source.mask_column, found.masks))
        for what, column, into in named:
            there = by_middle.get(column.lower(), [])
            into += there
            if not there:
                message = f"it has no {what}: there is no .{column}.png or the like"
                found.faults.append((f"{what}_missing", message))
            elif len(there) > 1:
                several = ", ".join(f".{name}" for name in there)
                found.faults.append((f"{what}_ambiguous", f"it has several of one name: {several}"))
        return found


# `reference.png`, `reference_2.png`, `reference10.png`.
_NUMBERED = re.compile(rf"{REFERENCE}[_-]?(\d{{0,9}})")


def _number(middle: str) -> int:
    """Return the number in a reference's name, by which they are ordered; the one without comes first."""
    matched = _NUMBERED.fullmatch(middle)
    return int(matched[1] or -1) if matched else -1


def _end(extension: str) -> str:
    return f".{extension.rpartition('.')[2]}"


def _chosen(record: object, columns: Sequence[str]) -> tuple[object, tuple[str, str]]:
    if not isinstance(record, dict):
        return None, ("caption_not_text", "its .json is not an object")
    for name in columns:
        if name in record:
            return record[name], ("caption_missing", f"its .json has null for {name}")
    message = f"its .json has no {' or '.join(columns)}; it has {', '.join(map(str, record))}"
    return None, ("caption_missing", message)
