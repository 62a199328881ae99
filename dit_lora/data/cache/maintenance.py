"""Maintenance of a cache: verify every byte, count the contents, and free the space of unused entries."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import Timeout

from dit_lora.data.cache.cache import MAX_ABS, TensorCache
from dit_lora.data.cache.fill import (
    FAILED,
    LOCKS,
    MAX_JOBS_PER_UNIT,
    MAX_UNIT_BYTES,
    block_unit_claims,
    is_locked,
    list_unit_locks,
)
from dit_lora.data.cache.shards import (
    DEAD,
    PARTIAL,
    SUFFIX,
    EncodedEntry,
    OpenShard,
    ShardError,
    ShardHeader,
    StoredEntry,
    is_in_range,
    list_shards,
    read_header,
    write_shard,
)
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_bad_tensors, is_finite

OnProgress = Callable[[int, int], None]
"""Called with the number of finished shards, and of all shards."""

_GATE_TIMEOUT_S = 10.0
_MARKABLE_KINDS = ("damaged", "non_finite", "out_of_range")


@dataclass(frozen=True)
class CacheProblem:
    """One problem of a cache shard, or of one entry in it."""

    kind: str
    """`unreadable` header, `torn` (incomplete) entry, `damaged` bytes, `non_finite` or `out_of_range` values."""
    path: Path
    key: str | None
    sample: str | None
    words: str

    def __str__(self) -> str:
        location = f"{self.sample}, entry {self.key} of {self.path}" if self.key else f"{self.path}"
        return f"{location}: {self.words}"


@dataclass
class VerifiedCache:
    """Result of verifying a cache with `verify_cache`."""

    entries: int = 0
    """Number of good entries, copies included."""
    bytes: int = 0
    """Number of bytes read."""
    dead: int = 0
    """Number of entries that were marked bad before."""
    problems: list[CacheProblem] = field(default_factory=list)
    set_aside: int = 0
    """Number of entries marked bad by this call, so that the next start encodes them again."""
    leftovers: list[Path] = field(default_factory=list)
    """Files of killed processes; `prune_cache` removes them."""


@dataclass
class CacheStats:
    """Numbers of entries, shards and bytes in a cache."""

    entries: int = 0
    """Number of usable entries."""
    bytes: int = 0
    """Bytes of the usable entries."""
    shards: int = 0
    file_bytes: int = 0
    """Bytes of all shards, including unusable entries."""
    dead: int = 0
    """Number of entries that are marked bad."""
    duplicates: int = 0
    torn: int = 0
    """Number of incomplete entries."""
    unreadable: int = 0
    """Number of shards whose header cannot be read."""
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of entries and bytes, by the tensors' names, dtypes and shapes; the most frequent first."""
    leftovers: int = 0


@dataclass
class PruneResult:
    """Result of pruning a cache with `prune_cache`."""

    unwanted: int = 0
    """Number of entries removed because they are not in `keep`."""
    dead: int = 0
    duplicates: int = 0
    torn: int = 0
    problems: list[CacheProblem] = field(default_factory=list)
    """Damaged entries that were not copied, and shards whose header could not be read."""
    removed: int = 0
    """Number of shards removed."""
    written: int = 0
    """Number of shards written with the remaining entries of removed ones."""
    leftovers: int = 0
    freed: int = 0
    """Bytes removed minus bytes written."""


def verify_cache(
    cache: TensorCache, *, mark_bad: bool = False, on_progress: OnProgress = lambda done, shards: None
) -> VerifiedCache:
    """Read every cache entry and check its digest, finiteness and range; with `mark_bad`, mark bad entries."""
    verified = VerifiedCache(leftovers=_find_leftovers(cache))
    paths = list(list_shards(cache.root))
    for number, (path, header) in enumerate(_iter_headers(paths, verified.problems)):
        on_progress(number, len(paths))
        for entry in header.entries:
            if entry.bad_entry_mark_path.exists():
                verified.dead += 1
                continue
            _, problem = _read_entry(entry)
            verified.bytes += entry.layout.nbytes
            if problem is None:
                verified.entries += 1
                continue
            verified.problems.append(problem)
            # An incomplete entry counts as missing anyway, so it needs no mark.
            if mark_bad and problem.kind in _MARKABLE_KINDS:
                entry.bad_entry_mark_path.touch()
                verified.set_aside += 1
        if not header.has_valid_name:
            message = "its header was altered; entries may be missing"
            verified.problems.append(CacheProblem("damaged", path, None, None, message))
    on_progress(len(paths), len(paths))
    if verified.set_aside:
        cache.refresh()
    return verified


