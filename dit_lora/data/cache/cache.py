"""Cache of encoded clips and captions on disk: keyed by content, verified, written atomically.

An entry's key is the digest of everything that its tensors depend on. A changed video, caption, checkpoint,
dtype or shape has another key, so an entry is never stale. Entries are stored in shards
(`dit_lora.data.cache.shards`), whose headers `CacheIndex` keeps. Values are checked to be finite and in range when
they are written. When they are read, a digest shows that they are unchanged.
"""

import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dit_lora.data.cache.shards import (
    DEAD,
    DTYPE_NAMES,
    SUFFIX,
    EncodedEntry,
    EntryLayout,
    OpenShard,
    ShardError,
    ShardHeader,
    Spec,
    StoredEntry,
    compute_digest,
    get_bad_mark_path,
    is_in_range,
    read_header,
    write_shard,
)
from dit_lora.data.storage import make_missing_file_error, read_with_retry
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_bad_tensors

__all__ = ["MAX_ABS", "CacheError", "Spec", "TensorCache", "encode_entry", "make_entry_key"]

# Far above the values of a VAE posterior or a normalised text embedding, and below the maximum of fp16 (65504).
MAX_ABS = 1e4

# Limits of the shards that a process keeps mapped: each takes two file descriptors, and the pages
# that were read stay resident until the system reclaims them.
_MAX_OPEN_SHARDS = 64
_MAX_OPEN_BYTES = 2**31
# The resolution of a folder's modification time may be this coarse, so two changes can have the same time.
_MTIME_RESOLUTION_NS = 2_000_000_000
_NO_FILE_STAMP = (-1, -1)


class CacheError(DitLoraError):
    """Raised if an encoder's output must not be cached; the message names the sample and the tensor."""


