"""A line of events.jsonl, written both by a run and by the guard of other loops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dit_lora.errors import join_first
from dit_lora.guard.diagnosis import Cause, Diagnosis


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl: what was observed at a step, and the action taken."""

    step: int
    kind: str
    """The kind of failure, or the check that reported it."""
    verdict: Mapping[str, Any]
    """A `Diagnosis` as a dict, under the name that it has in events.jsonl; contains at least `cause` and `words`."""
    action: str = "report"
    micro_step: int | None = None
    rank: int = 0
    sample_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the line, such as `bundle`: a folder for `dit-lora replay`, relative to the run's folder."""

    @property
    def message(self) -> str:
        return str(self.verdict["words"])

    def to_record(self) -> dict[str, Any]:
        """Convert an event to a dict of plain values, for a line of events.jsonl."""
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


def make_event(
    step: int, kind: str, diagnosis: Diagnosis, action: str, seconds: float, facts: Mapping[str, Any] | None = None
) -> Event:
    """Create the event for the diagnosis of a failed step."""
    return Event(
        step,
        kind,
        diagnosis.to_record(),
        action,
        diagnosis.micro_step,
        diagnosis.rank,
        diagnosis.sample_ids,
        seconds,
        facts=facts or {},
    )


def make_kernel_event(
    step: int,
    kind: str,
    message: str,
    fallback: str,
    *,
    module: str = "",
    cause: Cause = "kernel",
    action: str = "fallback",
    rank: int = 0,
    seconds: float = 0.0,
) -> Event:
    """Create the event for a kernel or backend that a comparison found wrong, or did not reach."""
    diagnosis = {"cause": cause, "words": message, "switch": fallback, "module": module}
    return Event(step, kind, diagnosis, action, rank=rank, seconds=seconds)


def make_observation_event(
    step: int, kind: str, message: str, *, cause: Cause = "unknown", module: str | None = None
) -> Event:
    """Create the event for something unusual in a healthy step, on which no action is taken."""
    return Event(step, kind, {"cause": cause, "words": message, **({"module": module} if module is not None else {})})


def make_hidden_infinity_event(step: int, modules: Sequence[str]) -> Event:
    """Create the event for modules whose output overflowed although the loss is finite: a clamp or a mask hides it."""
    message = f"the loss is finite, but the output of {join_first(modules, 5)} is not: something hides it"
    return make_observation_event(step, "hidden_infinity", message, cause="precision", module=modules[0])
