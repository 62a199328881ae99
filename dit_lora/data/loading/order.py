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
from dit_lora.numerics.streams import fold

# Epoch that no run reaches; it stands for "never comes back".
_FOREVER = 2**40


class Draw(NamedTuple):
    """One occurrence of a sample in a run."""

    epoch: int
    copy: int
    """0 for the sample's first occurrence in its epoch, 1 for the second, ..."""
    sample: int
    """The sample's index into the order's `ids`."""


class Order:
    """Order of the samples at a run's positions; step s takes positions s * group .. s * group + group - 1.

    `buckets` gives each sample's bucket; samples of one step share a bucket (by default all samples do).
    `times` says how often each sample comes in an epoch, at least once: 2.5 means twice, and a third time in
    every other epoch. The permutation sorts by a hash of (seed, epoch, sample). Memory, and time to find any
    position, correspond to about two epochs.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        seed: int,
        quarantine: Quarantine,
        group: int = 1,
        buckets: Sequence[Hashable] | None = None,
        times: Sequence[float] | None = None,
    ) -> None:
        self.ids = ids
        self.seed = seed
        self.quarantine = quarantine
        self.group = group
        buckets = [None] * len(ids) if buckets is None else buckets
        # Buckets are numbered in the order in which they first occur.
        numbers = {bucket: number for number, bucket in enumerate(dict.fromkeys(buckets or [None]))}
        self._bucket = np.array([numbers[bucket] for bucket in buckets], np.int64)
        self.buckets = len(numbers)
        self._copies = _Copies.of(ids, times, seed)
        # Samples with a fractional number of times, which need a count of their own for each epoch.
        self._partial = np.flatnonzero(self._copies.share)
        # Draws of each bucket that come in every epoch, (buckets,).
        self._per_epoch = self._by_bucket(self._bucket, self._copies.whole)
        self.forget()

    def forget(self) -> None:
        """Compute the steps again, because samples were added to the quarantine."""
        self._lost: _Lost | None = None
        # First step and draws, (steps, group, 3), of the epoch that was used last.
        self._plan: tuple[int, np.ndarray] = (0, np.empty((0, self.group, 3), np.int64))

    def draw_at(self, position: int) -> Draw:
        """The draw at a position; raises `DitLoraError` if no sample is left for it."""
        step, index = divmod(position, self.group)
        first_step, steps = self._plan
        # Only the steps of one epoch are cached, since positions are requested almost in order.
        if not first_step <= step < first_step + len(steps):
            epoch = self._epoch_of(step)
            first_step, steps = self._plan = (self._steps_before(epoch), self._steps_of(epoch))
        return Draw(*steps[step - first_step, index].tolist())

    def _epoch_of(self, step: int) -> int:
        """The epoch in which a step's last sample comes."""
        # From the epoch after which the quarantine changes nothing, each remaining sample comes in every epoch.
        # Each step then needs at most `group` epochs, which bounds the search.
        latest_epoch = self._left_out().settled + (step + 1) * self.group
        epoch = bisect_right(range(latest_epoch + 1), step, key=self._steps_before) - 1
        if epoch == latest_epoch:
            raise DitLoraError(
                f"no sample is left: all {len(self.ids)} are in {self.quarantine.path}"
            )
        return epoch

    def _steps_before(self, epoch: int) -> int:
        """Number of complete steps before an epoch."""
        return int((self._counts(epoch) // self.group).sum())

    def _counts(self, epoch: int) -> np.ndarray:
        """Number of draws of each bucket before an epoch, int64 (buckets,), without those in quarantine."""
        partial = self._copies.extra_before(epoch, self._partial)
        # Whole copies are proportional to the epoch; the extra ones are added by sample.
        total = self._per_epoch * epoch + self._by_bucket(self._bucket[self._partial], partial)
        removed = self._left_out()
        if len(removed.index):
            # Draws that the quarantine removes do not fill steps.
            total -= self._by_bucket(
                self._bucket[removed.index], removed.before(epoch, self._copies)
            )
        return total

    def _by_bucket(self, buckets: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Sum of the counts in each bucket, int64 (buckets,)."""
        # bincount adds weights in float64, which holds integers up to 2^53 exactly.
        return np.bincount(buckets, weights=counts, minlength=self.buckets).astype(np.int64)

    def _left_out(self) -> "_Lost":
        """Draws that the quarantine removes, computed when first needed."""
        if self._lost is None:
            self._lost = _Lost.of(self.ids, self.quarantine)
        return self._lost

    def _steps_of(self, epoch: int) -> np.ndarray:
        """Draws of the steps that are completed in an epoch, int64 (steps, group, 3)."""
        # (N, 3): epoch, copy and index of each draw, in the order of the stream.
        draws = self._stream(epoch, np.arange(len(self.ids)))
        # Stable sort by bucket: within a bucket, draws keep the order of the stream.
        bucket_of_draw = self._bucket[draws[:, 2]]
        by_bucket = np.argsort(bucket_of_draw, kind="stable")
        borders = np.searchsorted(bucket_of_draw[by_bucket], np.arange(self.buckets + 1))
        # Number of draws that earlier epochs left in each queue.
        waiting = self._counts(epoch) % self.group
        steps, filled_at = [], []
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist())):
            # Draws of earlier epochs are at the head of the queue.
            members, ahead = by_bucket[begin:end], int(waiting[bucket])
            count = (ahead + len(members)) // self.group
            if count:
                queue = np.concatenate([self._queue(bucket, epoch, ahead), draws[members]])
                steps.append(queue[: count * self.group].reshape(count, self.group, 3))
                # Steps are ordered by when their last sample arrives in the stream.
                filled_at.append(members[self.group - ahead - 1 :: self.group])
        return np.concatenate(steps)[np.argsort(np.concatenate(filled_at))]

    def _queue(self, bucket: int, epoch: int, length: int) -> np.ndarray:
        """The last `length` draws of a bucket before an epoch, int64 (length, 3)."""
        if not length:
            return np.empty((0, 3), np.int64)
        members = np.flatnonzero(self._bucket == bucket)
        parts, missing = [], length
        # Go back epoch by epoch until enough draws are collected.
        while missing > 0:
            epoch -= 1
            draws = self._stream(epoch, members)
            parts.append(draws)
            missing -= len(draws)
            # The whole bucket is in quarantine for some epochs: continue with the latest epoch that has a draw of it.
            if not len(draws):
                until = self._counts(epoch)[bucket]
                epoch = bisect_left(
                    range(epoch), until, key=lambda earlier: self._counts(earlier)[bucket]
                )
        # The oldest epoch comes first.
        return np.concatenate(parts[::-1])[-length:]

    def _stream(self, epoch: int, members: np.ndarray) -> np.ndarray:
        """Draws of the samples `members` (ascending indices) in an epoch, in the epoch's order, int64 (N, 3)."""
        before = self._copies.before(epoch, members)
        counts = self._copies.before(epoch + 1, members) - before
        index = np.repeat(members, counts)
        # Copies of a sample are numbered from 0.
        copy = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = self._keys(epoch, index, copy)
        if len(index) > len(members):
            # Number the copies of each sample in the order in which they come.
            keys = keys[np.lexsort((keys, index))]
        # A stable sort, so that equal hashes have one order everywhere.
        order = np.argsort(keys, kind="stable")
        index, copy = index[order], copy[order]
        is_kept = copy < self._left_out().kept_in(epoch, len(self.ids))[index]
        draws = np.stack([np.full(len(index), epoch), copy, index], axis=1)
        return draws[is_kept]

    def _keys(self, epoch: int, index: np.ndarray, copy: np.ndarray) -> np.ndarray:
        """Sort keys of draws, uint64 (N,): hashes of seed, epoch, sample and copy."""
        hashed = hashlib.blake2b
        names = ["order", *(f"order+{number}" for number in range(1, int(copy.max(initial=0)) + 1))]
        # The first copy has the name that it has in data without repeats.
        starts = [f"{self.seed}/{name}/{epoch}/" for name in names]
        pairs = zip(copy.tolist(), index.tolist(), strict=True)
        ids = self.ids
        digests = (hashed((starts[c] + ids[i]).encode(), digest_size=8).digest() for c, i in pairs)
        # Always big-endian, so that the order is the same on every machine.
        return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


@dataclass(frozen=True)
class _Copies:
    """How often each sample comes: `whole` times in each epoch, and once more in a `share` of the epochs.

    The extra times are spread evenly, with a `phase` from a hash of (seed, sample), so that they can be counted
    by a formula.
    """

    whole: np.ndarray
    share: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[str], times: Sequence[float] | None, seed: int) -> "_Copies":
        """Copies of samples that come `times` times in an epoch; None means once. Raises `ValueError` below 1."""
        requested = np.ones(len(ids)) if times is None else np.asarray(times, np.float64)
        if not (np.isfinite(requested).all() and (requested >= 1).all()):
            raise ValueError(f"every sample comes at least once in an epoch; got {requested.min()}")
        whole_times = np.floor(requested)
        phase = np.zeros(len(ids))
        for index in np.flatnonzero(requested - whole_times).tolist():
            # fold gives 63 bits; float64 holds 53 of them. The result is uniform in [0, 1).
            phase[index] = (fold(seed, "times", ids[index]) >> 10) / 2**53
        return cls(whole_times.astype(np.int64), requested - whole_times, phase)

    def extra_before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Number of extra copies of each of these samples before an epoch."""
        # A share of 0.5 gives one extra copy in every second epoch, shifted by the phase.
        return np.floor(self.share[index] * epoch + self.phase[index]).astype(np.int64)

    def before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Number of copies of each of these samples before an epoch."""
        return self.whole[index] * epoch + self.extra_before(epoch, index)


@dataclass(frozen=True)
class _Lost:
    """Draws removed by the quarantine: in epochs start..end-1, sample `index` has only its first `kept` copies."""

    index: np.ndarray
    start: np.ndarray
    end: np.ndarray
    kept: np.ndarray
    settled: int
    """The epoch from which on nothing changes any more."""

    @classmethod
    def of(cls, ids: Sequence[str], quarantine: Quarantine) -> "_Lost":
        """Draws that the records of a quarantine remove."""
        rows, settled = [], 0
        for number, sample in enumerate(ids):
            edges: set[int] = set()
            for record in quarantine.of(sample):
                end = _FOREVER if record.to_epoch is None else record.to_epoch + 1
                # A record's first epoch may keep some copies, so it is a separate range.
                edges |= {record.from_epoch, record.from_epoch + 1, end}
            settled = max([settled, *(edge for edge in edges if edge < _FOREVER)])
            # Between two edges, the records that apply do not change.
            for start, end in pairwise(sorted(edges)):
                copies_left = quarantine.kept_in(sample, start)
                if copies_left is not None:
                    rows.append((number, start, end, copies_left))
        # Reshape, since the array of an empty list has no columns.
        index, starts, ends, copies = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(index, starts, ends, copies, settled)

    def before(self, epoch: int, copies: _Copies) -> np.ndarray:
        """Number of draws that each row removes before an epoch."""
        start, end = np.minimum(epoch, self.start), np.minimum(epoch, self.end)
        num_draws = copies.before(end, self.index) - copies.before(start, self.index)
        # Only rows of a single epoch keep copies, so `kept` is subtracted once.
        return np.maximum(0, num_draws - self.kept)

    def kept_in(self, epoch: int, samples: int) -> np.ndarray:
        """Number of copies of each sample that stay in an epoch; the largest integer if all do."""
        limits = np.full(samples, np.iinfo(np.int64).max)
        is_active = (self.start <= epoch) & (epoch < self.end)
        limits[self.index[is_active]] = self.kept[is_active]
        return limits
