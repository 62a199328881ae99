"""Upkeep of a cache: check every byte of it, count what is in it, and give back the space of what is not used."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import Timeout

from dit_lora.data.cache.cache import MAX_ABS, TensorCache
from dit_lora.data.cache.fill import FAILED, LOCKS, PER_UNIT, UNIT_BYTES, gate, is_held, unit_locks
from dit_lora.data.cache.shards import (
    DEAD,
    PARTIAL,
    SUFFIX,
    Encoded,
    Header,
    OpenShard,
    ShardError,
    StoredEntry,
    in_range,
    read_header,
    shards_in,
    write_shard,
)
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_all, is_finite

OnProgress = Callable[[int, int], None]
"""Callback that is given the number of shards looked at, and of all."""

_GATE_SECONDS = 10.0
_BAD = ("damaged", "non_finite", "out_of_range")


@dataclass(frozen=True)
class CacheProblem:
    """One problem of a shard, or of one entry of it."""

    kind: str
    """Kind: `unreadable` file or header, entry `torn` off, `damaged` bytes, `non_finite` or `out_of_range` values."""
    path: Path
    key: str | None
    sample: str | None
    words: str

    def __str__(self) -> str:
        where = f"{self.sample}, entry {self.key} of {self.path}" if self.key else f"{self.path}"
        return f"{where}: {self.words}"


@dataclass
class VerifiedCache:
    """Result of `verify`."""

    entries: int = 0
    """Number of copies of entries that were read and are good."""
    bytes: int = 0
    """Number of bytes that were read."""
    dead: int = 0
    """Number of entries that had been set aside before."""
    problems: list[CacheProblem] = field(default_factory=list)
    set_aside: int = 0
    """Number of bad entries that were set aside now, so that the next start builds them anew."""
    leftovers: list[Path] = field(default_factory=list)
    """Files of killed processes; `prune` removes them."""


@dataclass
class CacheStats:
    """Contents of a cache, in numbers."""

    entries: int = 0
    """Number of entries that can be used."""
    bytes: int = 0
    """Bytes of the entries that can be used."""
    shards: int = 0
    file_bytes: int = 0
    """Bytes of all shards, with what cannot be used."""
    dead: int = 0
    """Number of entries set aside."""
    duplicates: int = 0
    torn: int = 0
    """Number of entries whose bytes are not all there."""
    unreadable: int = 0
    """Number of shards whose header cannot be read."""
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of entries and of bytes by the tensors' names, dtypes and shapes; the most frequent first."""
    leftovers: int = 0


@dataclass
class Pruned:
    """Result of `prune`."""

    unwanted: int = 0
    """Number of entries removed because they are not among those to keep."""
    dead: int = 0
    duplicates: int = 0
    torn: int = 0
    problems: list[CacheProblem] = field(default_factory=list)
    """Damaged entries that were not carried over, and shards whose header could not be read."""
    removed: int = 0
    """Number of shards removed."""
    written: int = 0
    """Number of shards written with what was kept of those."""
    leftovers: int = 0
    freed: int = 0
    """Bytes of what was removed, less those of what was written."""


def verify(
    cache: TensorCache,
    *,
    set_aside: bool = False,
    on_progress: OnProgress = lambda done, shards: None,
) -> VerifiedCache:
    """Read every entry and check digest, finiteness and range; with `set_aside`, mark those that are bad."""
    verified = VerifiedCache(leftovers=_leftovers(cache))
    paths = list(shards_in(cache.root))
    for number, (path, header) in enumerate(_headers(paths, verified.problems)):
        on_progress(number, len(paths))
        for entry in header.entries:
            if entry.tombstone.exists():
                verified.dead += 1
                continue
            _, problem = _read(entry)
            verified.bytes += entry.layout.nbytes
            if problem is None:
                verified.entries += 1
                continue
            verified.problems.append(problem)
            # A torn entry counts as missing without a mark.
            if set_aside and problem.kind in _BAD:
                entry.tombstone.touch()
                verified.set_aside += 1
        if not header.is_named:
            message = "its header is not what was written; entries may be missing from it"
            verified.problems.append(CacheProblem("damaged", path, None, None, message))
    on_progress(len(paths), len(paths))
    if verified.set_aside:
        cache.refresh()
    return verified


