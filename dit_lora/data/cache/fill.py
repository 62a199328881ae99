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

from dit_lora.data.cache.cache import CacheError, TensorCache, encode_entry
from dit_lora.data.cache.shards import EncodedEntry
from dit_lora.data.media.video import ClipError
from dit_lora.files import write_atomically

MAX_JOBS_PER_UNIT = 16
"""Maximum number of jobs in a unit, and so of entries in a shard."""
_MIN_UNITS = 64
"""Number of units into which smaller sets are divided, so that every process has work."""
MAX_UNIT_BYTES = 2**28
"""Bytes of encoded entries that are kept in memory before they are written."""

LOCKS, FAILED = ".locks", ".failed"
_POLL_INTERVAL_S = 0.5
_GATE_NAME = "gate"


@dataclass(frozen=True)
class CacheJob:
    """One cache entry to create: its sample, key, facts, and the function that encodes it."""

    sample: str
    key: str
    facts: Mapping[str, Any]
    encode: Callable[[Any], Mapping[str, torch.Tensor]]
    """Encodes the sample with the encoder; may raise `ClipError`."""


@dataclass
class BuildResult:
    """Result of filling a cache: what was written, and which samples failed."""

    num_written: int = 0
    """Number of entries that this process wrote."""
    failed: dict[str, str] = field(default_factory=dict)
    """Messages about samples that cannot be encoded, by key, from all processes of the launch."""


