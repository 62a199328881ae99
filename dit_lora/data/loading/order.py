"""Order of a run's samples, which depends only on the seed, the step and the samples' names.

Every epoch is a permutation of the samples, and the epochs form one continuous stream. Each sample joins the
queue of its bucket. When a queue holds the samples of one step, they become the next step. Samples left in the
queues wait for the next epoch. So a step has one bucket, and every rank and worker computes the same order
without communication. With a single bucket, a step is simply the next samples of the stream.

A sample's position depends on no other sample. Leaving one out from its first occurrence changes no earlier
step. A run that drops a sample when it first meets it continues exactly like a run that never had it.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.errors import DitLoraError
from dit_lora.numerics.streams import derive_seed

# Epoch that no run reaches; it stands for "never comes back".
_MAX_EPOCH = 2**40


class SampleOccurrence(NamedTuple):
    """One use of a sample in a run: the epoch, the copy within the epoch, and the sample's index."""

    epoch: int
    copy: int
    """0 for the sample's first occurrence in its epoch, 1 for the second, ..."""
    sample_index: int
    """The sample's index into the order's `ids`."""


class SampleOrder:
    """Order of the samples in a run; step s takes positions s * group .. s * group + group - 1.

    `buckets` gives each sample's bucket; samples of one step share a bucket (by default all samples do).
    `times_per_epoch` says how often each sample comes in an epoch, at least once: 2.5 means twice, and a third time in
    every other epoch. The permutation sorts by a hash of (seed, epoch, sample). Memory, and time to find any
    position, correspond to about two epochs.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        seed: int,
        quarantine: Quarantine,
        samples_per_step: int = 1,
        buckets: Sequence[Hashable] | None = None,
        times_per_epoch: Sequence[float] | None = None,
    ) -> None:
        self.ids = ids
        self.seed = seed
        self.quarantine = quarantine
        self.samples_per_step = samples_per_step
        buckets = [None] * len(ids) if buckets is None else buckets
        # Buckets are numbered in the order in which they first occur.
        numbers = {bucket: number for number, bucket in enumerate(dict.fromkeys(buckets or [None]))}
        self._bucket_indices = np.array([numbers[bucket] for bucket in buckets], np.int64)
        self.num_buckets = len(numbers)
        self._copies = _SampleCopies.from_times(ids, times_per_epoch, seed)
        # Samples with a fractional number of times, which need a count of their own for each epoch.
        self._fractional_samples = np.flatnonzero(self._copies.extra_share)
        # Draws of each bucket that come in every epoch, (buckets,).
        self._counts_per_epoch = self._sum_by_bucket(self._bucket_indices, self._copies.num_whole)
        self.reset()

    def reset(self) -> None:
        """Discard the computed order, because samples were added to the quarantine."""
        self._removed: _RemovedUses | None = None
        # First step and draws, (steps, group, 3), of the epoch that was used last.
        self._cached_steps: tuple[int, np.ndarray] = (0, np.empty((0, self.samples_per_step, 3), np.int64))

    def get_occurrence(self, position: int) -> SampleOccurrence:
        """Sample at a position of the run; raises `DitLoraError` if no sample is left for it."""
        step, index = divmod(position, self.samples_per_step)
        first_step, steps = self._cached_steps
        # Only the steps of one epoch are cached, since positions are requested almost in order.
        if not first_step <= step < first_step + len(steps):
            epoch = self._find_epoch(step)
            first_step, steps = self._cached_steps = (self._count_steps_before(epoch), self._list_steps(epoch))
        return SampleOccurrence(*steps[step - first_step, index].tolist())

    def _find_epoch(self, step: int) -> int:
        """Epoch to which the last sample of a step belongs."""
        # From the epoch after which the quarantine changes nothing, each remaining sample comes in every epoch.
        # Each step then needs at most `samples_per_step` epochs, which bounds the search.
        latest_epoch = self._get_removed().stable_epoch + (step + 1) * self.samples_per_step
        epoch = bisect_right(range(latest_epoch + 1), step, key=self._count_steps_before) - 1
        if epoch == latest_epoch:
            raise DitLoraError(
                f"no sample is left: all {len(self.ids)} are in {self.quarantine.path}; release some with "
                "dit-lora quarantine"
            )
        return epoch

    def _count_steps_before(self, epoch: int) -> int:
        return int((self._count_draws_before(epoch) // self.samples_per_step).sum())

    def _count_draws_before(self, epoch: int) -> np.ndarray:
        """Number of samples of each bucket that come before an epoch, int64 (buckets,), without left-out ones."""
        partial = self._copies.count_extra_copies_before(epoch, self._fractional_samples)
        # Whole copies are proportional to the epoch; the extra ones are added by sample.
        total = self._counts_per_epoch * epoch + self._sum_by_bucket(
            self._bucket_indices[self._fractional_samples], partial
        )
        removed = self._get_removed()
        if len(removed.sample_index):
            # Draws that the quarantine removes do not fill steps.
            total -= self._sum_by_bucket(
                self._bucket_indices[removed.sample_index], removed.count_uses_before(epoch, self._copies)
            )
        return total

    def _sum_by_bucket(self, buckets: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Sum counts of samples by bucket, int64 (buckets,)."""
        # bincount adds weights in float64, which holds integers up to 2^53 exactly.
        return np.bincount(buckets, weights=counts, minlength=self.num_buckets).astype(np.int64)

    def _get_removed(self) -> "_RemovedUses":
        if self._removed is None:
            self._removed = _RemovedUses.from_quarantine(self.ids, self.quarantine)
        return self._removed

    def _list_steps(self, epoch: int) -> np.ndarray:
        """Samples of all steps that are completed in an epoch, int64 (steps, group, 3): epoch, copy, index."""
        # (N, 3): epoch, copy and index of each draw, in the order of the stream.
        draws = self._list_draws(epoch, np.arange(len(self.ids)))
        # Stable sort by bucket: within a bucket, draws keep the order of the stream.
        bucket_of_draw = self._bucket_indices[draws[:, 2]]
        by_bucket = np.argsort(bucket_of_draw, kind="stable")
        borders = np.searchsorted(bucket_of_draw[by_bucket], np.arange(self.num_buckets + 1))
        # Number of draws that earlier epochs left in each queue.
        waiting = self._count_draws_before(epoch) % self.samples_per_step
        steps, filled_at = [], []
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist())):
            # Draws of earlier epochs are at the head of the queue.
            members, ahead = by_bucket[begin:end], int(waiting[bucket])
            count = (ahead + len(members)) // self.samples_per_step
            if count:
                queue = np.concatenate([self._rebuild_queue(bucket, epoch, ahead), draws[members]])
                steps.append(queue[: count * self.samples_per_step].reshape(count, self.samples_per_step, 3))
                # Steps are ordered by when their last sample arrives in the stream.
                filled_at.append(members[self.samples_per_step - ahead - 1 :: self.samples_per_step])
        return np.concatenate(steps)[np.argsort(np.concatenate(filled_at))]

    def _rebuild_queue(self, bucket: int, epoch: int, length: int) -> np.ndarray:
        """Last `length` samples of a bucket before an epoch, int64 (length, 3): epoch, copy, index."""
        if not length:
            return np.empty((0, 3), np.int64)
        members = np.flatnonzero(self._bucket_indices == bucket)
        parts, missing = [], length
        while missing > 0:
            epoch -= 1
            draws = self._list_draws(epoch, members)
            parts.append(draws)
            missing -= len(draws)
            # The whole bucket is in quarantine for some epochs: continue with the latest epoch that has a draw of it.
            if not len(draws):
                until = self._count_draws_before(epoch)[bucket]
                epoch = bisect_left(range(epoch), until, key=lambda earlier: self._count_draws_before(earlier)[bucket])
        return np.concatenate(parts[::-1])[-length:]

    def _list_draws(self, epoch: int, members: np.ndarray) -> np.ndarray:
        """Order of the samples `members` (ascending indices) in an epoch, int64 (N, 3): epoch, copy, index."""
        before = self._copies.count_uses_before(epoch, members)
        counts = self._copies.count_uses_before(epoch + 1, members) - before
        index = np.repeat(members, counts)
        # Copies of a sample are numbered from 0.
        copy = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = self._compute_sort_keys(epoch, index, copy)
        if len(index) > len(members):
            # Number the copies of each sample in the order in which they come.
            keys = keys[np.lexsort((keys, index))]
        # A stable sort, so that equal hashes have one order everywhere.
        order = np.argsort(keys, kind="stable")
        index, copy = index[order], copy[order]
        is_kept = copy < self._get_removed().count_remaining_copies(epoch, len(self.ids))[index]
        draws = np.stack([np.full(len(index), epoch), copy, index], axis=1)
        return draws[is_kept]

    def _compute_sort_keys(self, epoch: int, index: np.ndarray, copy: np.ndarray) -> np.ndarray:
        """Sort keys that shuffle the samples of an epoch, uint64 (N,): hashes of seed, epoch, sample and copy."""
        names = ["order", *(f"order+{number}" for number in range(1, int(copy.max(initial=0)) + 1))]
        # The first copy has the name that it has in data without repeats.
        starts = [f"{self.seed}/{name}/{epoch}/" for name in names]
        pairs = zip(copy.tolist(), index.tolist(), strict=True)
        ids = self.ids
        digests = (hashlib.blake2b((starts[c] + ids[i]).encode(), digest_size=8).digest() for c, i in pairs)
        # Always big-endian, so that the order is the same on every machine.
        return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


