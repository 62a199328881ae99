"""Shards: safetensors files with several cache entries, each with the digest of its bytes.

The tensors of an entry are named `<key>/<name>` and are stored one after another. The file's metadata has one
line per entry, `<digest> [sample, facts]`, and once the facts that all its entries share. The headers are the
only index, so no other index can disagree with them.

A shard is never changed. Its name is the digest of its header, which contains the digests of its entries: files
with the same name have the same contents. An empty file `<shard>.<key>.bad` next to it marks an entry as bad.
"""

import json
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dit_lora.errors import DitLoraError
from dit_lora.files import fsync_folder
from dit_lora.parsing import parse_json

SUFFIX, DEAD, PARTIAL = ".safetensors", ".bad", ".partial"

# By safetensors' names.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FACTS_KEY = "facts"
# Buffer for reads that only test whether bytes can be read.
_TEST_BUFFER = memoryview(bytearray(2**20))
# Alignment, in bytes, at which an entry can be used in place: that of the widest dtype.
_ALIGNMENT_BYTES = 8

Spec = dict[str, tuple[torch.Size, torch.dtype]]
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


class ShardError(DitLoraError):
    """Raised if a cache shard's header cannot be read, or an entry's bytes are missing."""


@dataclass(frozen=True)
class EntryLayout:
    """Names, safetensors dtypes and shapes of a cache entry's tensors, in the order in which they are stored."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @cached_property
    def tensor_byte_ranges(self) -> dict[str, tuple[int, int]]:
        """Start and end of each tensor in a cache entry by name, in bytes from the start of the entry."""
        bounds, begin = {}, 0
        for name, dtype, shape in self.tensors:
            end = begin + prod(shape) * _DTYPES[dtype].itemsize
            bounds[name] = (begin, end)
            begin = end
        return bounds

    @cached_property
    def nbytes(self) -> int:
        """Size of a cache entry in bytes."""
        return max((end for _, end in self.tensor_byte_ranges.values()), default=0)

    @cached_property
    def digest_text(self) -> bytes:
        """Text that represents the layout of a cache entry in its digest."""
        return json.dumps(self.tensors).encode()

    @cached_property
    def spec(self) -> Spec:
        """Shape and torch dtype of each tensor in a cache entry, by name."""
        return {name: (torch.Size(shape), _DTYPES[dtype]) for name, dtype, shape in self.tensors}

    def split_into_tensors(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a cache entry's bytes into tensors by name, which are views."""
        return {
            name: data[slice(*self.tensor_byte_ranges[name])].view(dtype).view(shape)
            for name, (shape, dtype) in self.spec.items()
        }


@dataclass(frozen=True)
class EncodedEntry:
    """A cache entry that is ready to be written."""

    key: str
    sample: str
    facts: Mapping[str, Any]
    layout: EntryLayout
    parts: Sequence[ByteArray]
    """Bytes of the tensors, in the layout's order."""
    digest: bytes


# Not frozen: there may be a million of them, and a frozen instance takes five times as long to create.
@dataclass(slots=True, eq=False)
class StoredEntry:
    """Description of a cache entry in a shard's header. Immutable."""

    path: Path
    key: str
    start: int
    """Offset of the entry's bytes in the file."""
    layout: EntryLayout
    digest: bytes
    sample_json: str
    """JSON of the sample, and of the facts that are not shared by all entries of the shard."""
    shared_facts_json: str
    """JSON of the facts that all entries of the shard share."""
    is_complete: bool
    """True if the file contained all of the entry's bytes when the header was read."""

    @property
    def end(self) -> int:
        """Offset in the shard after the cache entry's last byte."""
        return self.start + self.layout.nbytes

    @property
    def sample(self) -> str:
        """Name of the sample that a cache entry encodes, for messages."""
        return parse_json(self.sample_json)[0]

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that a cache entry's tensors depend on."""
        return parse_json(self.shared_facts_json) | parse_json(self.sample_json)[1]

    def matches_digest(self, data: torch.Tensor) -> bool:
        """True if the digest of a cache entry's bytes is still the one from when they were written."""
        return compute_digest(self.layout, [data.numpy()]) == self.digest

    @property
    def bad_entry_mark_path(self) -> Path:
        """Path of the empty file that marks this cache entry as bad."""
        return get_bad_mark_path(self.path, self.key)


