"""The quarantine: samples that a run leaves out, and in which epochs.

It lists quarantined samples, which are left out permanently, and skipped ones, which return in the next epoch.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from dit_lora.config.records import Count, validate_value
from dit_lora.errors import DitLoraError
from dit_lora.files import read_json_lines, write_atomically
from dit_lora.parsing import ParseError

QUARANTINE_FILE = "quarantine.jsonl"
"""File name of the list in a run's folder."""


@dataclass(frozen=True)
class QuarantineRecord:
    """One sample that is left out of training, with the first and last epoch without it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sample_id: str
    from_epoch: Count
    to_epoch: Count | None
    """The last epoch without the sample; None if it never comes back."""
    step: Count
    cause: str
    reason: str
    from_copy: Count = 0
    """First copy in `from_epoch` that is left out; earlier copies have been trained on."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Results of the tests that were run; empty if the cause was evident, such as NaN in a cache entry."""

    def count_kept_copies(self, epoch: int) -> int | None:
        """Number of a sample's copies that this record leaves in an epoch; None if it removes none."""
        if epoch < self.from_epoch or (self.to_epoch is not None and epoch > self.to_epoch):
            return None
        # In its first epoch, copies before the failed one were trained on already.
        return self.from_copy if epoch == self.from_epoch else 0

    def describe(self) -> str:
        """Describe for users which sample is left out, for how long, why, and on what evidence."""
        duration = "on" if self.to_epoch is None else f"to epoch {self.to_epoch}"
        line = f"{self.sample_id}: from epoch {self.from_epoch} {duration}, since step {self.step}"
        facts = [f"{name}: {json.dumps(value)}" for name, value in self.evidence.items()]
        return "\n".join([line, f"  {self.cause}: {self.reason}", *(f"  {fact}" for fact in facts)])


class Quarantine:
    """Samples that a run leaves out of training.

    Every rank holds equal records; the main process stores them in `path`.
    """

    def __init__(self, path: Path, records: Iterable[QuarantineRecord] = ()) -> None:
        self.path = path
        self.records: list[QuarantineRecord] = []
        self.num_torn_lines = 0
        """Number of skipped lines, which a killed process left incomplete."""
        self._by_sample: defaultdict[str, list[QuarantineRecord]] = defaultdict(list)
        self.add(records)

    @classmethod
    def load(cls, path: Path) -> "Quarantine":
        """Read the quarantine of a run from a file; empty if it does not exist.

        Raises `DitLoraError` for other contents.
        """
        try:
            lines = read_json_lines(path, follow_links=True)
            # A torn line begins like a record: its end is missing, or the next record is joined to it.
            foreign = next((line for line in lines.damaged if not line.startswith(b"{")), None)
            if foreign is not None:
                raise ParseError(f"it has the line {foreign.decode(errors='replace')!r}")
            # A complete line that does not fit is an error, and is not skipped.
            quarantine = cls(path, validate_value(lines.objects, list[QuarantineRecord], "it"))
        except (OSError, ParseError) as error:
            raise DitLoraError(f"{path} is not a quarantine list: {error}") from error
        quarantine.num_torn_lines = len(lines.damaged)
        return quarantine

    def save(self) -> None:
        """Write all records of left-out samples atomically."""
        write_atomically(self.path, "".join(json.dumps(asdict(record)) + "\n" for record in self.records))

    def add(self, records: Iterable[QuarantineRecord]) -> None:
        for record in records:
            self.records.append(record)
            self._by_sample[record.sample_id].append(record)

    def release(self, sample_ids: Iterable[str]) -> list[str]:
        """Put these samples back into training: removes their records and returns their names.

        Raises `DitLoraError` if one has no records.
        """
        names_to_release = list(dict.fromkeys(sample_ids))
        unknown = [name for name in names_to_release if name not in self._by_sample]
        if unknown:
            names = sorted(self._by_sample) or ["none"]
            raise DitLoraError(
                f"{self.path} has no entry for {', '.join(unknown)}; its entries are: {', '.join(names)}"
            )
        self.records = [record for record in self.records if record.sample_id not in names_to_release]
        for name in names_to_release:
            del self._by_sample[name]
        return names_to_release

    def get_records(self, sample_id: str) -> tuple[QuarantineRecord, ...]:
        """Records that leave this sample out of training."""
        return tuple(self._by_sample.get(sample_id, ()))

    def count_kept_copies(self, sample_id: str, epoch: int) -> int | None:
        """Number of a sample's copies that stay in an epoch; None if all do."""
        # If several records name the sample, the strictest counts.
        limits = (record.count_kept_copies(epoch) for record in self.get_records(sample_id))
        return min((number for number in limits if number is not None), default=None)

    def is_copy_quarantined(self, sample_id: str, epoch: int, copy: int = 0) -> bool:
        """True if this copy of a sample is left out of training in an epoch."""
        limit = self.count_kept_copies(sample_id, epoch)
        return limit is not None and copy >= limit