@dataclass(frozen=True)
class _SampleCopies:
    """How often each sample comes: `num_whole` times in each epoch, and once more in `extra_share` of the epochs.

    The extra times are spread evenly, with a `phase` from a hash of (seed, sample), so that a formula counts them.
    """

    num_whole: np.ndarray
    extra_share: np.ndarray
    phase: np.ndarray

    @classmethod
    def from_times(cls, ids: Sequence[str], times_per_epoch: Sequence[float] | None, seed: int) -> "_SampleCopies":
        """Compute how often samples come from `times_per_epoch`; None means once. Raises `ValueError` below 1."""
        requested = np.ones(len(ids)) if times_per_epoch is None else np.asarray(times_per_epoch, np.float64)
        if not (np.isfinite(requested).all() and (requested >= 1).all()):
            raise ValueError(f"every sample comes at least once in an epoch; got {requested.min()}")
        whole_times = np.floor(requested)
        phase = np.zeros(len(ids))
        for index in np.flatnonzero(requested - whole_times).tolist():
            # fold gives 63 bits; float64 holds 53 of them. The result is uniform in [0, 1).
            phase[index] = (derive_seed(seed, "times", ids[index]) >> 10) / 2**53
        return cls(whole_times.astype(np.int64), requested - whole_times, phase)

    def count_extra_copies_before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Number of extra copies of each of these samples in all epochs before this one."""
        # A share of 0.5 gives one extra copy in every second epoch, shifted by the phase.
        return np.floor(self.extra_share[index] * epoch + self.phase[index]).astype(np.int64)

    def count_uses_before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Number of times that each of these samples came in all epochs before this one."""
        return self.num_whole[index] * epoch + self.count_extra_copies_before(epoch, index)


