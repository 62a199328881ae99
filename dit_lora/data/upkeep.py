"""Look after a cache: check every byte of it, count what is in it, and give back the space of what is not used."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import Timeout

from dit_lora.data.cache import MAX_ABS, TensorCache
from dit_lora.data.fill import FAILED, LOCKS, PER_UNIT, UNIT_BYTES, gate, is_held, unit_locks
from dit_lora.data.shards import (
    DEAD,
    PARTIAL,
    SUFFIX,
    Encoded,
    Header,
    OpenShard,
    ShardError,
    Stored,
    in_range,
    read_header,
    shards_in,
    write_shard,
)
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_all, is_finite

OnProgress = Callable[[int, int], None]
"""Shards looked at, and how many there are."""

# Before there were shards: a file an entry, in folders by the first two digits of its key.
_OLD_FOLDER, _OLD_FILE = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}\.(safetensors|bad)")
_GATE_SECONDS = 10.0
_BAD = ("damaged", "non_finite", "out_of_range")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a shard, or with one entry of it."""

    kind: str
    """`unreadable` file or header, entry `torn` off, `damaged` bytes, values `non_finite` or `out_of_range`."""
    path: Path
    key: str | None
    sample: str | None
    words: str

    def __str__(self) -> str:
        where = f"{self.sample}, entry {self.key} of {self.path}" if self.key else f"{self.path}"
        return f"{where}: {self.words}"


@dataclass
class Verified:
    """What `verify` found."""

    entries: int = 0
    """Copies of entries that were read and are good."""
    bytes: int = 0
    """That were read."""
    dead: int = 0
    """Set aside before."""
    problems: list[Problem] = field(default_factory=list)
    set_aside: int = 0
    """Bad entries that were set aside now, so that the next start builds them anew."""
    leftovers: list[Path] = field(default_factory=list)
    """Files of killed processes and of older versions; `prune` removes them."""


@dataclass
class Stats:
    """What is in a cache."""

    entries: int = 0
    """That can be used."""
    bytes: int = 0
    """Of those entries."""
    shards: int = 0
    file_bytes: int = 0
    """Of all shards, with what cannot be used."""
    dead: int = 0
    """Set aside."""
    duplicates: int = 0
    torn: int = 0
    """Entries whose bytes are not all there."""
    unreadable: int = 0
    """Shards whose header cannot be read."""
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Entries and bytes by their tensors' names, dtypes and shapes; the most frequent first."""
    leftovers: int = 0


@dataclass
class Pruned:
    """What `prune` did."""

    unwanted: int = 0
    """Entries removed since they are not among those to keep."""
    dead: int = 0
    duplicates: int = 0
    torn: int = 0
    problems: list[Problem] = field(default_factory=list)
    """Damaged entries that were not carried over, and shards whose header could not be read."""
    removed: int = 0
    """Shards removed."""
    written: int = 0
    """Shards written with what was kept of those."""
    leftovers: int = 0
    freed: int = 0
    """Bytes."""


def verify(
    cache: TensorCache,
    *,
    set_aside: bool = False,
    on_progress: OnProgress = lambda done, shards: None,
) -> Verified:
    """Read every entry and check digest, finiteness and range; with `set_aside`, mark those that are bad."""
    found = Verified(leftovers=_leftovers(cache))
    paths = list(shards_in(cache.root))
    for number, path in enumerate(paths):
        on_progress(number, len(paths))
        header = _header(path, found.problems)
        for entry in header.entries if header else ():
            if entry.tombstone.exists():
                found.dead += 1
                continue
            _, problem = _read(entry)
            found.bytes += entry.layout.nbytes
            if problem is None:
                found.entries += 1
                continue
            found.problems.append(problem)
            if set_aside and problem.kind in _BAD:  # what is torn counts as missing as it is
                entry.tombstone.touch()
                found.set_aside += 1
        if header and not header.is_named:
            words = "its header is not what was written; entries may be missing from it"
            found.problems.append(Problem("damaged", path, None, None, words))
    on_progress(len(paths), len(paths))
    if found.set_aside:
        cache.refresh()
    return found


def stats(cache: TensorCache) -> Stats:
    """Count what is in a cache, from its headers."""
    total, seen = Stats(leftovers=len(_leftovers(cache))), set[str]()
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path in shards_in(cache.root):
        total.shards += 1
        total.file_bytes += path.stat().st_size
        header = _header(path, [])
        total.unreadable += header is None
        for entry in header.entries if header else ():
            if entry.tombstone.exists():
                total.dead += 1
            elif header and entry.end > header.size:
                total.torn += 1
            elif entry.key in seen:
                total.duplicates += 1
            else:
                seen.add(entry.key)
                kind = _kind(entry)
                kinds[kind] += 1
                sizes[kind] += entry.layout.nbytes
    total.entries, total.bytes = kinds.total(), sizes.total()
    total.kinds = {kind: (count, sizes[kind]) for kind, count in kinds.most_common()}
    return total


