"""Samples that a run leaves out, from which epoch on, and the order of those that stay.

Leaving a sample out changes nothing of the order of the others, so a run that drops a sample where it first
meets it goes on exactly as a run that never had it.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole


@dataclass(frozen=True)
class LeftOut:
    """One sample and the epochs, first to last, that go without it."""

    sample_id: str
    from_epoch: int
    to_epoch: int | None
    """None for good."""
    step: int
    cause: str
    reason: str


def _record(line: str) -> LeftOut:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError(f"a line is an object; got {line!r}")
    one = LeftOut(**values)
    if not isinstance(one.sample_id, str):
        raise TypeError(f"sample_id is a name; got {one.sample_id!r}")
    if not isinstance(one.from_epoch, int) or not isinstance(one.to_epoch, int | None):
        raise TypeError(f"epochs are numbers; got {one.from_epoch!r} and {one.to_epoch!r}")
    return one


class Quarantine:
    """What a run leaves out. Every rank holds equal records; the main process keeps them in `path`."""

    def __init__(self, path: Path, records: Iterable[LeftOut] = ()) -> None:
        self.path = path
        self.records = list(records)

    @classmethod
    def load(cls, path: Path) -> "Quarantine":
        """The records of a file; none if it is not there."""
        if not path.exists():
            return cls(path)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return cls(path, [_record(line) for line in lines])
        except (OSError, ValueError, TypeError) as error:
            raise DitLoraError(f"{path} is not a quarantine list: {error}") from error

    def save(self) -> None:
        write_whole(self.path, "".join(json.dumps(asdict(one)) + "\n" for one in self.records))

    def add(self, records: Iterable[LeftOut]) -> None:
        self.records += records

    def is_out(self, sample_id: str, epoch: int) -> bool:
        return any(
            one.sample_id == sample_id
            and one.from_epoch <= epoch
            and (one.to_epoch is None or epoch <= one.to_epoch)
            for one in self.records
        )


class Order:
    """Which sample is at each position of a run: every epoch is a permutation of those that are not out.

    The permutation sorts by a hash of (seed, epoch, sample), so it depends on no other sample.
    """

    def __init__(self, ids: Sequence[str], *, seed: int, quarantine: Quarantine) -> None:
        self.ids = ids
        self.seed = seed
        self.quarantine = quarantine
        self._starts = [0]
        self._epoch: tuple[int, list[int]] = (-1, [])

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, index into `ids`) of a position; raises if an epoch has no sample left."""
        while self._starts[-1] <= position:
            self._starts.append(self._starts[-1] + len(self._members(len(self._starts) - 1)))
        # Positions only grow within a run: from the end, the epoch is found at once.
        epoch = next(e for e in range(len(self._starts) - 1, -1, -1) if self._starts[e] <= position)
        return epoch, self._members(epoch)[position - self._starts[epoch]]

    def forget(self) -> None:
        """Count the epochs anew, after the quarantine grew."""
        self._starts, self._epoch = [0], (-1, [])

    def _members(self, epoch: int) -> list[int]:
        if self._epoch[0] != epoch:
            stay = [i for i, one in enumerate(self.ids) if not self.quarantine.is_out(one, epoch)]
            if not stay:
                raise DitLoraError(
                    f"no sample is left: all {len(self.ids)} are in {self.quarantine.path}"
                )
            self._epoch = (epoch, sorted(stay, key=lambda index: self._key(epoch, index)))
        return self._epoch[1]

    def _key(self, epoch: int, index: int) -> bytes:
        text = f"{self.seed}/order/{epoch}/{self.ids[index]}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()