def fill_cache(
    cache: TensorCache,
    jobs: Sequence[CacheJob],
    load_encoder: Callable[[], Any],
    *,
    launch_id: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> BuildResult:
    """Create the entry of every job, together with other processes; returns when each is in the cache or has failed.

    A job's encoder gives the tensors, `encode_entry` checks their values, and up to 16 entries are written as one
    shard. Every process must pass the same jobs in the same order. Jobs with equal keys are done once.

    Args:
        cache: The cache to fill.
        jobs: Entries that must exist.
        load_encoder: Loads the encoder. Called once, and only if this process has something to encode.
        launch_id: Name shared by the processes of one launch and no others: a sample that one process failed to
            encode is not tried by the others.
        on_progress: Called with the number of entries that exist or failed, in all processes, and of all jobs.

    Raises:
        DitLoraError: The disk cannot be written. Entries that were written stay.
    """
    by_key: dict[str, CacheJob] = {}
    for job in jobs:
        # Equal captions and equal files have equal keys.
        by_key.setdefault(job.key, job)
    # A launch's name may contain characters that a file name cannot.
    name = xxhash.xxh3_64_hexdigest(launch_id.encode())
    return _FillState(cache, by_key, functools.cache(load_encoder), name, on_progress).run()


@contextmanager
def block_unit_claims(cache: TensorCache, *, timeout_s: float = -1) -> Iterator[None]:
    """Prevent other processes from claiming or releasing cache units inside the context.

    Raises `filelock.Timeout`.
    """
    folder = cache.root / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    # A negative timeout waits without limit.
    with FileLock(folder / f"{_GATE_NAME}.lock", timeout=timeout_s):
        yield


def list_unit_locks(cache: TensorCache) -> list[Path]:
    """List the lock files of cache units: of processes that are working, and of some that were killed."""
    return sorted(p for p in (cache.root / LOCKS).glob("*.lock") if p.stem != _GATE_NAME)


def is_locked(lock: Path) -> bool:
    """True if a process holds the lock file. Call it inside `block_unit_claims`."""
    try:
        # Taking the lock succeeds only if no living process has it.
        with FileLock(lock, blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def _claim_cache_unit(cache: TensorCache, name: str) -> Iterator[bool]:
    """Claim a unit of cache entries until the end of the context; yields False if another process has it."""
    path = cache.root / LOCKS / f"{name}.lock"
    lock = FileLock(path, blocking=False)
    # Claim inside the gate: otherwise the file could be deleted between opening and locking it.
    with block_unit_claims(cache), suppress(Timeout):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            # Hold the gate: a process that opens the file between release and unlink would lock a
            # deleted file, which keeps nobody out.
            with block_unit_claims(cache):
                lock.release()
                path.unlink(missing_ok=True)


@dataclass
class _FillState:
    """State of one process that fills a cache."""

    cache: TensorCache
    jobs: Mapping[str, CacheJob]
    """Jobs by key."""
    load_encoder: Callable[[], Any]
    """Loads the encoder at the first call, and returns the same one later."""
    launch_id: str
    on_progress: Callable[[int, int], None]
    result: BuildResult = field(default_factory=BuildResult)

    def __post_init__(self) -> None:
        self.missing_keys = set(self.jobs)
        """Keys of entries that do not exist yet and have not failed."""

    def run(self) -> BuildResult:
        """Work on units of cache entries until every entry exists or has failed."""
        self._update_missing_keys()
        keys = list(self.jobs)
        # Small sets get smaller units, so that each process has some.
        size = max(1, min(MAX_JOBS_PER_UNIT, len(keys) // _MIN_UNITS))
        units = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
        while self.missing_keys:
            units = [unit for unit in units if not self.missing_keys.isdisjoint(unit)]
            if not sum(self._fill_cache_unit(unit) for unit in units):
                # Other processes hold all remaining units. If one is killed, its unit can be claimed next time.
                time.sleep(_POLL_INTERVAL_S)
                self._update_missing_keys()
        failed = self.result.failed
        # Sort the failures by job, since other processes added some of them.
        self.result.failed = {key: failed[key] for key in keys if key in failed}
        return self.result

    def _fill_cache_unit(self, unit: Sequence[str]) -> bool:
        """Create the missing entries of a cache unit; returns False if another process has it."""
        if self.missing_keys.isdisjoint(unit):
            return True
        # The name depends on the entries, so that other launches with the same jobs claim the same unit.
        name = xxhash.xxh3_64_hexdigest("".join(unit).encode())
        with _claim_cache_unit(self.cache, name) as is_ours:
            if is_ours:
                # Another process may have finished the unit before this one got its lock.
                self._update_missing_keys()
                self._encode_jobs([self.jobs[key] for key in unit if key in self.missing_keys])
            return is_ours

    def _update_missing_keys(self) -> None:
        self.missing_keys = set(self.cache.find_missing(list(self.missing_keys)))
        for note in (self.cache.root / LOCKS).glob(f"{self.launch_id}.*{FAILED}"):
            # The note's name is `<launch>.<key>.failed`.
            key = note.name.split(".")[1]
            if key in self.missing_keys:
                self._record_failure(key, note.read_text(encoding="utf-8"))
        self._report_progress()

    def _encode_jobs(self, jobs: Sequence[CacheJob]) -> None:
        entries: list[EncodedEntry] = []
        try:
            for job in jobs:
                try:
                    tensors = job.encode(self.load_encoder())
                    entries.append(encode_entry(job.key, tensors, sample=job.sample, facts=job.facts))
                except (ClipError, CacheError) as error:
                    # The launch's other processes read this file and do not try the sample again.
                    write_atomically(self.cache.root / LOCKS / f"{self.launch_id}.{job.key}{FAILED}", str(error))
                    self._record_failure(job.key, str(error))
                # Large entries are written early, to bound the memory.
                if sum(entry.layout.nbytes for entry in entries) >= MAX_UNIT_BYTES:
                    self._write_entries(entries)
                self._report_progress(len(entries))
        # Also write what is finished on an interrupt.
        finally:
            self._write_entries(entries)
            self._report_progress()

    def _write_entries(self, entries: list[EncodedEntry]) -> None:
        """Write encoded entries to the cache as a shard and clear the list, also if writing fails."""
        batch = entries.copy()
        entries.clear()
        if batch:
            self.cache.write_entries(batch)
            # Only now do these entries exist for other processes.
            self.missing_keys.difference_update(entry.key for entry in batch)
            self.result.num_written += len(batch)

    def _record_failure(self, key: str, message: str) -> None:
        self.result.failed[key] = message
        self.missing_keys.discard(key)

    def _report_progress(self, num_unwritten: int = 0) -> None:
        """Report how many cache entries exist or failed; `num_unwritten` are encoded but not written yet."""
        self.on_progress(len(self.jobs) - len(self.missing_keys) + num_unwritten, len(self.jobs))