@dataclass(frozen=True)
class _RemovedUses:
    """Uses of samples removed by the quarantine: in epochs start..end-1, only the first `num_kept` copies stay."""

    sample_index: np.ndarray
    start_epoch: np.ndarray
    end_epoch: np.ndarray
    num_kept: np.ndarray
    stable_epoch: int
    """The epoch from which on nothing changes any more."""

    @classmethod
    def from_quarantine(cls, ids: Sequence[str], quarantine: Quarantine) -> "_RemovedUses":
        rows, settled = [], 0
        for number, sample in enumerate(ids):
            edges: set[int] = set()
            for record in quarantine.get_records(sample):
                end = _MAX_EPOCH if record.to_epoch is None else record.to_epoch + 1
                # A record's first epoch may keep some copies, so it is a separate range.
                edges |= {record.from_epoch, record.from_epoch + 1, end}
            settled = max([settled, *(edge for edge in edges if edge < _MAX_EPOCH)])
            # Between two edges, the records that apply do not change.
            for start, end in pairwise(sorted(edges)):
                copies_left = quarantine.count_kept_copies(sample, start)
                if copies_left is not None:
                    rows.append((number, start, end, copies_left))
        # Reshape, since the array of an empty list has no columns.
        index, starts, ends, copies = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(index, starts, ends, copies, settled)

    def count_uses_before(self, epoch: int, copies: _SampleCopies) -> np.ndarray:
        """Number of uses that each quarantine record removes before an epoch."""
        start, end = np.minimum(epoch, self.start_epoch), np.minimum(epoch, self.end_epoch)
        num_draws = copies.count_uses_before(end, self.sample_index) - copies.count_uses_before(
            start, self.sample_index
        )
        # Only rows of a single epoch keep copies, so `num_kept` is subtracted once.
        return np.maximum(0, num_draws - self.num_kept)

    def count_remaining_copies(self, epoch: int, num_samples: int) -> np.ndarray:
        """Number of copies of each sample that the quarantine leaves in an epoch; the largest integer if all stay."""
        limits = np.full(num_samples, np.iinfo(np.int64).max)
        is_active = (self.start_epoch <= epoch) & (epoch < self.end_epoch)
        limits[self.sample_index[is_active]] = self.num_kept[is_active]
        return limits
