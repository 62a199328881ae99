"""Cache of encoded clips and captions on disk: keyed by content, verified, written atomically.

An entry's key is the digest of everything that its tensors depend on. A changed video, caption, checkpoint,
dtype or shape has another key, so an entry is never stale. Entries are stored in shards
(`dit_lora.data.cache.shards`). Values are checked to be finite and in range when they are written. When they
are read, a digest shows that they are unchanged.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dit_lora.data.cache.index import Index
from dit_lora.data.cache.shards import (
    DTYPE_NAMES,
    SUFFIX,
    EncodedEntry,
    EntryLayout,
    OpenShard,
    ShardError,
    Spec,
    StoredEntry,
    compute_digest,
    get_bad_mark_path,
    is_in_range,
    write_shard,
)
from dit_lora.data.storage import read_with_retry
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_bad_tensors

__all__ = ["MAX_ABS", "CacheError", "Spec", "TensorCache", "encode_entry", "make_entry_key"]

# Far above the values of a VAE posterior or a normalised text embedding, and below the maximum of fp16 (65504).
MAX_ABS = 1e4

# Limits of the shards that a process keeps mapped: each takes two file descriptors, and the pages
# that were read stay resident until the system reclaims them.
_MAX_OPEN_SHARDS = 64
_MAX_OPEN_BYTES = 2**31


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
    def _index(self) -> Index:
        # Headers are read at the first use, and not when the object is created.
        index = Index(self.root)
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

    def get_first_spec(self, keys: Sequence[str]) -> Spec:
        """Shapes and dtypes of the first of these cache entries that can be read.

        Raises `DitLoraError` if all are damaged.
        """

        def read() -> Spec:
            for key in keys:
                if self.is_complete(key):
                    return self.get_spec(key)
            # An unreachable folder may come back: this raises `OSError` for it. Damaged entries end the run at once.
            for key in keys[:1]:
                self._index.raise_if_unreachable(key)
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

    def verify_again(self, key: str) -> None:
        """Verify a cache entry's digest at its next read, though this process has verified it before."""
        self._verified_entries = {entry for entry in self._verified_entries if entry.key != key}

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """Read a cache entry's tensors, and verify them on the first read.

        The tensors are views of a memory map of the shard, which lives as long as they do. Copy what is kept for long,
        so that it does not keep a whole shard mapped. Writing to the tensors does not change the file.

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
        if entry is None and self._index.may_have_changed():
            self.refresh()
            entry = self._index.entries.get(key)
        return entry

    def _find_current_entry(self, key: str) -> StoredEntry | None:
        """Look up a cache entry, after checking that its shard's file was not replaced or removed."""
        entry = self._find_entry(key)
        if entry is not None and not self._index.is_unchanged(entry.path):
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
            return entry.layout.split_tensors(data), entry in self._verified_entries
        self._index.raise_if_unreachable(key)
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
        if opened.get_stamp() != self._index.get_stamp(shard):
            return None
        self._open[shard] = opened
        # Close the shards that were used longest ago, but never the one just opened.
        while len(self._open) > 1 and (
            len(self._open) > _MAX_OPEN_SHARDS or sum(map(len, self._open.values())) > _MAX_OPEN_BYTES
        ):
            self._open.popitem(last=False)
        return opened
