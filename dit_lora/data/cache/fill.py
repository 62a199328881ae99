"""Make the missing entries of a cache, by as many processes of as many launches as there are.

The list of jobs is cut into units. A unit is claimed with a lock that the system takes back when its holder
is killed, looked at again under the lock, and written as a shard: whatever ends a process loses at most the
unit in work. A process that is done waits for the units of others and takes over what they leave.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock, Timeout

from dit_lora.data.cache.cache import CacheError, TensorCache, encoded
from dit_lora.data.cache.shards import Encoded
from dit_lora.data.media.video import ClipError
from dit_lora.files import write_whole

PER_UNIT = 16
"""The most jobs that one process makes at a time: the entries of a shard."""
_UNITS = 64
"""Number of units that smaller sets are cut into, so that there is work for every process."""
UNIT_BYTES = 2**28
"""Bytes of encoded entries that are held before they are written."""

LOCKS, FAILED = ".locks", ".failed"
_POLL_SECONDS = 0.5
_GATE = "gate"


@dataclass(frozen=True)
class Job:
    """One cache entry to make."""

    sample: str
    key: str
    facts: Mapping[str, Any]
    make: Callable[[Any], Mapping[str, torch.Tensor]]
    """Function that makes the tensors with the encoder; may raise `ClipError`."""


@dataclass
class Filled:
    """Result of a call of `fill`."""

    made: int = 0
    """Number of entries that this process wrote."""
    failed: dict[str, str] = field(default_factory=dict)
    """Faults of the samples that cannot be encoded, by key, whichever process of the launch tried."""


def fill(
    cache: TensorCache,
    jobs: Sequence[Job],
    load_encoder: Callable[[], Any],
    *,
    launch: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Filled:
    """Return when every job's entry is in the cache or has failed; jobs with equal keys are made once.

    Every process is given the same jobs in the same order. `load_encoder` is called once, and only where
    this process has something to make. `launch` is a name that the processes of one launch share and no
    other has: what one of them failed to encode the others do not try. `on_progress(done, jobs)` counts
    entries that are there or failed, whoever made them. Raises `DitLoraError` where the disk cannot be
    written; what was written stays.
    """
    by_key: dict[str, Job] = {}
    for job in jobs:
        # Equal captions and equal files have equal keys.
        by_key.setdefault(job.key, job)
    name = xxhash.xxh3_64_hexdigest(launch.encode())
    return _Filling(cache, by_key, functools.cache(load_encoder), name, on_progress).run()


@contextmanager
def gate(cache: TensorCache, *, seconds: float = -1) -> Iterator[None]:
    """Keep all others from claiming or giving back a unit while inside; raises `filelock.Timeout`."""
    folder = cache.root / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{_GATE}.lock", timeout=seconds):
        yield


def unit_locks(cache: TensorCache) -> list[Path]:
    """Return the locks of units: those of processes that are at work, and of some that were killed."""
    return sorted(p for p in (cache.root / LOCKS).glob("*.lock") if p.stem != _GATE)


def is_held(lock: Path) -> bool:
    """Return True if a process holds the lock; to be asked within the `gate`."""
    try:
        with FileLock(lock, blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def _claimed(cache: TensorCache, name: str) -> Iterator[bool]:
    """Claim a unit until the end of the block; yields False if another process has it."""
    path = cache.root / LOCKS / f"{name}.lock"
    lock = FileLock(path, blocking=False)
    with gate(cache), suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            # A lock on a file that is already unlinked would keep nobody out, so nobody may open it
            # between the two.
            with gate(cache):
                lock.release()
                path.unlink(missing_ok=True)


@dataclass
class _Filling:
    """One call of `fill`."""

    cache: TensorCache
    jobs: Mapping[str, Job]
    """Jobs by key."""
    load_encoder: Callable[[], Any]
    """Function that loads the encoder at its first call."""
    launch: str
    on_progress: Callable[[int, int], None]
    filled: Filled = field(default_factory=Filled)

    def __post_init__(self) -> None:
        self.lost = set(self.jobs)
        """Keys of entries that are neither there nor failed."""

    def run(self) -> Filled:
        self._look()
        keys = list(self.jobs)
        size = max(1, min(PER_UNIT, len(keys) // _UNITS))
        units = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
        while self.lost:
            units = [unit for unit in units if not self.lost.isdisjoint(unit)]
            if not sum(self._work_at(unit) for unit in units):
                # Others hold all that is left; a unit whose holder is killed can be claimed the next time.
                time.sleep(_POLL_SECONDS)
                self._look()
        failed = self.filled.failed
        # In the order of the jobs, whichever process tried them.
        self.filled.failed = {key: failed[key] for key in keys if key in failed}
        return self.filled

    def _work_at(self, unit: Sequence[str]) -> bool:
        """Make what is missing of a unit; return False if another process has it."""
        if self.lost.isdisjoint(unit):
            return True
        # Named by its entries, so that other launches with the same jobs claim the same unit.
        name = xxhash.xxh3_64_hexdigest("".join(unit).encode())
        with _claimed(self.cache, name) as is_ours:
            if is_ours:
                # Another process may have made the unit before this one had its lock.
                self._look()
                self._make([self.jobs[key] for key in unit if key in self.lost])
            return is_ours

    def _look(self) -> None:
        """See which entries others made, and which they could not make."""
        self.lost = set(self.cache.missing(list(self.lost)))
        for note in (self.cache.root / LOCKS).glob(f"{self.launch}.*{FAILED}"):
            key = note.name.split(".")[1]
            if key in self.lost:
                self._fail(key, note.read_text(encoding="utf-8"))
        self._tell()

    def _make(self, jobs: Sequence[Job]) -> None:
        entries: list[Encoded] = []
        try:
            for job in jobs:
                try:
                    tensors = job.make(self.load_encoder())
                    entries.append(encoded(job.key, tensors, sample=job.sample, facts=job.facts))
                except (ClipError, CacheError) as error:
                    # The launch's other processes read the note and do not try again.
                    note = self.cache.root / LOCKS / f"{self.launch}.{job.key}{FAILED}"
                    write_whole(note, str(error))
                    self._fail(job.key, str(error))
                if sum(entry.layout.nbytes for entry in entries) >= UNIT_BYTES:
                    self._write(entries)
                self._tell(len(entries))
        # An interrupt keeps what is made, too.
        finally:
            self._write(entries)
            self._tell()

    def _write(self, entries: list[Encoded]) -> None:
        """Write the entries and clear the list, also if the disk refuses."""
        batch = entries.copy()
        entries.clear()
        if batch:
            self.cache.write_all(batch)
            self.lost.difference_update(entry.key for entry in batch)
            self.filled.made += len(batch)

    def _fail(self, key: str, message: str) -> None:
        self.filled.failed[key] = message
        self.lost.discard(key)

    def _tell(self, unwritten: int = 0) -> None:
        self.on_progress(len(self.jobs) - len(self.lost) + unwritten, len(self.jobs))
