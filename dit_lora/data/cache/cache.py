"""Encoded clips and captions on disk: keyed by the content of what made them, checked, written whole.

An entry's key is the digest of everything that its tensors depend on, so a changed video, caption,
checkpoint, dtype or shape is another entry and nothing is ever stale. Entries lie in shards
(`dit_lora.data.cache.shards`). Values are checked finite and in range when written; when read, a digest shows
that they are what was written.
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
    Encoded,
    EntryLayout,
    OpenShard,
    ShardError,
    Spec,
    StoredEntry,
    digest,
    in_range,
    tombstone,
    write_shard,
)
from dit_lora.data.storage import read_stored
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_all

__all__ = ["MAX_ABS", "CacheError", "Spec", "TensorCache", "encoded", "entry_key"]

# Far above a VAE posterior or a normalised text embedding, and below where fp16 ends (65504).
MAX_ABS = 1e4

# Limits of the shards that a process keeps mapped: each takes two file descriptors, and what was
# read of them is resident until the system takes it back.
_OPEN = 64
_OPEN_BYTES = 2**31


class CacheError(DitLoraError):
    """Error of an encoder that gave a value that must not be cached; the message names sample and tensor."""


def entry_key(facts: Mapping[str, Any]) -> str:
    """Return the hex digest of facts that JSON can hold; equal facts have equal keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def encoded(
    key: str, tensors: Mapping[str, torch.Tensor], *, sample: str, facts: Mapping[str, Any]
) -> Encoded:
    """Return an entry to be written, checked finite and in range; raises `CacheError` naming `sample`."""
    # Wide types first, so that each tensor is aligned to its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    host = {name: tensors[name].detach().cpu().contiguous() for name in names}
    if not all(in_range(tensor, MAX_ABS) for tensor in host.values()):
        bad = describe_all(host, MAX_ABS)
        raise CacheError(f"{sample}: the encoder's output is not usable: {bad}")
    layout = EntryLayout(
        tuple((name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in host.items())
    )
    parts = [tensor.view(-1).view(torch.uint8).numpy() for tensor in host.values()]
    return Encoded(key, sample, facts, layout, parts, digest(layout, parts))


class TensorCache:
    """Entries of one kind in a folder; safe for several processes that write, read and set aside at once.

    The first use reads the headers of all shards. What others add is seen when a key is asked for that was
    not there, and after `refresh`. Copies in forked workers are safe, and pickled ones carry the index.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: OrderedDict[Path, OpenShard] = OrderedDict()
        self._checked: set[StoredEntry] = set()
        """Entries whose digest was right; those of a shard that is read again are other objects."""

    def __getstate__(self) -> dict[str, Any]:
        # Maps of files cannot be pickled; a worker opens its own.
        return {**self.__dict__, "_open": OrderedDict()}

    @cached_property
    def _index(self) -> Index:
        index = Index(self.root)
        index.refresh()
        return index

    def __len__(self) -> int:
        return len(self._index.entries)

    def refresh(self) -> None:
        """See what other processes wrote, set aside or removed."""
        self._index.refresh()

    def path(self, key: str) -> Path:
        """Return the file that holds the entry; if none does, a path at which there is no file."""
        entry = self._entry(key)
        return entry.path if entry else self.root / f"{key}{SUFFIX}"

    def is_whole(self, key: str) -> bool:
        """Return True if the entry is there with all its bytes; contents are checked by `read`."""
        return self._current_entry(key) is not None

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys whose entry is not there, after a `refresh`."""
        self.refresh()
        return [key for key in keys if key not in self._index.entries]

    def spec(self, key: str) -> Spec:
        """Return shapes and dtypes of an entry's tensors, from its header; raises `DitLoraError` if there is none."""
        entry = self._entry(key)
        if entry is None:
            raise DitLoraError(f"no entry {key} of the cache in {self.root} can be read")
        return dict(entry.layout.spec)

    def first_spec(self, keys: Sequence[str]) -> Spec:
        """Return the spec of the first of these entries that can be read; raises `DitLoraError` if all are damaged."""

        def read() -> Spec:
            for key in keys:
                if self.is_whole(key):
                    return self.spec(key)
            # A folder that is away may come back; damage of all these entries ends the run at once.
            for key in keys[:1]:
                self._index.require_lost(key)
            raise DitLoraError(f"no entry of the cache in {self.root} can be read; start again")

        return read_stored(read, self.root)

    def write_all(self, entries: Sequence[Encoded]) -> None:
        """Write entries as one shard; raises a `DitLoraError` if the disk refuses."""
        try:
            path = write_shard(self.root, entries)
        except OSError as error:
            others = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
            raise DitLoraError(
                f"cannot write the cache entry of {entries[0].sample}{others} in {self.root}: "
                f"{error.strerror}; free space or set data.cache; entries already written are whole"
            ) from error
        if "_index" in self.__dict__:
            self._index.refresh([path.name])

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """Return the tensors and what is wrong with them, in words, or None.

        They lie in a map of the file, which lives as long as they do: copy what is to stay, so that it does
        not keep a whole shard mapped. Writing into them changes no file.

        A bad entry does not raise: in a distributed run only one rank reads it, and all ranks must stop
        together, which the gate sees to. An entry that is damaged is given as NaN of shape `spec`.
        A shard that is away or cannot be read is waited for. Raises `UnreadableError` if it does not come back.
        """
        try:
            tensors, is_as_written = read_stored(lambda: self._load(key), self.root)
        except ShardError as error:
            # Integers have no NaN, so zeros stand in for them.
            lost = {
                name: torch.full(shape, torch.nan if d.is_floating_point else 0, dtype=d)
                for name, (shape, d) in spec.items()
            }
            return lost, f"its cache entry {self._place(key)} cannot be read: {error}"
        if is_as_written:
            return tensors, None
        bad = describe_all(tensors, MAX_ABS)
        if bad:
            return tensors, f"in its cache entry {self._place(key)}, {bad}"
        return (
            tensors,
            f"its cache entry {self._place(key)} is not what was written (digest differs)",
        )

    def set_aside(self, key: str) -> Path:
        """Mark a bad entry as not to be used, so that the next start builds it anew; returns the mark's file.

        The shard stays as it is: others may be reading it.
        """
        path = self.path(key)
        aside = tombstone(path, key)
        if path.exists():
            aside.touch()
            self.refresh()
        return aside

    def entries(self) -> Iterator[StoredEntry]:
        """Yield every entry that `read` would give, with its sample and facts, in the order of the shards' names."""
        self.refresh()
        yield from sorted(self._index.entries.values(), key=lambda entry: (entry.path, entry.start))

    def _place(self, key: str) -> str:
        entry = self._entry(key)
        return f"{key[:16]} of {entry.path}" if entry else f"{key} in {self.root}"

    def _entry(self, key: str) -> StoredEntry | None:
        entry = self._index.entries.get(key)
        # Another process may have written the entry since the last look.
        if entry is None and self._index.may_have_changed():
            self.refresh()
            entry = self._index.entries.get(key)
        return entry

    def _current_entry(self, key: str) -> StoredEntry | None:
        """Return the entry after a look at its shard's file, which may have been replaced or removed."""
        entry = self._entry(key)
        if entry is not None and not self._index.is_as_read(entry.path):
            self._index.refresh([entry.path.name])
            entry = self._entry(key)
        return entry

    def _load(self, key: str) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the tensors, and True if they are what was written.

        Raises `ShardError` if the entry is damaged, `OSError` if its shard is away or cannot be read.
        """
        # Each look costs more: another process may have replaced or removed the shard.
        for look in (self._entry, self._current_entry, self._refreshed_entry):
            entry = look(key)
            source = self._opened(entry.path) if entry else None
            if entry is None or source is None:
                continue
            try:
                data = source.read(entry)
            except OSError:
                # After a remount, only a new handle can be read.
                del self._open[entry.path]
                raise
            # Digests are checked once a process: entries are read in every epoch.
            if entry not in self._checked and entry.is_as_written(data):
                self._checked.add(entry)
            return entry.layout.split(data), entry in self._checked
        self._index.require_lost(key)
        raise ShardError("not all of it is there, or it was marked bad")

    def _refreshed_entry(self, key: str) -> StoredEntry | None:
        self.refresh()
        return self._index.entries.get(key)

    def _opened(self, shard: Path) -> OpenShard | None:
        """Return the shard's file; None if it is not the one of the index any more."""
        opened = self._open.pop(shard, None)
        if opened is None:
            try:
                opened = OpenShard(shard)
            except (FileNotFoundError, ShardError):
                return None
        if opened.stamp() != self._index.stamp(shard):
            return None
        self._open[shard] = opened
        # The shard just opened stays whatever its size.
        while len(self._open) > 1 and (
            len(self._open) > _OPEN or sum(map(len, self._open.values())) > _OPEN_BYTES
        ):
            self._open.popitem(last=False)
        return opened
