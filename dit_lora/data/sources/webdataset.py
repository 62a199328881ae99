"""Reads tars in WebDataset's layout without unpacking: members of one base name (7.mp4, 7.txt) are a sample."""

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
from dit_lora.config.records import read_typed_json
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, TarMember, find_size_fault
from dit_lora.data.sources.caption_text import MAX_CAPTION_BYTES, Fault, make_too_long_fault, suggest_encoding
from dit_lora.data.sources.clips import MASK, REFERENCE, DataScan, LossMask, SampleCollector
from dit_lora.data.sources.tables import get_caption_columns
from dit_lora.errors import DitLoraError
from dit_lora.files import write_atomically
from dit_lora.parsing import parse_json

# First bytes of gzip, bzip2, xz and zstd files.
_PACKED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_CAPTION_EXTENSIONS = ("txt", "json", "cls")
# Raised when the same tar would get another index.
_VERSION = 1
# Maximum size of a .json in bytes; it may contain more than the caption.
_MAX_JSON_BYTES = 2**24
# A tar ends with blocks of zeros.
_END_BLOCK = bytes(tarfile.BLOCKSIZE)

MemberLocation = tuple[str, int, int]
"""A member's name, the offset of its content in the tar, and its size in bytes."""
Members = dict[str, MemberLocation]
"""Members of one sample, by extension."""


def read_tars(root: Path, tars: Sequence[str], source: SourceConfig, memo_folder: Path | None) -> DataScan:
    """Read the samples of tars below a folder; ids begin with the tar's path below it.

    Only headers and captions are read, and only captions if the tar's index is in the folder `memo_folder`. All
    problems are reported: members that would be written outside the folder if the tar were unpacked, compressed
    tars, and truncated tars (whose samples before the end are read).
    """
    gathered = SampleCollector(source.caption)
    for name in tars:
        _add_tar(root / name, f"{name}/", source, gathered, memo_folder)
    return gathered.build_scan()


def read_tar(path: Path, source: SourceConfig, memo_folder: Path | None) -> DataScan:
    """Read the samples of one tar; sample ids are the members' names. Raises `DitLoraError` if it does not exist."""
    if not path.is_file():
        raise DitLoraError(f"no file {path}")
    gathered = SampleCollector(source.caption)
    _add_tar(path, "", source, gathered, memo_folder)
    return gathered.build_scan()


def _add_tar(
    path: Path, prefix: str, source: SourceConfig, collector: SampleCollector, memo_folder: Path | None
) -> None:
    """Add the samples and problems of one tar to `collector`; sample ids begin with `prefix`."""
    file = prefix.rstrip("/") or path.name
    try:
        with path.open("rb") as stream:
            index = _load_or_build_index(path, stream, memo_folder)
            # Refused members are part of the stored index, so they are reported on every scan.
            for name, code, message in index.refused:
                collector.add_problem(prefix + name, code, message)
            adder = _SampleAdder(path, prefix, source, collector, stream)
            num_added = sum(adder.add(key, members) for key, members in index.samples.items())
    except OSError as error:
        collector.add_problem(file, "unreadable", error.strerror or str(error))
        return
    if index.fault is not None:
        code, message = index.fault
        full_message = f"{message}; the {num_added} complete samples before it can be used; download it again"
        collector.add_problem(file, code, message if code == "unreadable" else full_message)