def compute_stats(cache: TensorCache) -> CacheStats:
    """Count the contents of a cache from the headers of its shards."""
    # The first usable copy of a key counts as its entry, and the others as duplicates.
    total, keys = CacheStats(leftovers=len(_find_leftovers(cache))), set[str]()
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    shards, problems = list(list_shards(cache.root)), list[CacheProblem]()
    total.shards, total.file_bytes = len(shards), sum(path.stat().st_size for path in shards)
    for _, header in _iter_headers(shards, problems):
        for entry in header.entries:
            if entry.bad_entry_mark_path.exists():
                total.dead += 1
            elif not entry.is_complete:
                total.torn += 1
            elif entry.key in keys:
                total.duplicates += 1
            else:
                keys.add(entry.key)
                kind = ", ".join(
                    f"{name} {dtype} {'x'.join(map(str, shape)) or 'scalar'}"
                    for name, dtype, shape in entry.layout.tensors
                )
                kinds[kind] += 1
                sizes[kind] += entry.layout.nbytes
    total.unreadable = len(problems)
    total.entries, total.bytes = kinds.total(), sizes.total()
    total.kinds = {kind: (count, sizes[kind]) for kind, count in kinds.most_common()}
    return total


def prune_cache(
    cache: TensorCache, keep: set[str] | None = None, *, on_progress: OnProgress = lambda done, shards: None
) -> PruneResult:
    """Remove unneeded entries and leftover files from a cache.

    Entries are removed if they are marked bad, incomplete, duplicate, or not in `keep` (None keeps all keys). The
    remaining entries of a shard are written to a new one before the old one is removed, so a kill leaves at worst
    duplicates. Processes that are reading can continue. Raises `DitLoraError` while a process fills the cache.
    """
    if not cache.root.is_dir():
        return PruneResult()
    try:
        # Inside the gate no unit can be claimed, so a unit that is free now stays free.
        with block_unit_claims(cache, timeout_s=_GATE_TIMEOUT_S):
            busy = [lock for lock in list_unit_locks(cache) if is_locked(lock)]
            if busy:
                raise DitLoraError(f"{cache.root} is being filled ({len(busy)} units); prune it later")
            # No unit is in progress, so no other process writes shards or locks now.
            result = _PruneState(cache, keep).run(on_progress)
    except Timeout as error:
        raise DitLoraError(f"{cache.root} is being pruned by another process; try again later") from error
    cache.refresh()
    return result


