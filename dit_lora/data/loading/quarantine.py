"""The quarantine: samples that a run leaves out, from which epoch on."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

QUARANTINE = "quarantine.jsonl"
"""Name of the list in a run's folder."""


@dataclass(frozen=True)
class LeftOut:
    """One sample, with the first and last epoch that go without it."""

    sample_id: str
    from_epoch: int
    to_epoch: int | None
    """The last epoch without the sample; None if it never comes back."""
    step: int
    cause: str
    reason: str
    from_copy: int = 0
    """First copy in `from_epoch` that is left out; those before it have been trained on."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Tests that were run, with their results; empty where a fact was enough, as a NaN in the cache entry is."""

    def kept_in(self, epoch: int) -> int | None:
        """Return how many of the sample's copies stay in an epoch; None if this record leaves none out."""
        if epoch < self.from_epoch or (self.to_epoch is not None and epoch > self.to_epoch):
            return None
        return self.from_copy if epoch == self.from_epoch else 0

    def told(self) -> str:
        """Say which sample is out, how long, why, and on what evidence."""
        how_long = "for good" if self.to_epoch is None else f"to epoch {self.to_epoch}"
        line = f"{self.sample_id}: from epoch {self.from_epoch} {how_long}, since step {self.step}"
        facts = [f"{name}: {json.dumps(value)}" for name, value in self.evidence.items()]
        return "\n".join([line, f"  {self.cause}: {self.reason}", *(f"  {fact}" for fact in facts)])


def _record(values: object) -> LeftOut:
    if not isinstance(values, dict):
        raise TypeError(f"a line is an object; got {values!r}")
    record = LeftOut(**values)
    if not isinstance(record.sample_id, str):
        raise TypeError(f"sample_id is a name; got {record.sample_id!r}")
    if not isinstance(record.from_epoch, int) or not isinstance(record.to_epoch, int | None):
        raise TypeError(f"epochs are numbers; got {record.from_epoch!r} and {record.to_epoch!r}")
    if not isinstance(record.evidence, dict):
        raise TypeError(f"evidence is an object; got {record.evidence!r}")
    if not isinstance(record.from_copy, int):
        raise TypeError(f"from_copy is a number; got {record.from_copy!r}")
    return record


class Quarantine:
    """The samples that a run leaves out. Every rank holds equal records; the main process keeps them in `path`."""

    def __init__(self, path: Path, records: Iterable[LeftOut] = ()) -> None:
        self.path = path
        self.records: list[LeftOut] = []
        self.torn = 0
        """Number of lines that were passed over because a killed process left them incomplete."""
        self._by_sample: defaultdict[str, list[LeftOut]] = defaultdict(list)
        self.add(records)

    @classmethod
    def load(cls, path: Path) -> "Quarantine":
        """Return the records of a file; none if it is not there. Raises `DitLoraError` if it holds something else."""
        if not path.exists():
            return cls(path)
        try:
            # A write may end in the middle of a character; its line is then torn, and the other
            # lines still count.
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            quarantine = cls(path)
            for line in lines:
                try:
                    values = parse_json(line)
                except ValueError:
                    # It begins as a record: its end is missing, or the next is joined to it.
                    if not line.startswith("{"):
                        raise
                    quarantine.torn += 1
                    continue
                quarantine.add([_record(values)])
            return quarantine
        except (OSError, ValueError, TypeError) as error:
            raise DitLoraError(f"{path} is not a quarantine list: {error}") from error

    def save(self) -> None:
        write_whole(
            self.path, "".join(json.dumps(asdict(record)) + "\n" for record in self.records)
        )

    def add(self, records: Iterable[LeftOut]) -> None:
        for record in records:
            self.records.append(record)
            self._by_sample[record.sample_id].append(record)

    def release(self, samples: Iterable[str]) -> list[str]:
        """Take all records of these samples away and return their names; raise `DitLoraError` if a name has none."""
        wanted = list(dict.fromkeys(samples))
        unknown = [name for name in wanted if name not in self._by_sample]
        if unknown:
            names = sorted(self._by_sample) or ["none"]
            raise DitLoraError(
                f"{self.path} does not leave out {', '.join(unknown)}; it leaves out: {', '.join(names)}"
            )
        self.records = [record for record in self.records if record.sample_id not in wanted]
        for name in wanted:
            del self._by_sample[name]
        return wanted

    def of(self, sample_id: str) -> tuple[LeftOut, ...]:
        """Return the records of one sample."""
        return tuple(self._by_sample.get(sample_id, ()))

    def kept_in(self, sample_id: str, epoch: int) -> int | None:
        """Return how many of a sample's copies stay in an epoch; None if all do."""
        # Several records may name a sample: the strictest counts.
        limits = (record.kept_in(epoch) for record in self.of(sample_id))
        return min((number for number in limits if number is not None), default=None)

    def is_out(self, sample_id: str, epoch: int, copy: int = 0) -> bool:
        limit = self.kept_in(sample_id, epoch)
        return limit is not None and copy >= limit