@dataclass(frozen=True)
class ShardHeader:
    """Entries of a cache shard, and the state of its file when they were read."""

    entries: list[StoredEntry]
    stamp: tuple[int, int]
    """Size in bytes and modification time in nanoseconds."""
    has_valid_name: bool
    """True if the file's name is the digest of its header, as it must be."""


def compute_digest(layout: EntryLayout, parts: Sequence[ByteArray]) -> bytes:
    """XXH3 digest (128 bits) of a cache entry: names, dtypes, shapes and bytes."""
    total = xxhash.xxh3_128(layout.digest_text)
    for part in parts:
        total.update(part.data)
    return total.digest()


def get_bad_mark_path(shard: Path, key: str) -> Path:
    """Path of the empty file that marks a cache entry as bad."""
    return shard.with_name(f"{shard.stem}.{key}{DEAD}")


def write_shard(folder: Path, entries: Sequence[EncodedEntry]) -> Path:
    """Write cache entries as one shard file; when this returns, it is complete and on the disk. Raises `OSError`.

    A damaged file of the same name is replaced, and its entries that were marked bad become usable again.
    """
    header = _build_header(entries)
    path = folder / f"{xxhash.xxh3_128(header).hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    # A hidden name, so that no reader takes the incomplete file for a shard.
    partial = folder / f".{path.stem}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    try:
        with partial.open("xb") as file:
            # A safetensors file begins with the length of its header, as 8 bytes in little-endian order.
            file.write(len(header).to_bytes(8, "little") + header)
            for entry in entries:
                for part in entry.parts:
                    file.write(part.data)
            file.flush()
            # The contents must be on the disk before the rename makes them visible.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        # After the rename this file no longer exists.
        partial.unlink(missing_ok=True)
    for entry in entries:
        # The file was just written, so an old mark of the same name no longer applies.
        get_bad_mark_path(path, entry.key).unlink(missing_ok=True)
    fsync_folder(folder)
    return path


def _build_header(entries: Sequence[EncodedEntry]) -> bytes:
    """Build the safetensors header of a cache shard, without the 8 bytes of its length."""
    # Facts with one value in all entries are written once, which keeps headers small.
    first_facts = entries[0].facts
    other_facts = [entry.facts for entry in entries[1:]]
    shared = {
        name: value
        for name, value in first_facts.items()
        if all(name in facts and facts[name] == value for facts in other_facts)
    }
    metadata = {_FACTS_KEY: json.dumps(shared, sort_keys=True)}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry in entries:
        unshared = {name: value for name, value in entry.facts.items() if name not in shared}
        metadata[entry.key] = f"{entry.digest.hex()} {json.dumps([entry.sample, unshared], sort_keys=True)}"
        for name, dtype, shape in entry.layout.tensors:
            begin, end = entry.layout.tensor_byte_ranges[name]
            offsets = [start + begin, start + end]
            header[f"{entry.key}/{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        start += entry.layout.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad to 8 bytes, as safetensors does.
    return text + b" " * (-len(text) % 8)


def read_header(path: Path, layouts: dict[Any, EntryLayout] | None = None) -> ShardHeader:
    """Read the entries that a cache shard's header describes, complete or not; raises `ShardError` or `OSError`.

    `layouts` collects the layouts seen so far, so that equal ones are one object. An entry with an invalid
    description is skipped.
    """
    layouts = {} if layouts is None else layouts
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= state.st_size - 8:
            raise ShardError(f"the header of {path} is incomplete; its entries are lost")
        text = file.read(length)
    try:
        descriptions = parse_json(text)
        metadata = descriptions.pop("__metadata__")
        shared = metadata.pop(_FACTS_KEY)
        if not isinstance(parse_json(shared), dict):
            raise TypeError
        groups: dict[str, list[tuple[str, Any]]] = {}
        for full_name, tensor in descriptions.items():
            key, _, name = full_name.partition("/")
            groups.setdefault(key, []).append((name, tensor))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"the header of {path} is damaged; its entries are lost") from error
    entries = []
    for key, tensors in groups.items():
        try:
            start, layout = _parse_layout(tensors, layouts)
            line = metadata[key]
            # The line is the digest as 32 hexadecimal digits, a space, and JSON.
            checksum = bytes.fromhex(line[:32])
            sample, facts = parse_json(line[33:])
        except (ValueError, LookupError, TypeError):
            continue
        if not isinstance(sample, str) or not isinstance(facts, dict):
            continue
        # Offsets in the header count from its end; the file begins with 8 bytes of length.
        start += 8 + length
        is_whole = start + layout.nbytes <= state.st_size
        entries.append(StoredEntry(path, key, start, layout, checksum, line[33:], shared, is_whole))
    is_named = path.stem == xxhash.xxh3_128(text).hexdigest()
    return ShardHeader(entries, (state.st_size, state.st_mtime_ns), is_named)


