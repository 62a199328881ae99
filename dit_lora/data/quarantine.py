"""Samples that a run leaves out, from which epoch on."""

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
"""The list's name in a run's folder."""


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
    from_copy: int = 0
    """The first of its copies in `from_epoch` that is left out; those before it have been trained on."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What was run, and how it came out; empty where a fact was enough, as a NaN in its cache entry is."""

    def kept_in(self, epoch: int) -> int | None:
        """How many of its copies in an epoch stay; None where this record leaves none out."""
        if epoch < self.from_epoch or (self.to_epoch is not None and epoch > self.to_epoch):
            return None
        return self.from_copy if epoch == self.from_epoch else 0

    def told(self) -> str:
        """Say which sample is out, how long, why, and on what evidence."""
        how_long = "for good" if self.to_epoch is None else f"to epoch {self.to_epoch}"
        line = f"{self.sample_id}: from epoch {self.from_epoch} {how_long}, since step {self.step}"
        facts = [f"{name}: {json.dumps(value)}" for name, value in self.evidence.items()]
        return "\n".join([line, f"  {self.cause}: {self.reason}", *(f"  {fact}" for fact in facts)])


def _record(line: str) -> LeftOut:
    values = parse_json(line)
    if not isinstance(values, dict):
        raise TypeError(f"a line is an object; got {line!r}")
    one = LeftOut(**values)
    if not isinstance(one.sample_id, str):
        raise TypeError(f"sample_id is a name; got {one.sample_id!r}")
    if not isinstance(one.from_epoch, int) or not isinstance(one.to_epoch, int | None):
        raise TypeError(f"epochs are numbers; got {one.from_epoch!r} and {one.to_epoch!r}")
    if not isinstance(one.evidence, dict):
        raise TypeError(f"evidence is an object; got {one.evidence!r}")
    if not isinstance(one.from_copy, int):
        raise TypeError(f"from_copy is a number; got {one.from_copy!r}")
    return one


def _is_torn(line: str) -> bool:
    """Whether a line began as a record, and is none: its end is not there, or the next one's beginning is."""
    try:
        parse_json(line)
    except ValueError:
        return line.startswith("{")
    return False


class Quarantine:
    """What a run leaves out. Every rank holds equal records; the main process keeps them in `path`."""

    def __init__(self, path: Path, records: Iterable[LeftOut] = ()) -> None:
        self.path = path
        self.records: list[LeftOut] = []
        self.torn = 0
        """Lines that were passed over: a killed process left a part of them."""
        self._by_sample: defaultdict[str, list[LeftOut]] = defaultdict(list)
        self.add(records)

    @classmethod
    def load(cls, path: Path) -> "Quarantine":
        """The records of a file; none if it is not there."""
        if not path.exists():
            return cls(path)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            whole = [line for line in lines if not _is_torn(line)]
            held = cls(path, [_record(line) for line in whole])
            held.torn = len(lines) - len(whole)
            return held
        except (OSError, ValueError, TypeError) as error:
            raise DitLoraError(f"{path} is not a quarantine list: {error}") from error

    def save(self) -> None:
        write_whole(self.path, "".join(json.dumps(asdict(one)) + "\n" for one in self.records))

    def add(self, records: Iterable[LeftOut]) -> None:
        for one in records:
            self.records.append(one)
            self._by_sample[one.sample_id].append(one)

    def release(self, samples: Iterable[str]) -> list[str]:
        """Take all records of these samples away and return their names; raise `DitLoraError` if one has none."""
        wanted = list(dict.fromkeys(samples))
        unknown = [one for one in wanted if one not in self._by_sample]
        if unknown:
            names = sorted(self._by_sample) or ["none"]
            raise DitLoraError(
                f"{self.path} does not leave out {', '.join(unknown)}; it leaves out: {', '.join(names)}"
            )
        self.records = [one for one in self.records if one.sample_id not in wanted]
        for one in wanted:
            del self._by_sample[one]
        return wanted

    def of(self, sample_id: str) -> tuple[LeftOut, ...]:
        """The records of one sample."""
        return tuple(self._by_sample.get(sample_id, ()))

    def kept_in(self, sample_id: str, epoch: int) -> int | None:
        """How many of a sample's copies in an epoch stay; None for all."""
        kept = (one.kept_in(epoch) for one in self.of(sample_id))
        return min((number for number in kept if number is not None), default=None)

    def is_out(self, sample_id: str, epoch: int, copy: int = 0) -> bool:
        kept = self.kept_in(sample_id, epoch)
        return kept is not None and copy >= kept
