"""Order of a run's samples: a function of the seed, the step and the samples' names alone.

Every epoch is a permutation of the samples, and the epochs follow one another as one stream. Each sample
joins the queue of its bucket; when a queue holds the samples of one step, they are the next step. What is
left in the queues waits for the next epoch. So a step has one bucket, every rank and worker computes the
same without asking the others, and with one bucket a step is just the next samples of the stream.

A sample's place depends on no other sample. Leaving one out from where it comes first changes no step
before that, so a run that drops a sample where it first meets it goes on exactly as a run that never had
it.
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

_FOREVER = 2**40  # epochs


class Draw(NamedTuple):
    """One occurrence of a sample in a run."""

    epoch: int
    copy: int
    """0 for the sample's first occurrence in its epoch, 1 for the second, ..."""
    sample: int
    """The sample's index into the order's `ids`."""


class Order:
    """Order of the samples at a run's positions; step s takes positions s * group .. s * group + group - 1.

    `buckets` says of each sample which others it may share a step with (by default all), `times` how often
    it comes in an epoch, at least once: 2.5 is twice, and a third time in every other epoch. The
    permutation sorts by a hash of (seed, epoch, sample). Memory and the time for any position are those of
    about two epochs.
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
        numbers = {bucket: number for number, bucket in enumerate(dict.fromkeys(buckets or [None]))}
        self._bucket = np.array([numbers[bucket] for bucket in buckets], np.int64)
        self.buckets = len(numbers)
        self._copies = _Copies.of(ids, times, seed)
        self._partial = np.flatnonzero(self._copies.share)
        self._per_epoch = self._by_bucket(self._bucket, self._copies.whole)
        self.forget()

    def forget(self) -> None:
        """Compute the steps anew, because the quarantine grew."""
        self._lost: _Lost | None = None
        self._plan: tuple[int, np.ndarray] = (0, np.empty((0, self.group, 3), np.int64))

    def draw_at(self, position: int) -> Draw:
        """Return the draw at a position; raises `DitLoraError` if no sample is left for it."""
        step, place = divmod(position, self.group)
        first, steps = self._plan
        # Only the steps of one epoch are kept, since positions are asked for nearly in order.
        if not first <= step < first + len(steps):
            epoch = self._epoch_of(step)
            first, steps = self._plan = (self._steps_before(epoch), self._steps_of(epoch))
        return Draw(*steps[step - first, place].tolist())

    def _epoch_of(self, step: int) -> int:
        """Return the epoch in which a step's last sample comes."""
        # After the last change of the quarantine, a sample that stays comes in every epoch.
        last = self._left_out().settled + (step + 1) * self.group
        epoch = bisect_right(range(last + 1), step, key=self._steps_before) - 1
        if epoch == last:
            raise DitLoraError(
                f"no sample is left: all {len(self.ids)} are in {self.quarantine.path}"
            )
        return epoch

    def _steps_before(self, epoch: int) -> int:
        return int((self._counts(epoch) // self.group).sum())

    def _counts(self, epoch: int) -> np.ndarray:
        """Return the number of samples of each bucket, copies counted, that come before an epoch."""
        partial = self._copies.extra_before(epoch, self._partial)
        total = self._per_epoch * epoch + self._by_bucket(self._bucket[self._partial], partial)
        lost = self._left_out()
        if len(lost.index):
            total -= self._by_bucket(self._bucket[lost.index], lost.before(epoch, self._copies))
        return total

    def _by_bucket(self, buckets: np.ndarray, counts: np.ndarray) -> np.ndarray:
        # bincount adds weights in float64, which holds integers up to 2^53 exactly.
        return np.bincount(buckets, weights=counts, minlength=self.buckets).astype(np.int64)

    def _left_out(self) -> "_Lost":
        if self._lost is None:
            self._lost = _Lost.of(self.ids, self.quarantine)
        return self._lost

    def _steps_of(self, epoch: int) -> np.ndarray:
        """Return the draws of the steps that an epoch fills, int64 (steps, group, 3)."""
        draws = self._stream(epoch, np.arange(len(self.ids)))
        arrived = self._bucket[draws[:, 2]]
        by_bucket = np.argsort(arrived, kind="stable")
        borders = np.searchsorted(arrived[by_bucket], np.arange(self.buckets + 1))
        # Earlier epochs left so many draws in each queue.
        waiting = self._counts(epoch) % self.group
        steps, filled_at = [], []
        for bucket, (first, last) in enumerate(pairwise(borders.tolist())):
            places, ahead = by_bucket[first:last], int(waiting[bucket])
            count = (ahead + len(places)) // self.group
            if count:
                queue = np.concatenate([self._queue(bucket, epoch, ahead), draws[places]])
                steps.append(queue[: count * self.group].reshape(count, self.group, 3))
                # A step takes its turn where its last sample arrives in the stream.
                filled_at.append(places[self.group - ahead - 1 :: self.group])
        return np.concatenate(steps)[np.argsort(np.concatenate(filled_at))]

    def _queue(self, bucket: int, epoch: int, length: int) -> np.ndarray:
        """Return the last `length` draws of a bucket before an epoch, int64 (length, 3)."""
        if not length:
            return np.empty((0, 3), np.int64)
        members = np.flatnonzero(self._bucket == bucket)
        parts, missing = [], length
        while missing > 0:
            epoch -= 1
            draws = self._stream(epoch, members)
            parts.append(draws)
            missing -= len(draws)
            # The whole bucket is left out for some epochs: go on before the latest epoch that has any of it.
            if not len(draws):
                until = self._counts(epoch)[bucket]
                epoch = bisect_left(
                    range(epoch), until, key=lambda earlier: self._counts(earlier)[bucket]
                )
        return np.concatenate(parts[::-1])[-length:]

    def _stream(self, epoch: int, members: np.ndarray) -> np.ndarray:
        """Return the draws of an epoch of the samples `members` (ascending) in their order, int64 (N, 3)."""
        before = self._copies.before(epoch, members)
        counts = self._copies.before(epoch + 1, members) - before
        index = np.repeat(members, counts)
        # Copies of a sample count from 0.
        copy = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = self._keys(epoch, index, copy)
        if len(index) > len(members):
            # Copies are numbered in the order in which they come.
            keys = keys[np.lexsort((keys, index))]
        order = np.argsort(keys, kind="stable")
        index, copy = index[order], copy[order]
        stays = copy < self._left_out().kept_in(epoch, len(self.ids))[index]
        draws = np.stack([np.full(len(index), epoch), copy, index], axis=1)
        return draws[stays]

    def _keys(self, epoch: int, index: np.ndarray, copy: np.ndarray) -> np.ndarray:
        hashed = hashlib.blake2b
        names = ["order", *(f"order+{number}" for number in range(1, int(copy.max(initial=0)) + 1))]
        starts = [f"{self.seed}/{name}/{epoch}/" for name in names]
        pairs = zip(copy.tolist(), index.tolist(), strict=True)
        ids = self.ids
        digests = (hashed((starts[c] + ids[i]).encode(), digest_size=8).digest() for c, i in pairs)
        # Big-endian on every machine, so that the order is the same.
        return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


@dataclass(frozen=True)
class _Copies:
    """Numbers of times that each sample comes: `whole` times an epoch, and once more in a `share` of the epochs.

    The extra times are spread evenly, from a hash of (seed, sample) on, so that counting them needs no walk.
    """

    whole: np.ndarray
    share: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[str], times: Sequence[float] | None, seed: int) -> "_Copies":
        asked = np.ones(len(ids)) if times is None else np.asarray(times, np.float64)
        if not (np.isfinite(asked).all() and (asked >= 1).all()):
            raise ValueError(f"every sample comes at least once in an epoch; got {asked.min()}")
        whole = np.floor(asked)
        phase = np.zeros(len(ids))
        for index in np.flatnonzero(asked - whole).tolist():
            # fold gives 63 bits, of which float64 holds 53: this is uniform in [0, 1).
            phase[index] = (fold(seed, "times", ids[index]) >> 10) / 2**53
        return cls(whole.astype(np.int64), asked - whole, phase)

    def extra_before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.floor(self.share[index] * epoch + self.phase[index]).astype(np.int64)

    def before(self, epoch: int | np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return how often each of these samples comes before an epoch."""
        return self.whole[index] * epoch + self.extra_before(epoch, index)


@dataclass(frozen=True)
class _Lost:
    """Draws that the quarantine takes away: sample `index` has `kept` copies left in each of epochs start..end-1."""

    index: np.ndarray
    start: np.ndarray
    end: np.ndarray
    kept: np.ndarray
    settled: int
    """The epoch after which nothing changes."""

    @classmethod
    def of(cls, ids: Sequence[str], quarantine: Quarantine) -> "_Lost":
        rows, settled = [], 0
        for number, sample in enumerate(ids):
            edges: set[int] = set()
            for record in quarantine.of(sample):
                end = _FOREVER if record.to_epoch is None else record.to_epoch + 1
                # A record's first epoch may keep some copies, so it is a stretch of its own.
                edges |= {record.from_epoch, record.from_epoch + 1, end}
            settled = max([settled, *(edge for edge in edges if edge < _FOREVER)])
            for start, end in pairwise(sorted(edges)):
                copies_left = quarantine.kept_in(sample, start)
                if copies_left is not None:
                    rows.append((number, start, end, copies_left))
        # Reshaped, since an empty list has no columns.
        index, starts, ends, left = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(index, starts, ends, left, settled)

    def before(self, epoch: int, copies: _Copies) -> np.ndarray:
        """Return how many draws each row takes away before an epoch."""
        start, end = np.minimum(epoch, self.start), np.minimum(epoch, self.end)
        there = copies.before(end, self.index) - copies.before(start, self.index)
        # Only rows of a single epoch keep copies, so `kept` counts once.
        return np.maximum(0, there - self.kept)

    def kept_in(self, epoch: int, samples: int) -> np.ndarray:
        """Return how many copies of each sample stay in an epoch; the largest integer where all do."""
        limits = np.full(samples, np.iinfo(np.int64).max)
        now = (self.start <= epoch) & (epoch < self.end)
        limits[self.index[now]] = self.kept[now]
        return limits