def stats(cache: TensorCache) -> CacheStats:
    """Count what is in a cache, from its shards' headers."""
    total, seen = CacheStats(leftovers=len(_leftovers(cache))), set[str]()
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    shards, problems = list(shards_in(cache.root)), list[CacheProblem]()
    total.shards, total.file_bytes = len(shards), sum(path.stat().st_size for path in shards)
    for _, header in _headers(shards, problems):
        for entry in header.entries:
            if entry.tombstone.exists():
                total.dead += 1
            elif not entry.is_whole:
                total.torn += 1
            elif entry.key in seen:
                total.duplicates += 1
            else:
                seen.add(entry.key)
                kind = _kind(entry)
                kinds[kind] += 1
                sizes[kind] += entry.layout.nbytes
    total.unreadable = len(problems)
    total.entries, total.bytes = kinds.total(), sizes.total()
    total.kinds = {kind: (count, sizes[kind]) for kind, count in kinds.most_common()}
    return total


def prune(
    cache: TensorCache,
    keep: set[str] | None = None,
    *,
    on_progress: OnProgress = lambda done, shards: None,
) -> Pruned:
    """Remove entries that are not in `keep` (None keeps all), set aside, torn or double, and leftovers.

    What is kept of a shard is written to a new one before the old is removed: a kill at any point leaves
    double entries at worst. Processes that are reading go on. Raises `DitLoraError` while a process fills
    the cache.
    """
    if not cache.root.is_dir():
        return Pruned()
    try:
        # Within the gate no unit can be claimed, so one that is not held now stays free.
        with gate(cache, seconds=_GATE_SECONDS):
            busy = [lock for lock in unit_locks(cache) if is_held(lock)]
            if busy:
                raise DitLoraError(
                    f"{cache.root} is being filled ({len(busy)} units in work); prune it when that is done"
                )
            result = _Pruning(cache, keep).run(on_progress)
    except Timeout as error:
        raise DitLoraError(
            f"{cache.root} is being pruned by another process; try again when that is done"
        ) from error
    cache.refresh()
    return result


@dataclass
class _Pruning:
    """One call of `prune`, within the gate."""

    cache: TensorCache
    keep: set[str] | None
    done: Pruned = field(default_factory=Pruned)
    copies: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    pending: list[Encoded] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)
    """Shards that hold what is pending."""
    written: set[Path] = field(default_factory=set)

    def run(self, on_progress: OnProgress) -> Pruned:
        headers = dict(_headers(shards_in(self.cache.root), self.done.problems))
        # Counted before any entry is judged: a copy is read only if there are others.
        self.copies.update(entry.key for header in headers.values() for entry in header.entries)
        for number, (path, header) in enumerate(headers.items()):
            on_progress(number, len(headers))
            staying = [entry for entry in header.entries if self._stays(entry, header)]
            # A shard of which everything stays is not written anew.
            if staying and len(staying) == len(header.entries):
                continue
            self.sources.append(path)
            for entry in staying:
                carried = self._carried(entry)
                if carried is not None:
                    self.pending.append(carried)
            size = sum(entry.layout.nbytes for entry in self.pending)
            if len(self.pending) >= PER_UNIT or size >= UNIT_BYTES:
                self._flush()
        self._flush()
        for path in _leftovers(self.cache):
            self.done.freed += path.stat().st_size
            path.unlink(missing_ok=True)
            self.done.leftovers += 1
        on_progress(len(headers), len(headers))
        return self.done

    def _stays(self, entry: StoredEntry, header: Header) -> bool:
        if not entry.is_whole:
            self.done.torn += 1
        elif entry.tombstone.exists():
            self.done.dead += 1
        elif self.keep is not None and entry.key not in self.keep:
            self.done.unwanted += 1
        elif entry.key in self.seen:
            self.done.duplicates += 1
        # Of several copies, a damaged one must not be the one that stays.
        elif self.copies[entry.key] > 1 and (problem := _read(entry)[1]):
            self.done.problems.append(problem)
        else:
            self.seen.add(entry.key)
            return True
        return False

    def _carried(self, entry: StoredEntry) -> Encoded | None:
        """Return the entry, to be written again as it is; None if it is damaged."""
        data, problem = _read(entry)
        if problem:
            self.done.problems.append(problem)
            return None
        parts = [data.numpy()]
        return Encoded(entry.key, entry.sample, entry.facts, entry.layout, parts, entry.digest)

    def _flush(self) -> None:
        """Write the pending entries, and only then remove the shards that held them."""
        if self.pending:
            try:
                path = write_shard(self.cache.root, self.pending)
            except OSError as error:
                raise DitLoraError(
                    f"cannot write to {self.cache.root}: {error.strerror}; nothing is lost, what was "
                    "removed so far stays removed"
                ) from error
            self.written.add(path)
            self.done.written += 1
            self.done.freed -= path.stat().st_size
        for path in self.sources:
            # A shard's name is its header's digest: a pruning that was killed may have written the
            # very same one.
            if path not in self.written:
                self.done.freed += path.stat().st_size
                path.unlink()
                self.done.removed += 1
        self.pending, self.sources = [], []