def _parse_layout(tensors: Sequence[tuple[str, Any]], layouts: dict[Any, EntryLayout]) -> tuple[int, EntryLayout]:
    """Parse the description of a cache entry: offset of its bytes after the header, and their layout.

    Raises `ValueError` if they are invalid.
    """
    descriptions = tuple((name, tensor["dtype"], tuple(tensor["shape"])) for name, tensor in tensors)
    layout = layouts.get(descriptions)
    if layout is None:
        # Not isinstance: JSON may contain `true`, which is an instance of int.
        if any(type(side) is not int or side < 0 for _, _, shape in descriptions for side in shape):
            raise ValueError
        layout = layouts[descriptions] = EntryLayout(descriptions)
    start = tensors[0][1]["data_offsets"][0]
    # The offsets must be exactly those of the layout, without gaps or overlaps.
    expected = [[start + begin, start + end] for begin, end in layout.tensor_byte_ranges.values()]
    offsets = [tensor["data_offsets"] for _, tensor in tensors]
    if type(start) is not int or start < 0 or offsets != expected:
        raise ValueError
    return start, layout


class OpenShard:
    """A memory-mapped cache shard: its pages are shared between processes, and loaded only when they are read."""

    def __init__(self, path: Path | str) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        try:
            # The map is private: writing to a tensor never changes the file.
            self._map = mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise ShardError(f"{path} is empty") from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_handle"):
            close(self._handle)

    def get_file_stamp(self) -> tuple[int, int]:
        """Size and modification time (ns) of a shard's file; both are -1 once it was replaced or removed."""
        state = os.fstat(self._handle)
        return (state.st_size, state.st_mtime_ns) if state.st_nlink else (-1, -1)

    def __len__(self) -> int:
        return len(self._map)

    def read(self, entry: StoredEntry) -> torch.Tensor:
        """Read a cache entry's bytes, uint8, which keep the memory map alive.

        Raises `ShardError` if some are missing.
        """
        start, size = entry.start, entry.layout.nbytes
        # Check the size every time: touching a mapped page beyond the end of a truncated file kills the process.
        if entry.end > min(len(self._map), os.fstat(self._handle).st_size):
            raise ShardError("the file ends before the entry does")
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Using a mapped page that cannot be read also kills the process, while reading the file raises an `OSError`.
        for begin in range(start, entry.end, len(_TEST_BUFFER)):
            os.preadv(self._handle, [_TEST_BUFFER[: entry.end - begin]], begin)
        # No copy: the tensor shares the pages of the memory map.
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        # An entry behind one whose size is not a multiple of 8 is not aligned, so it is copied.
        return data if start % _ALIGNMENT_BYTES == 0 else data.clone()


def is_in_range(tensor: torch.Tensor, limit: float) -> bool:
    """True if every value of a tensor in host memory is finite and within +-limit."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # Compare in fp64, which holds every value of the narrower dtypes. With a NaN, both ends are NaN.
    low, high = (end.double() for end in tensor.detach().aminmax())
    return bool((low >= -limit) & (high <= limit))


def list_shards(folder: Path) -> Iterator[Path]:
    """Yield the shards of a cache folder in the order of their names; none if the folder does not exist."""
    if folder.is_dir():
        yield from sorted(folder.glob(f"[!.]*{SUFFIX}"))