@dataclass
class _TarIndex:
    """Samples in a tar by key, built from the headers of its members, and refused members."""

    samples: dict[str, Members] = field(default_factory=dict)
    """Members of each sample by key; samples with a refused member are left out."""
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, code and message of each member that is refused."""
    fault: tuple[str, str] | None = None
    """Code and message if the tar is incomplete or damaged."""


class _StoredIndex(TypedDict):
    """Stored index of a tar: its key (path, size and times), and the fields of `_TarIndex`."""

    key: list[Any]
    index: dict[str, Any]


def _load_or_build_index(path: Path, stream: BinaryIO, memo_folder: Path | None) -> _TarIndex:
    """Load the stored index of a tar, or build it if the tar's size, times or inode differ."""
    status = os.fstat(stream.fileno())
    if memo_folder is None:
        return _build_index(stream, status.st_size)
    # A tar that was moved gets a new index, because the memo's file name depends on its path.
    location = os.path.abspath(path)
    key = [_VERSION, location, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
    file = memo_folder / f"{hashlib.sha256(location.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    try:
        stored = read_typed_json(file, _StoredIndex)
        if stored["key"] == key:
            return _TarIndex(**stored["index"])
    except (OSError, ValueError, TypeError):
        # There is no memo of this tar, or a killed process left it incomplete.
        pass
    index = _build_index(stream, status.st_size)
    # Ignore errors: without the memo, the next run is only slower.
    with suppress(OSError):
        write_atomically(file, json.dumps({"key": key, "index": vars(index)}))
    return index


def _build_index(stream: BinaryIO, size: int) -> _TarIndex:
    index, rejected_keys = _TarIndex(), set()
    if stream.read(8).startswith(_PACKED_MAGIC):
        message = "a compressed tar cannot be read in place; decompress it, for example with gunzip"
        index.fault = ("unreadable", message)
        return index
    stream.seek(0)
    for member in _iter_headers(stream, size, index):
        name = posixpath.normpath(member.name)
        folder, base = posixpath.split(name)
        # The sample's key ends at the first dot, as in the webdataset package.
        stem, _, extension = base.partition(".")
        key, extension = posixpath.join(folder, stem), extension.lower()
        # A key is added even if its first member is refused, so that the sample can be dropped below.
        members = index.samples.setdefault(key, {})
        fault = _find_member_fault(member, size, extension in members)
        if fault is not None:
            rejected_keys.add(key)
            index.refused.append((member.name, *fault))
        # Folders and hidden files are no members of a sample.
        elif member.isreg() and not any(part.startswith(".") for part in name.split("/")):
            members[extension] = (name, member.offset_data, member.size)
    # Drop samples with a refused member entirely: the rest of such a sample may have a wrong caption or medium.
    index.samples = {k: m for k, m in index.samples.items() if m and k not in rejected_keys}
    return index


def _iter_headers(stream: BinaryIO, size: int, index: _TarIndex) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of all members; sets the index's fault if they end before the tar does."""
    try:
        # This reads the first header already.
        opened = tarfile.TarFile(fileobj=stream)
    except (tarfile.TarError, ValueError) as error:
        index.fault = ("unreadable", f"cannot read it as a tar: {error}")
        return
    try:
        yield from opened
    except (tarfile.TarError, ValueError) as error:
        index.fault = ("truncated", f"it ends before its end, at byte {size}: {error}")
        return
    # TarFile treats a damaged header as the end of the tar; the real end is a block of zeros.
    stream.seek(opened.offset)
    block = stream.read(len(_END_BLOCK))
    if len(block) < len(_END_BLOCK):
        index.fault = ("truncated", f"it ends before its end, at byte {size}")
    elif block != _END_BLOCK:
        index.fault = ("corrupt", f"the header at byte {opened.offset} is damaged")


def _find_member_fault(member: tarfile.TarInfo, size: int, is_duplicate: bool) -> tuple[str, str] | None:
    """Code and message if a member must not be read from a tar of `size` bytes; None if it may be."""
    if member.issym() or member.islnk():
        return "unsafe_name", f"a link, to {member.linkname}"
    if not (member.isreg() or member.isdir()):
        return "unsafe_name", "a device or a pipe"
    if member.name.startswith("/"):
        return "unsafe_name", "its name is absolute"
    # `..` could lead out of the folder into which a tar is unpacked.
    if ".." in member.name.split("/"):
        return "unsafe_name", "its name leaves the folder"
    # Two captions or two videos of one name would be ambiguous.
    if is_duplicate:
        return "duplicate_clip", "a member with this name exists twice"
    if member.offset_data + member.size > size:
        return "truncated", "the tar ends before it does"
    return ("unreadable", "it is stored as a sparse file") if member.issparse() else None


@dataclass(frozen=True)
class _SampleAdder:
    """Adds the samples of one tar, with their captions, to `collector`."""

    path: Path
    prefix: str
    source: SourceConfig
    collector: SampleCollector
    stream: BinaryIO

    def add(self, key: str, members: Members) -> bool:
        """Add one sample of the tar; returns False if the members are not a sample, or it is refused."""
        extra = _ExtraMemberExtensions.from_members(members, self.source)
        ranks: dict[tuple[bool, bool], list[str]] = {}
        # References and masks are pictures too, so they are excluded first.
        for name in _list_media_extensions(members):
            if name not in extra.extensions:
                # False sorts before True: videos before images, then `jpg` before `depth.jpg`.
                ranks.setdefault((_get_suffix(name) in IMAGE_SUFFIXES, "." in name), []).append(name)
        media = ranks[min(ranks)] if ranks else []
        captions = [name for name in _CAPTION_EXTENSIONS if name in members]
        if not media:
            # Members without media and caption are other files, such as a README.
            if captions or extra.extensions:
                extensions = ", ".join(f".{name}" for name in members)
                message = f"it has no video and no image; it has {extensions}"
                self.collector.add_problem(self.prefix + key, "missing", message)
            return False
        if len(media) > 1:
            extensions = ", ".join(f".{name}" for name in media)
            message = f"it has {len(media)} videos or images, and a sample has one: {extensions}"
            self.collector.add_problem(self.prefix + key, "duplicate_clip", message)
            return False
        member = TarMember(self.path, *members[media[0]])
        sample_id = self.prefix + member.member
        too_large = find_size_fault(member.size)
        if too_large is not None:
            self.collector.add_problem(sample_id, *too_large)
            return False
        caption, fault = self._read_caption(members, captions)
        references = [TarMember(self.path, *members[name]) for name in extra.references]
        masks = [TarMember(self.path, *members[name]) for name in extra.masks]
        for extra_member in (*references, *masks):
            too_large = find_size_fault(extra_member.size)
            if too_large is not None:
                extra.faults.append((too_large[0], f"{extra_member.member}: {too_large[1]}"))
        self.collector.add_problems(sample_id, extra.faults)
        mask = LossMask(masks[0]) if masks else None
        self.collector.add(sample_id, member, caption, references=references, mask=mask, missing_caption_fault=fault)
        return True

    def _read_caption(self, members: Members, captions: Sequence[str]) -> tuple[object, tuple[str, str]]:
        """Read a sample's caption; returns it, or None with the code and message of the fault."""
        if self.source.caption is not None:
            return None, ("", "")
        if self.source.caption_column is not None:
            # A column can only be a key of a .json.
            captions = [name for name in captions if name == "json"]
        if not captions:
            suffixes = ".json" if self.source.caption_column else ".txt, .json or .cls"
            return None, ("caption_missing", f"it has no caption: no {suffixes} has its name")
        _, offset, size = members[captions[0]]
        # A .json may hold more than the caption, so its limit is higher.
        if size > (_MAX_JSON_BYTES if captions[0] == "json" else MAX_CAPTION_BYTES):
            return None, make_too_long_fault(f"{size:,} bytes, in its .{captions[0]},")
        self.stream.seek(offset)
        try:
            text = self.stream.read(size).decode("utf-8-sig")
            if captions[0] != "json":
                return " ".join(text.split()), ("", "")
            record = parse_json(text)
            if not isinstance(record, dict):
                return None, ("caption_not_text", "its .json is not an object")
            columns = get_caption_columns(self.source)
            for name in columns:
                if name in record:
                    return record[name], ("caption_missing", f"its .json has null for {name}")
            keys = ", ".join(map(str, record))
            return None, ("caption_missing", f"its .json has no {' or '.join(columns)}; it has {keys}")
        # This includes UnicodeDecodeError.
        except ValueError as error:
            return None, ("caption_not_text", f"its .{captions[0]} cannot be read: {error}{suggest_encoding(error)}")


def _list_media_extensions(members: Members) -> list[str]:
    return [name for name in members if _get_suffix(name) in VIDEO_SUFFIXES | IMAGE_SUFFIXES]


@dataclass(frozen=True)
class _ExtraMemberExtensions:
    """Extensions of a sample's members that are references, in order, and masks, such as `mask.png`."""

    references: list[str]
    masks: list[str]
    faults: list[Fault]

    @property
    def extensions(self) -> tuple[str, ...]:
        return *self.references, *self.masks

    @classmethod
    def from_members(cls, members: Members, source: SourceConfig) -> "_ExtraMemberExtensions":
        """Find a sample's references and masks among its tar members, by the source's columns.

        By default, references are `reference.png`, `reference_1.jpg` ...
        """
        by_middle: dict[str, list[str]] = {}
        for name in _list_media_extensions(members):
            by_middle.setdefault(name.rpartition(".")[0], []).append(name)
        result = cls([], [], [])
        columns: Sequence[str] | None = source.reference_columns
        if columns is None:
            # By default, references are sorted by their number and not by their name: 2 comes before 10. A name
            # without a number comes first.
            numbers = {}
            for middle in by_middle:
                if matched := _REFERENCE_PATTERN.fullmatch(middle):
                    numbers[middle] = int(matched[1] or -1)
            columns = sorted(numbers, key=numbers.__getitem__)
        extra_columns = [(REFERENCE, column, result.references) for column in columns]
        if source.mask_column is not None:
            extra_columns.append((MASK, source.mask_column, result.masks))
        for part, column, target_list in extra_columns:
            extensions = by_middle.get(column.lower(), [])
            target_list += extensions
            if not extensions:
                result.faults.append((f"{part}_missing", f"it has no {part}: there is no .{column}.png or the like"))
            elif len(extensions) > 1:
                file_list = ", ".join(f".{name}" for name in extensions)
                result.faults.append((f"{part}_ambiguous", f"it has several of one name: {file_list}"))
        return result


# `reference.png`, `reference_2.png`, `reference10.png`.
_REFERENCE_PATTERN = re.compile(rf"{REFERENCE}[_-]?(\d{{0,9}})")


def _get_suffix(extension: str) -> str:
    """Suffix of a tar member's extension that may have several parts."""
    return f".{extension.rpartition('.')[2]}"