def _headers(shards: Iterable[Path], problems: list[CacheProblem]) -> Iterator[tuple[Path, Header]]:
    """Yield each shard's header; a damaged one has no entries, and a shard that cannot be opened is left out."""
    for path in shards:
        try:
            header = read_header(path)
        except (OSError, ShardError) as error:
            problems.append(CacheProblem("unreadable", path, None, None, str(error)))
            if isinstance(error, OSError):
                continue
            header = Header([], (0, 0), is_named=True)
        yield path, header


def _read(entry: StoredEntry) -> tuple[torch.Tensor, CacheProblem | None]:
    """Return an entry's bytes, and what is wrong with them or with the values."""

    def problem(kind: str, message: str) -> CacheProblem:
        return CacheProblem(kind, entry.path, entry.key, entry.sample, message)

    data = torch.empty(0, dtype=torch.uint8)
    try:
        data = OpenShard(entry.path).read(entry)
    except OSError as error:
        return data, problem("unreadable", str(error))
    except ShardError as error:
        return data, problem("torn", str(error))
    tensors = entry.layout.split(data)
    # Bad values are named as such, be they written so or changed since.
    if not all(in_range(tensor, MAX_ABS) for tensor in tensors.values()):
        finite = all(is_finite(tensor) for tensor in tensors.values())
        message = describe_all(tensors, MAX_ABS) or ""
        return data, problem("out_of_range" if finite else "non_finite", message)
    if not entry.is_as_written(data):
        return data, problem("damaged", "it is not what was written (digest differs)")
    return data, None


def _kind(entry: StoredEntry) -> str:
    return ", ".join(
        f"{name} {dtype} {'x'.join(map(str, shape)) or 'scalar'}"
        for name, dtype, shape in entry.layout.tensors
    )


def _leftovers(cache: TensorCache) -> list[Path]:
    """Return the files that nothing needs; while units are in work, theirs are not among them."""
    root = cache.root
    if not root.is_dir():
        return []
    orphans = [
        path
        for path in root.glob(f"*{DEAD}")
        if not path.with_name(path.name.partition(".")[0] + SUFFIX).exists()
    ]
    locks = unit_locks(cache)
    # Partial files and notes may belong to the units in work.
    if any(is_held(lock) for lock in locks):
        return sorted(orphans)
    notes = (root / LOCKS).glob(f"*{FAILED}")
    return sorted([*orphans, *locks, *notes, *root.glob(f".*{PARTIAL}")])