def prune(
    cache: TensorCache,
    keep: set[str] | None = None,
    *,
    on_progress: OnProgress = lambda done, shards: None,
) -> Pruned:
    """Remove entries that are not in `keep` (None: any may stay), set aside, torn or double, and leftovers.

    What is kept of a shard is written to a new one before the old is removed: a kill at any point leaves double
    entries at worst. Who is reading goes on. Raises `DitLoraError` while a process fills the cache.
    """
    if not cache.root.is_dir():
        return Pruned()
    try:
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


class _Pruning:
    """One call of `prune`, within the gate."""

    def __init__(self, cache: TensorCache, keep: set[str] | None) -> None:
        self.cache = cache
        self.keep = keep
        self.done = Pruned()
        self.copies: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.pending: list[Encoded] = []
        self.sources: list[Path] = []  # of what is pending
        self.written: set[Path] = set()

    def run(self, on_progress: OnProgress) -> Pruned:
        headers = self._headers()
        for number, (path, header) in enumerate(headers.items()):
            on_progress(number, len(headers))
            kept = [entry for entry in header.entries if self._stays(entry, header)]
            if kept and len(kept) == len(header.entries):
                continue
            self.sources.append(path)
            self.pending += [one for entry in kept if (one := self._carried(entry))]
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

    def _headers(self) -> dict[Path, Header]:
        """Of every shard; without entries where a header is damaged. What cannot be opened is left alone."""
        found = {}
        for path in shards_in(self.cache.root):
            try:
                found[path] = read_header(path)
            except ShardError as error:
                found[path] = Header([], 0, 0, is_named=False)
                self.done.problems.append(Problem("unreadable", path, None, None, str(error)))
            except OSError as error:
                self.done.problems.append(Problem("unreadable", path, None, None, str(error)))
        self.copies.update(entry.key for header in found.values() for entry in header.entries)
        return found

    def _stays(self, entry: Stored, header: Header) -> bool:
        if entry.end > header.size:
            self.done.torn += 1
        elif entry.tombstone.exists():
            self.done.dead += 1
        elif self.keep is not None and entry.key not in self.keep:
            self.done.unwanted += 1
        elif entry.key in self.seen:
            self.done.duplicates += 1
        elif self.copies[entry.key] > 1 and (problem := _read(entry)[1]):
            self.done.problems.append(problem)
        else:
            self.seen.add(entry.key)
            return True
        return False

    def _carried(self, entry: Stored) -> Encoded | None:
        """The entry, to be written again as it is; None if it is damaged."""
        data, problem = _read(entry)
        if problem:
            self.done.problems.append(problem)
            return None
        parts = [data.numpy()]
        return Encoded(entry.key, entry.sample, entry.facts, entry.layout, parts, entry.digest)

    def _flush(self) -> None:
        """Write what is pending, and only then remove where it came from."""
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
            if path not in self.written:  # by a pruning that was killed, and now again
                self.done.freed += path.stat().st_size
                path.unlink()
                self.done.removed += 1
        self.pending, self.sources = [], []


def _header(path: Path, problems: list[Problem]) -> Header | None:
    try:
        return read_header(path)
    except (OSError, ShardError) as error:
        problems.append(Problem("unreadable", path, None, None, str(error)))
        return None


def _read(entry: Stored) -> tuple[torch.Tensor, Problem | None]:
    """An entry's bytes, and what is wrong with them or with the values."""

    def problem(kind: str, words: str) -> Problem:
        return Problem(kind, entry.path, entry.key, entry.sample, words)

    data = torch.empty(0, dtype=torch.uint8)
    try:
        data, found = OpenShard(entry.path).read(entry.start, entry.layout)
    except OSError as error:
        return data, problem("unreadable", str(error))
    except ShardError as error:
        return data, problem("torn", str(error))
    tensors = entry.layout.split(data)
    if not all(in_range(tensor, MAX_ABS) for tensor in tensors.values()):
        finite = all(is_finite(tensor) for tensor in tensors.values())
        words = describe_all(tensors, MAX_ABS) or ""
        return data, problem("out_of_range" if finite else "non_finite", words)
    if found != entry.digest:
        return data, problem("damaged", "it is not what was written (digest differs)")
    return data, None


def _kind(entry: Stored) -> str:
    return ", ".join(
        f"{name} {dtype} {'x'.join(map(str, shape)) or 'scalar'}"
        for name, dtype, shape in entry.layout.tensors
    )


def _leftovers(cache: TensorCache) -> list[Path]:
    """Files that nothing needs. While units are in work, what belongs to those is not among them."""
    root = cache.root
    if not root.is_dir():
        return []
    orphans = [
        path
        for path in root.glob(f"*{DEAD}")
        if not path.with_name(path.name.partition(".")[0] + SUFFIX).exists()
    ]
    old = [
        path
        for folder in root.iterdir()
        if _OLD_FOLDER.fullmatch(folder.name) and folder.is_dir()
        for path in folder.iterdir()
        if _OLD_FILE.fullmatch(path.name) or path.name.endswith(PARTIAL)
    ]
    locks = unit_locks(cache)
    if any(is_held(lock) for lock in locks):
        return sorted([*orphans, *old])
    notes = (root / LOCKS).glob(f"*{FAILED}")
    return sorted([*orphans, *old, *locks, *notes, *root.glob(f".*{PARTIAL}")])
