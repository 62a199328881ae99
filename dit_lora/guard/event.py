"""A line of events.jsonl, which a run and the plugin write alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dit_lora.guard.verdict import Cause, Verdict


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl: what was seen at a step, and what was done about it."""

    step: int
    kind: str
    """The kind of trip, or the check that saw it."""
    verdict: Mapping[str, Any]
    """A `Verdict` as a record; at the least its cause and words."""
    action: str = "report"
    micro_step: int | None = None
    rank: int = 0
    sample_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the line, such as `bundle`: the folder that `dit-lora replay` takes, below the run's own."""

    @property
    def words(self) -> str:
        return str(self.verdict["words"])

    def record(self) -> dict[str, Any]:
        """Return the line, as plain values."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "kind": self.kind,
            "sample_ids": list(self.sample_ids),
            "verdict": dict(self.verdict),
            "action": self.action,
            "seconds": round(self.seconds, 3),
            **self.facts,
        }


def event_of(
    step: int,
    kind: str,
    verdict: Verdict,
    action: str,
    seconds: float,
    facts: Mapping[str, Any] | None = None,
) -> Event:
    """Make the event of a verdict on a step that tripped."""
    return Event(
        step,
        kind,
        verdict.record(),
        action,
        verdict.micro_step,
        verdict.rank,
        verdict.sample_ids,
        seconds,
        facts=facts or {},
    )


def kernel_event(
    step: int,
    kind: str,
    words: str,
    switch: str,
    *,
    module: str = "",
    cause: Cause = "kernel",
    action: str = "fallback",
    rank: int = 0,
    seconds: float = 0.0,
) -> Event:
    """Make the event of a kernel or backend that a comparison found wrong, or did not reach."""
    verdict = {"cause": cause, "words": words, "switch": switch, "module": module}
    return Event(step, kind, verdict, action, rank=rank, seconds=seconds)