def make_entry_key(facts: Mapping[str, Any]) -> str:
    """Cache key: SHA-256 hex digest of the JSON-serializable facts that an entry depends on."""
    # Sorted keys make the digest independent of the order in which facts are collected.
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def encode_entry(
    key: str, tensors: Mapping[str, torch.Tensor], *, sample: str, facts: Mapping[str, Any]
) -> EncodedEntry:
    """Prepare an entry for writing: copy its tensors to the host and check their values.

    Raises:
        CacheError: A value is not finite or out of range; the message names `sample`.
    """
    # Wide dtypes first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    # Contiguous tensors in host memory, whose bytes can be written directly.
    host = {name: tensors[name].detach().cpu().contiguous() for name in names}
    if not all(is_in_range(tensor, MAX_ABS) for tensor in host.values()):
        raise CacheError(f"{sample}: the encoder's output is not usable: {describe_bad_tensors(host, MAX_ABS)}")
    layout = EntryLayout(tuple((name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in host.items()))
    # View the bytes without a copy.
    parts = [tensor.view(-1).view(torch.uint8).numpy() for tensor in host.values()]
    return EncodedEntry(key, sample, facts, layout, parts, compute_digest(layout, parts))


class TensorCache:
    """Cache of encoded tensors of one kind in a folder.

    Several processes may write, read and mark entries bad at once. The first use reads the headers of all shards.
    Entries that other processes add are found when a missing key is requested, and after `refresh`. Copies in forked
    workers are safe, and pickled copies include the index.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: OrderedDict[Path, OpenShard] = OrderedDict()
        self._verified_entries: set[StoredEntry] = set()
        """Entries whose digest was verified; when a shard is read again, its entries are new objects."""

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps cannot be pickled; a worker opens its own.
        return {**self.__dict__, "_open": OrderedDict()}

    @cached_property
    def _index(self) -> "CacheIndex":
        # Headers are read at the first use, and not when the object is created.
        index = CacheIndex(self.root)
        index.refresh()
        return index

    def __len__(self) -> int:
        return len(self._index.entries)

    def refresh(self) -> None:
        """Load the changes that other processes made to the cache: entries written, marked bad or removed."""
        self._index.refresh()

    def find_shard_path(self, key: str) -> Path:
        """Path of the cache shard that holds the entry; without an entry, a path at which no file exists."""
        entry = self._find_entry(key)
        return entry.path if entry else self.root / f"{key}{SUFFIX}"

    def is_complete(self, key: str) -> bool:
        """True if a cache entry exists with all its bytes. Their values are verified only by `read`."""
        return self._find_current_entry(key) is not None

    def find_missing(self, keys: Sequence[str]) -> list[str]:
        """Keys that have no entry in the cache, after loading changes of other processes."""
        self.refresh()
        return [key for key in keys if key not in self._index.entries]

    def get_spec(self, key: str) -> Spec:
        """Shapes and dtypes of a cache entry's tensors, from its header; raises `DitLoraError` without an entry."""
        entry = self._find_entry(key)
        if entry is None:
            raise DitLoraError(f"entry {key} of the cache in {self.root} cannot be read")
        return dict(entry.layout.spec)

    def read_first_entry_spec(self, keys: Sequence[str]) -> Spec:
        """Shapes and dtypes of the first of these cache entries that can be read.

        Raises `DitLoraError` if all are damaged.
        """

        def read() -> Spec:
            for key in keys:
                if self.is_complete(key):
                    return self.get_spec(key)
            # An unreachable folder may come back: this raises `OSError` for it. Damaged entries end the run at once.
            for key in keys[:1]:
                self._index.raise_if_entry_unreachable(key)
            raise DitLoraError(f"no entry of the cache in {self.root} can be read; delete the cache and start again")

        return read_with_retry(read, self.root)

    def write_entries(self, entries: Sequence[EncodedEntry]) -> None:
        """Write cache entries as one shard; raises `DitLoraError` if the disk cannot be written."""
        try:
            path = write_shard(self.root, entries)
        except OSError as error:
            more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
            raise DitLoraError(
                f"cannot write the cache entry of {entries[0].sample}{more} in {self.root}: {error.strerror}; "
                "free space or set data.cache; entries that were written before are complete"
            ) from error
        # If the index does not exist yet, its first refresh will find the shard.
        if "_index" in self.__dict__:
            self._index.refresh([path.name])

    def reverify_on_next_read(self, key: str) -> None:
        """Verify a cache entry's digest at its next read, though this process has verified it before."""
        self._verified_entries = {entry for entry in self._verified_entries if entry.key != key}

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """Read a cache entry's tensors, and verify them on the first read.

        The tensors are views of a memory map of the shard, which lives as long as they do. Copy tensors that are kept
        for long, since each keeps a whole shard mapped. Writing to the tensors does not change the file.

        A bad entry does not raise: in a distributed run only one rank reads it, and no rank may take the step, which
        the gate ensures. A damaged entry is returned as NaN with the shapes of `spec`. If a shard cannot be reached,
        this waits for it.

        Returns:
            The tensors, and a message about the fault; None if the entry is good.

        Raises:
            UnreadableError: The storage did not come back.
        """
        try:
            tensors, is_as_written = read_with_retry(lambda: self._load(key), self.root)
        except ShardError as error:
            # Integers have no NaN, so they are zero.
            placeholder = {
                name: torch.full(shape, torch.nan if d.is_floating_point else 0, dtype=d)
                for name, (shape, d) in spec.items()
            }
            return placeholder, f"its cache entry {self._describe_location(key)} cannot be read: {error}"
        if is_as_written:
            return tensors, None
        # The digest differs. Name bad values if there are some, since they say more than the digest.
        bad = describe_bad_tensors(tensors, MAX_ABS)
        if bad:
            return tensors, f"in its cache entry {self._describe_location(key)}, {bad}"
        return (
            tensors,
            f"its cache entry {self._describe_location(key)} was altered after it was written (its digest differs)",
        )

    def mark_bad(self, key: str) -> Path:
        """Mark a cache entry as bad, so that the next start encodes it again; returns the path of the mark.

        The shard stays unchanged, because other processes may be reading it.
        """
        path = self.find_shard_path(key)
        mark_path = get_bad_mark_path(path, key)
        # Without a shard there is nothing to mark: the entry is missing anyway.
        if path.exists():
            mark_path.touch()
            self.refresh()
        return mark_path

    def iter_entries(self) -> Iterator[StoredEntry]:
        """Yield every usable cache entry with its sample and facts, in the order of the shards' names."""
        self.refresh()
        yield from sorted(self._index.entries.values(), key=lambda entry: (entry.path, entry.start))

    def _describe_location(self, key: str) -> str:
        entry = self._find_entry(key)
        return f"{key[:16]} of {entry.path}" if entry else f"{key} in {self.root}"

    def _find_entry(self, key: str) -> StoredEntry | None:
        """Look up a cache entry in the index, which is refreshed first if the folder may have changed."""
        entry = self._index.entries.get(key)
        # Another process may have written the entry since the last refresh.
        if entry is None and self._index.may_folder_have_changed():
            self.refresh()
            entry = self._index.entries.get(key)
        return entry

    def _find_current_entry(self, key: str) -> StoredEntry | None:
        """Look up a cache entry, after checking that its shard's file was not replaced or removed."""
        entry = self._find_entry(key)
        if entry is not None and not self._index.is_shard_unchanged(entry.path):
            self._index.refresh([entry.path.name])
            entry = self._find_entry(key)
        return entry

    def _load(self, key: str) -> tuple[dict[str, torch.Tensor], bool]:
        """Load a cache entry's tensors; also returns whether their bytes are unchanged.

        Raises `ShardError` (damaged) or `OSError` (unreachable).
        """
        # Three ways to look the entry up, each more expensive: another process may have replaced or removed the shard.
        for look in (self._find_entry, self._find_current_entry, self._refresh_and_find_entry):
            entry = look(key)
            source = self._get_open_shard(entry.path) if entry else None
            if entry is None or source is None:
                continue
            try:
                data = source.read(entry)
            except OSError:
                # After a remount the old file handle stays broken, so open a new one next time.
                del self._open[entry.path]
                raise
            # Verify digests only once per process: entries are read in every epoch.
            if entry not in self._verified_entries and entry.matches_digest(data):
                self._verified_entries.add(entry)
            return entry.layout.split_into_tensors(data), entry in self._verified_entries
        self._index.raise_if_entry_unreachable(key)
        raise ShardError("it is incomplete, or was marked bad")

    def _refresh_and_find_entry(self, key: str) -> StoredEntry | None:
        self.refresh()
        return self._index.entries.get(key)

    def _get_open_shard(self, shard: Path) -> OpenShard | None:
        """Get the opened shard of the cache; None if its file differs from the one whose header is in the index."""
        # Removed and inserted again below, so that the dictionary is ordered by last use.
        opened = self._open.pop(shard, None)
        if opened is None:
            try:
                opened = OpenShard(shard)
            except (FileNotFoundError, ShardError):
                return None
        # The file was replaced after its header was read: the offsets in the index may be wrong.
        if opened.get_file_stamp() != self._index.get_file_stamp(shard):
            return None
        self._open[shard] = opened
        # Close the shards that were used longest ago, but never the one just opened.
        while len(self._open) > 1 and (
            len(self._open) > _MAX_OPEN_SHARDS or sum(map(len, self._open.values())) > _MAX_OPEN_BYTES
        ):
            self._open.popitem(last=False)
        return opened


class CacheIndex:
    """Index of a cache's usable entries: complete, not marked bad, one per key.

    Each header is read once. A shard is read again only if it was incomplete and has changed, or if `refresh`
    is told to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, StoredEntry] = {}
        """The entries by key; of several copies, the one in the shard that was read first."""
        self._headers: dict[str, ShardHeader] = {}
        """Headers by the shard's file name, in the order in which they were read."""
        self._removed_headers: dict[str, ShardHeader] = {}
        """Last known headers of shards that were removed or can no longer be read."""
        self._incomplete: set[str] = set()
        # File names of the marks of bad entries.
        self._bad_marks: set[str] = set()
        self._layouts: dict[object, EntryLayout] = {}
        # The folder's time of change, and when it was listed; both in nanoseconds.
        self._folder_state = _NO_FILE_STAMP

    def get_file_stamp(self, shard: Path) -> tuple[int, int]:
        """Size and modification time (ns) that a cache shard had when its header was read."""
        header = self._headers.get(shard.name)
        return header.stamp if header else _NO_FILE_STAMP

    def is_shard_unchanged(self, shard: Path) -> bool:
        """True if a shard's file is still the one whose header was read."""
        return _read_stamp(shard) == self.get_file_stamp(shard) != _NO_FILE_STAMP

    def may_folder_have_changed(self) -> bool:
        """True if files may have been added to or removed from the cache folder since the last `refresh`."""
        changed_ns, listed_ns = self._folder_state
        current_ns = _read_stamp(self.root)[1]
        # A change soon after the listing may have left the same time, so a recent folder counts as changed.
        return current_ns != changed_ns or (current_ns != -1 and listed_ns - current_ns < _MTIME_RESOLUTION_NS)

    def refresh(self, shards_to_reread: Iterable[str] = ()) -> None:
        """List the cache folder again, and read new shards and those named in `shards_to_reread`."""
        # Take the time before listing, so that a change in between is noticed next time.
        listed_ns, changed_ns = time.time_ns(), _read_stamp(self.root)[1]
        files = os.listdir(self.root) if changed_ns != -1 else []
        names = {name for name in files if name.endswith(SUFFIX) and not name.startswith(".")}
        to_reread = {*shards_to_reread}
        to_reread |= {name for name in self._incomplete if not self.is_shard_unchanged(self.root / name)}
        removed = {name for name in self._headers if name not in names or name in to_reread}
        for name in removed:
            header = self._headers.pop(name)
            if header.entries:
                # Remember what the shard held: this tells damaged entries from unreachable ones later.
                self._removed_headers[name] = header
        self._incomplete -= removed
        new = sorted(names - self._headers.keys())
        for name in new:
            self._headers[name] = self._read_header(name)
        bad_marks = {name for name in files if name.endswith(DEAD)}
        if removed or bad_marks != self._bad_marks:
            # Another shard may hold a copy of an entry that went away, so choose again among all shards.
            self._bad_marks, new = bad_marks, list(self._headers)
            self.entries.clear()
        for name in new:
            stem = name.removesuffix(SUFFIX)
            for entry in self._headers[name].entries:
                # A mark applies only to the copy in that shard; other copies of the key stay usable.
                is_dead = self._bad_marks and f"{stem}.{entry.key}{DEAD}" in self._bad_marks
                if entry.is_complete and not is_dead:
                    # The first copy of a key wins.
                    self.entries.setdefault(entry.key, entry)
        self._folder_state = changed_ns, listed_ns

    def raise_if_entry_unreachable(self, key: str) -> None:
        """Raise `OSError` unless an unusable entry is certainly damaged or marked bad in its shard.

        Call it after a `refresh`. The storage is at fault if the entry's shard is missing or cannot be opened.
        It is also at fault if no shard is known to have held the entry and no shard has a damaged header, which
        might have named it.
        """
        if any(_has_entry(header, key) for header in self._headers.values()):
            return
        former = [name for name, header in self._removed_headers.items() if _has_entry(header, key)]
        shards = former or sorted(self._incomplete)
        # Opening and reading raise the `OSError` if the storage is at fault.
        for name in shards:
            with open(self.root / name, "rb") as file:
                file.read(1)
        if not shards:
            raise make_missing_file_error(self.root / f"{key}{SUFFIX}")

    def _read_header(self, name: str) -> ShardHeader:
        """Read the header of a cache shard; a shard that cannot be read counts as one without entries."""
        path = self.root / name
        try:
            header = read_header(path, self._layouts)
        except ShardError:
            header = ShardHeader([], _read_stamp(path), has_valid_name=False)
        except OSError:
            # No file has this stamp, so the shard is read again at the next `refresh`.
            header = ShardHeader([], _NO_FILE_STAMP, has_valid_name=False)
        if not header.entries or not all(entry.is_complete for entry in header.entries):
            self._incomplete.add(name)
        return header


def _has_entry(header: ShardHeader, key: str) -> bool:
    """True if a cache shard has an entry with this key, complete or not."""
    return any(entry.key == key for entry in header.entries)


def _read_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time (ns) of a file; both are -1 if it does not exist."""
    try:
        state = os.stat(path)
    except OSError:
        return _NO_FILE_STAMP
    return state.st_size, state.st_mtime_ns
