"""Create the missing entries of a cache, shared between the processes of any number of launches.

The list of jobs is divided into units. A process claims a unit with a file lock, which the operating system
releases if the process is killed. It checks again under the lock what is missing, and writes the unit as one
shard. If a process is killed, at most the unit in progress is lost. A process without work waits for the units
of others, and takes over those that are abandoned.
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
"""Maximum number of jobs in a unit, and so of entries in a shard."""
_UNITS = 64
"""Number of units into which smaller sets are divided, so that every process has work."""
UNIT_BYTES = 2**28
"""Bytes of encoded entries that are kept in memory before they are written."""

LOCKS, FAILED = ".locks", ".failed"
_POLL_SECONDS = 0.5
_GATE = "gate"


@dataclass(frozen=True)
class Job:
    """One cache entry to create."""

    sample: str
    key: str
    facts: Mapping[str, Any]
    make: Callable[[Any], Mapping[str, torch.Tensor]]
    """Encodes the sample with the encoder; may raise `ClipError`."""


@dataclass
class Filled:
    """Result of `fill`."""

    made: int = 0
    """Number of entries that this process wrote."""
    failed: dict[str, str] = field(default_factory=dict)
    """Messages about samples that cannot be encoded, by key, from all processes of the launch."""


def fill(
    cache: TensorCache,
    jobs: Sequence[Job],
    load_encoder: Callable[[], Any],
    *,
    launch: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Filled:
    """Create the entry of every job, together with other processes; returns when each is in the cache or has failed.

    Every process must pass the same jobs in the same order. Jobs with equal keys are done once.

    Args:
        cache: The cache to fill.
        jobs: Entries that must exist.
        load_encoder: Loads the encoder. Called once, and only if this process has something to encode.
        launch: Name shared by the processes of one launch and no others: a sample that one process failed to
            encode is not tried by the others.
        on_progress: Called with the number of entries that exist or failed, in all processes, and of all jobs.

    Raises:
        DitLoraError: The disk cannot be written. Entries that were written stay.
    """
    by_key: dict[str, Job] = {}
    for job in jobs:
        # Equal captions and equal files have equal keys.
        by_key.setdefault(job.key, job)
    # A launch's name may contain characters that a file name cannot.
    name = xxhash.xxh3_64_hexdigest(launch.encode())
    return _Filling(cache, by_key, functools.cache(load_encoder), name, on_progress).run()


@contextmanager
def gate(cache: TensorCache, *, seconds: float = -1) -> Iterator[None]:
    """Prevent other processes from claiming or releasing a unit inside the context; raises `filelock.Timeout`."""
    folder = cache.root / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    # A negative timeout waits without limit.
    with FileLock(folder / f"{_GATE}.lock", timeout=seconds):
        yield


def unit_locks(cache: TensorCache) -> list[Path]:
    """Lock files of units: of processes that are working, and of some that were killed."""
    return sorted(p for p in (cache.root / LOCKS).glob("*.lock") if p.stem != _GATE)


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock. Call it inside `gate`."""
    try:
        # Taking the lock succeeds only if no living process has it.
        with FileLock(lock, blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def _claimed(cache: TensorCache, name: str) -> Iterator[bool]:
    """Claim a unit until the end of the context; yields False if another process has it."""
    path = cache.root / LOCKS / f"{name}.lock"
    lock = FileLock(path, blocking=False)
    # Claim inside the gate: otherwise the file could be deleted between opening and locking it.
    with gate(cache), suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            # Hold the gate: a process that opens the file between release and unlink would lock a
            # deleted file, which keeps nobody out.
            with gate(cache):
                lock.release()
                path.unlink(missing_ok=True)


@dataclass
class _Filling:
    """State of one call of `fill`."""

    cache: TensorCache
    jobs: Mapping[str, Job]
    """Jobs by key."""
    load_encoder: Callable[[], Any]
    """Loads the encoder at the first call, and returns the same one later."""
    launch: str
    on_progress: Callable[[int, int], None]
    filled: Filled = field(default_factory=Filled)

    def __post_init__(self) -> None:
        self.lost = set(self.jobs)
        """Keys of entries that do not exist yet and have not failed."""

    def run(self) -> Filled:
        """Work on units until every entry exists or has failed."""
        self._look()
        keys = list(self.jobs)
        # Small sets get smaller units, so that each process has some.
        size = max(1, min(PER_UNIT, len(keys) // _UNITS))
        units = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
        while self.lost:
            units = [unit for unit in units if not self.lost.isdisjoint(unit)]
            if not sum(self._work_at(unit) for unit in units):
                # Other processes hold all remaining units. If one is killed, its unit can be claimed next time.
                time.sleep(_POLL_SECONDS)
                self._look()
        failed = self.filled.failed
        # Sort the failures by job, since other processes added some of them.
        self.filled.failed = {key: failed[key] for key in keys if key in failed}
        return self.filled

    def _work_at(self, unit: Sequence[str]) -> bool:
        """Create the missing entries of a unit; returns False if another process has it."""
        if self.lost.isdisjoint(unit):
            return True
        # The name depends on the entries, so that other launches with the same jobs claim the same unit.
        name = xxhash.xxh3_64_hexdigest("".join(unit).encode())
        with _claimed(self.cache, name) as is_ours:
            if is_ours:
                # Another process may have finished the unit before this one got its lock.
                self._look()
                self._make([self.jobs[key] for key in unit if key in self.lost])
            return is_ours

    def _look(self) -> None:
        """Update which entries exist, and which failed in other processes."""
        self.lost = set(self.cache.missing(list(self.lost)))
        for note in (self.cache.root / LOCKS).glob(f"{self.launch}.*{FAILED}"):
            # The note's name is `<launch>.<key>.failed`.
            key = note.name.split(".")[1]
            if key in self.lost:
                self._fail(key, note.read_text(encoding="utf-8"))
        self._tell()

    def _make(self, jobs: Sequence[Job]) -> None:
        """Encode the jobs, and write the entries as shards."""
        entries: list[Encoded] = []
        try:
            for job in jobs:
                try:
                    tensors = job.make(self.load_encoder())
                    entries.append(encoded(job.key, tensors, sample=job.sample, facts=job.facts))
                except (ClipError, CacheError) as error:
                    # The launch's other processes read this file and do not try the sample again.
                    note = self.cache.root / LOCKS / f"{self.launch}.{job.key}{FAILED}"
                    write_whole(note, str(error))
                    self._fail(job.key, str(error))
                # Large entries are written early, to bound the memory.
                if sum(entry.layout.nbytes for entry in entries) >= UNIT_BYTES:
                    self._write(entries)
                self._tell(len(entries))
        # Also write what is finished on an interrupt.
        finally:
            self._write(entries)
            self._tell()

    def _write(self, entries: list[Encoded]) -> None:
        """Write the entries as a shard and clear the list, also if the disk refuses."""
        batch = entries.copy()
        entries.clear()
        if batch:
            self.cache.write_all(batch)
            # Only now do these entries exist for other processes.
            self.lost.difference_update(entry.key for entry in batch)
            self.filled.made += len(batch)

    def _fail(self, key: str, message: str) -> None:
        self.filled.failed[key] = message
        self.lost.discard(key)

    def _tell(self, unwritten: int = 0) -> None:
        """Report progress; `unwritten` entries are encoded but not written yet."""
        self.on_progress(len(self.jobs) - len(self.lost) + unwritten, len(self.jobs))
