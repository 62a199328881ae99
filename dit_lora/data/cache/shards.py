"""Shards: safetensors files that hold several entries of the cache, each with the digest of its bytes.

The tensors of an entry are named `<key>/<name>` and lie one after another. The file's metadata has a line an
entry, `<digest> [sample, facts]`, and the facts that all its entries share once. So headers are the index, and
there is no other that could disagree with them. A shard is never changed: it is named by the digest of its header,
which holds those of its entries, so that a file of the same name has the same contents. Beside it, the empty
file `<shard>.<key>.bad` says that an entry of it is not to be used.
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
from dit_lora.parsing import parse_json

SUFFIX, DEAD, PARTIAL = ".safetensors", ".bad", ".partial"

_DTYPES = {  # by safetensors' names
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
_FACTS = "facts"
# Target of reads whose bytes are not looked at.
_SPARE = memoryview(bytearray(2**20))
# Entries that start at multiples of the widest type are used where they are.
_ALIGNED = 8

Spec = dict[str, tuple[torch.Size, torch.dtype]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ShardError(DitLoraError):
    """Error of a shard whose header cannot be read, or that lacks what was asked for."""


@dataclass(frozen=True)
class EntryLayout:
    """Name, safetensors dtype and shape of an entry's tensors, in the order of their bytes."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @cached_property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Begin and end of each tensor by name, in bytes from the entry's start."""
        bounds, begin = {}, 0
        for name, dtype, shape in self.tensors:
            end = begin + prod(shape) * _DTYPES[dtype].itemsize
            bounds[name] = (begin, end)
            begin = end
        return bounds

    @cached_property
    def nbytes(self) -> int:
        return max((end for _, end in self.bounds.values()), default=0)

    @cached_property
    def text(self) -> bytes:
        """Text that stands for the layout in an entry's digest."""
        return json.dumps(self.tensors).encode()

    @cached_property
    def spec(self) -> Spec:
        return {name: (torch.Size(shape), _DTYPES[dtype]) for name, dtype, shape in self.tensors}

    def split(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors as views of an entry's bytes."""
        return {
            name: data[slice(*self.bounds[name])].view(dtype).view(shape)
            for name, (shape, dtype) in self.spec.items()
        }


@dataclass(frozen=True)
class Encoded:
    """An entry that is to be written."""

    key: str
    sample: str
    facts: Mapping[str, Any]
    layout: EntryLayout
    parts: Sequence[Bytes]
    """Bytes of the tensors, in the layout's order."""
    digest: bytes


# Not frozen: there may be a million, and a frozen one takes five times as long to make.
@dataclass(slots=True, eq=False)
class StoredEntry:
    """An entry of a shard, as its header describes it; never changed."""

    path: Path
    key: str
    start: int
    """Offset of the entry's bytes in the file."""
    layout: EntryLayout
    digest: bytes
    line: str
    """JSON of the sample and of the facts that this entry has alone."""
    shared: str
    """JSON of the facts that all entries of the shard share."""
    is_whole: bool
    """True if the file reached to the entry's end when the header was read."""

    @property
    def end(self) -> int:
        return self.start + self.layout.nbytes

    @property
    def sample(self) -> str:
        return parse_json(self.line)[0]

    @property
    def facts(self) -> dict[str, Any]:
        return parse_json(self.shared) | parse_json(self.line)[1]

    def is_as_written(self, data: torch.Tensor) -> bool:
        """Return True if the digest of the entry's bytes is that of when they were written."""
        return digest(self.layout, [data.numpy()]) == self.digest

    @property
    def tombstone(self) -> Path:
        """Path of the empty file that says that this entry is not to be used."""
        return tombstone(self.path, self.key)


@dataclass(frozen=True)
class Header:
    """Contents of a shard, and the state of its file when they were read."""

    entries: list[StoredEntry]
    stamp: tuple[int, int]
    """Size and time of the file's last change, in nanoseconds."""
    is_named: bool
    """True if the file's name is its header's digest."""


def digest(layout: EntryLayout, parts: Sequence[Bytes]) -> bytes:
    """Return the XXH3 of 128 bits over names, dtypes, shapes and bytes."""
    total = xxhash.xxh3_128(layout.text)
    for part in parts:
        total.update(part.data)
    return total.digest()


def tombstone(shard: Path, key: str) -> Path:
    return shard.with_name(f"{shard.stem}.{key}{DEAD}")


def write_shard(folder: Path, entries: Sequence[Encoded]) -> Path:
    """Write entries as one file, whole and on the disk when this returns; raises `OSError`.

    A damaged file of the same name is replaced, and what was set aside of it counts again.
    """
    header = _header(entries)
    path = folder / f"{xxhash.xxh3_128(header).hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{path.stem}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    try:
        with partial.open("xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for entry in entries:
                for part in entry.parts:
                    file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        # After the rename there is no such file.
        partial.unlink(missing_ok=True)
    for entry in entries:
        # The file was just written, so an old mark of the same name no longer holds.
        tombstone(path, entry.key).unlink(missing_ok=True)
    _sync_folder(folder)
    return path


def _sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk; fsync of a file writes its contents only."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(entries: Sequence[Encoded]) -> bytes:
    first = entries[0].facts
    others = [entry.facts for entry in entries[1:]]
    shared = {
        name: value
        for name, value in first.items()
        if all(name in facts and facts[name] == value for facts in others)
    }
    metadata = {_FACTS: json.dumps(shared, sort_keys=True)}
    described: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry in entries:
        unshared = {name: value for name, value in entry.facts.items() if name not in shared}
        line = json.dumps([entry.sample, unshared], sort_keys=True)
        metadata[entry.key] = f"{entry.digest.hex()} {line}"
        for name, dtype, shape in entry.layout.tensors:
            begin, end = entry.layout.bounds[name]
            described[f"{entry.key}/{name}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [start + begin, start + end],
            }
        start += entry.layout.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    # Padded to 8 bytes, as safetensors does.
    return text + b" " * (-len(text) % 8)


def read_header(path: Path, layouts: dict[Any, EntryLayout] | None = None) -> Header:
    """Read the entries that a shard's header describes, torn or not; raises `ShardError` or `OSError`.

    `layouts` holds those that were met, so that equal ones are one object. An entry that is described
    wrongly is left out.
    """
    layouts = {} if layouts is None else layouts
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= state.st_size - 8:
            raise ShardError(f"{path} has no whole header; its entries are lost")
        text = file.read(length)
    try:
        described = parse_json(text)
        metadata = described.pop("__metadata__")
        shared = metadata.pop(_FACTS)
        if not isinstance(parse_json(shared), dict):
            raise TypeError
        groups: dict[str, list[tuple[str, Any]]] = {}
        for full_name, tensor in described.items():
            key, _, name = full_name.partition("/")
            groups.setdefault(key, []).append((name, tensor))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{path} has a damaged header; its entries are lost") from error
    entries = []
    for key, tensors in groups.items():
        try:
            start, layout = _placed(tensors, layouts)
            line = metadata[key]
            # The line is 32 hexadecimal digits, a space and JSON.
            checksum = bytes.fromhex(line[:32])
            _require_sample(line[33:])
        except (ValueError, LookupError, TypeError):
            continue
        start += 8 + length
        is_whole = start + layout.nbytes <= state.st_size
        entries.append(StoredEntry(path, key, start, layout, checksum, line[33:], shared, is_whole))
    is_named = path.stem == xxhash.xxh3_128(text).hexdigest()
    return Header(entries, (state.st_size, state.st_mtime_ns), is_named)


def _require_sample(line: str) -> None:
    """Raise `ValueError` unless a line is the JSON of a sample's name and its facts."""
    sample, facts = parse_json(line)
    if not isinstance(sample, str) or not isinstance(facts, dict):
        raise ValueError


def _placed(
    tensors: Sequence[tuple[str, Any]], layouts: dict[Any, EntryLayout]
) -> tuple[int, EntryLayout]:
    """Return the start of an entry's bytes after the header, and their layout; raise `ValueError` if they are wrong."""
    described = tuple((name, tensor["dtype"], tuple(tensor["shape"])) for name, tensor in tensors)
    layout = layouts.get(described)
    if layout is None:
        # JSON may hold `true`, which is an int to isinstance.
        if any(type(side) is not int or side < 0 for _, _, shape in described for side in shape):
            raise ValueError
        layout = layouts[described] = EntryLayout(described)
    start = tensors[0][1]["data_offsets"][0]
    expected = [[start + begin, start + end] for begin, end in layout.bounds.values()]
    offsets = [tensor["data_offsets"] for _, tensor in tensors]
    if type(start) is not int or start < 0 or offsets != expected:
        raise ValueError
    return start, layout


class OpenShard:
    """A shard's file, mapped: its pages are shared, and resident only once they were read."""

    def __init__(self, path: Path | str) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        try:
            # The map is private: what is written into a tensor is never written to the file.
            self._map = mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise ShardError(f"{path} is empty") from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_handle"):
            close(self._handle)

    def stamp(self) -> tuple[int, int]:
        """Return size and time of change in nanoseconds; both are -1 once the file was replaced or removed."""
        state = os.fstat(self._handle)
        return (state.st_size, state.st_mtime_ns) if state.st_nlink else (-1, -1)

    def __len__(self) -> int:
        return len(self._map)

    def read(self, entry: StoredEntry) -> torch.Tensor:
        """Return an entry's bytes, which keep the map alive; raise `ShardError` if some are missing."""
        start, size = entry.start, entry.layout.nbytes
        # The size is asked each time: touching a page beyond the end of a file that was cut kills the process.
        if entry.end > min(len(self._map), os.fstat(self._handle).st_size):
            raise ShardError("the file ends before the entry does")
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Where a mapped page cannot be read, using it would kill; reading raises an `OSError`.
        for begin in range(start, entry.end, len(_SPARE)):
            os.preadv(self._handle, [_SPARE[: entry.end - begin]], begin)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        return data if start % _ALIGNED == 0 else data.clone()


def in_range(tensor: torch.Tensor, limit: float) -> bool:
    """Return True if every value of a tensor in host memory is finite and within +-limit."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # In fp64, which holds every value of the narrower dtypes; of NaN, both ends are NaN.
    least, most = (end.double() for end in tensor.detach().aminmax())
    return bool((least >= -limit) & (most <= limit))


def shards_in(folder: Path) -> Iterator[Path]:
    """Yield the shards of a folder in the order of their names; none if there is no folder."""
    if folder.is_dir():
        yield from sorted(folder.glob(f"[!.]*{SUFFIX}"))