@dataclass
class _PruneState:
    """State of one call of `prune_cache`, while other processes are locked out."""

    cache: TensorCache
    keep: set[str] | None
    result: PruneResult = field(default_factory=PruneResult)
    num_copies: Counter[str] = field(default_factory=Counter)
    kept_keys: set[str] = field(default_factory=set)
    pending_entries: list[EncodedEntry] = field(default_factory=list)
    source_shards: list[Path] = field(default_factory=list)
    """Shards that hold the pending entries, and are removed once those are written."""
    written_shards: set[Path] = field(default_factory=set)

    def run(self, on_progress: OnProgress) -> PruneResult:
        headers = dict(_iter_headers(list_shards(self.cache.root), self.result.problems))
        # Count the copies of each key first: an entry is read and verified only if it has other copies.
        self.num_copies.update(entry.key for header in headers.values() for entry in header.entries)
        for number, (path, header) in enumerate(headers.items()):
            on_progress(number, len(headers))
            kept_entries = [entry for entry in header.entries if self._should_keep_entry(entry, header)]
            # If all entries of a shard stay, the shard stays too.
            if kept_entries and len(kept_entries) == len(header.entries):
                continue
            self.source_shards.append(path)
            for entry in kept_entries:
                data, problem = _read_entry(entry)
                if problem:
                    self.result.problems.append(problem)
                    continue
                # The entry is written unchanged, with the digest that it has.
                copied = EncodedEntry(entry.key, entry.sample, entry.facts, entry.layout, [data.numpy()], entry.digest)
                self.pending_entries.append(copied)
            size = sum(entry.layout.nbytes for entry in self.pending_entries)
            if len(self.pending_entries) >= MAX_JOBS_PER_UNIT or size >= MAX_UNIT_BYTES:
                self._flush_entries()
        self._flush_entries()
        for path in _find_leftovers(self.cache):
            self.result.freed += path.stat().st_size
            path.unlink(missing_ok=True)
            self.result.leftovers += 1
        on_progress(len(headers), len(headers))
        return self.result

    def _should_keep_entry(self, entry: StoredEntry, header: ShardHeader) -> bool:
        """True if `prune_cache` keeps the entry; otherwise the reason is counted."""
        if not entry.is_complete:
            self.result.torn += 1
        elif entry.bad_entry_mark_path.exists():
            self.result.dead += 1
        elif self.keep is not None and entry.key not in self.keep:
            self.result.unwanted += 1
        elif entry.key in self.kept_keys:
            self.result.duplicates += 1
        # A damaged copy must not be the one that is kept.
        elif self.num_copies[entry.key] > 1 and (problem := _read_entry(entry)[1]):
            self.result.problems.append(problem)
        else:
            # Later copies of this key count as duplicates.
            self.kept_keys.add(entry.key)
            return True
        return False

    def _flush_entries(self) -> None:
        """Write the cache entries to keep, and only then remove the shards that held them."""
        if self.pending_entries:
            try:
                path = write_shard(self.cache.root, self.pending_entries)
            except OSError as error:
                raise DitLoraError(
                    f"cannot write to {self.cache.root}: {error.strerror}; no other entry is affected; what was "
                    "removed so far stays removed"
                ) from error
            self.written_shards.add(path)
            self.result.written += 1
            self.result.freed -= path.stat().st_size
        # The new shard is on the disk, so the old ones can go.
        for path in self.source_shards:
            # A shard's name is the digest of its header, so the new shard may be one of the sources:
            # a prune that was killed may have written it.
            if path not in self.written_shards:
                self.result.freed += path.stat().st_size
                path.unlink()
                self.result.removed += 1
        self.pending_entries, self.source_shards = [], []


def _iter_headers(shards: Iterable[Path], problems: list[CacheProblem]) -> Iterator[tuple[Path, ShardHeader]]:
    """Yield each cache shard with its header.

    A damaged header counts as one without entries, and a shard that cannot be opened is skipped.
    """
    for path in shards:
        try:
            header = read_header(path)
        except (OSError, ShardError) as error:
            problems.append(CacheProblem("unreadable", path, None, None, str(error)))
            if isinstance(error, OSError):
                continue
            # A damaged header counts as one without entries, so that pruning removes the shard.
            header = ShardHeader([], (0, 0), has_valid_name=True)
        yield path, header


def _read_entry(entry: StoredEntry) -> tuple[torch.Tensor, CacheProblem | None]:
    """Read a cache entry's bytes; also returns the problem with them or their values, or None."""

    def make_problem(kind: str, message: str) -> CacheProblem:
        return CacheProblem(kind, entry.path, entry.key, entry.sample, message)

    data = torch.empty(0, dtype=torch.uint8)
    try:
        data = OpenShard(entry.path).read(entry)
    except OSError as error:
        return data, make_problem("unreadable", str(error))
    except ShardError as error:
        return data, make_problem("torn", str(error))
    tensors = entry.layout.split_into_tensors(data)
    # Report bad values as such, whether they were written that way or changed later.
    if not all(is_in_range(tensor, MAX_ABS) for tensor in tensors.values()):
        finite = all(is_finite(tensor) for tensor in tensors.values())
        message = describe_bad_tensors(tensors, MAX_ABS) or ""
        return data, make_problem("out_of_range" if finite else "non_finite", message)
    if not entry.matches_digest(data):
        return data, make_problem("damaged", "it was altered after it was written (its digest differs)")
    return data, None


def _find_leftovers(cache: TensorCache) -> list[Path]:
    """Find files in a cache folder that nothing needs any more.

    Files of units that are in progress are not among them.
    """
    root = cache.root
    if not root.is_dir():
        return []
    orphans = [
        path for path in root.glob(f"*{DEAD}") if not path.with_name(path.name.partition(".")[0] + SUFFIX).exists()
    ]
    locks = list_unit_locks(cache)
    # Partial files, locks and failure notes may belong to units in progress.
    if any(is_locked(lock) for lock in locks):
        return sorted(orphans)
    return sorted([*orphans, *locks, *(root / LOCKS).glob(f"*{FAILED}"), *root.glob(f".*{PARTIAL}")])
