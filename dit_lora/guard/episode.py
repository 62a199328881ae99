"""Handle one failed step in any loop: diagnose, agree on all ranks, act, record and log.

A loop implements a subclass: how it diagnoses, and which actions it can take. Every rank makes the same calls.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dit_lora.errors import listed
from dit_lora.guard.event import Event, event_of
from dit_lora.guard.gate import NonFiniteError
from dit_lora.guard.policy import Action
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.ranks import gather_object

# Kinds of failure in which the state itself is bad: no micro-batch is replayed for them.
OF_WEIGHTS = (
    "non_finite_weights",
    "diverged_weights",
    "altered_state",
    "diverged_averages",
    "ranks_differ",
)
# Causes for which every rank fails in the same way, and no sample is the cause.
OF_STATE = ("weights", "optimizer", "learning_rate")


class Tripped(Protocol):
    """The properties of a failed step that every loop provides."""

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> str: ...


TripT = TypeVar("TripT", bound=Tripped)
SourceT = TypeVar("SourceT")
"""The object that a loop diagnoses: a micro-batch, or a model call."""


@dataclass(frozen=True)
class Found(Generic[SourceT]):
    """A verdict of one rank, and the object that it is about."""

    verdict: Verdict
    source: SourceT | None = None
    """The object that a bundle is written from; None if the verdict is not about a micro-batch."""


@dataclass(frozen=True)
class Capabilities:
    """The actions that a loop supports after a failed step, in addition to skipping and rolling back."""

    takes_again: bool
    """True if it can repeat the step, unchanged or without a sample."""
    leaves_out: bool
    """True if it can exclude a sample permanently."""

    def within(self, action: Action) -> Action:
        """The action, or a skip that replaces it if the loop does not support it."""
        # An action that this kind of loop cannot take becomes a skip.
        is_unsupported = {"retry": not self.takes_again, "quarantine": not self.leaves_out}
        if not is_unsupported.get(action.kind):
            return action
        return replace(action, kind="skip", instead_of=action.kind)


@dataclass(frozen=True)
class Resolved:
    """The action taken on a failed step."""

    action: Action
    done: str = ""
    """Description of the action, appended to the step and its kind in the message."""
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the events."""
    target: int | None = None
    """The step whose state the loop continues from; None if the state was not restored."""
    is_news: bool = True


class Episode(ABC, Generic[TripT, SourceT]):
    """The handling of a failed step; subclasses implement it for each kind of loop."""

    can: ClassVar[Capabilities]

    def resolve(self, trip: TripT) -> Resolved:
        """Diagnose a failed step and act on it; returns the action taken. Collective.

        Raises:
            NonFiniteError: On every rank, if no action of the ladder fits.
        """
        start_s = time.perf_counter()
        results = self.diagnosed(trip)
        diagnoses = self.agreed(trip, results)
        # From here on, every rank computes the same from the same diagnoses, without further communication.
        action = self.possible(trip, self.can.within(self.chosen(trip, diagnoses)), diagnoses)
        duration_s = time.perf_counter() - start_s
        # One event per diagnosis. The action that was really taken is filled in below.
        events = [
            event_of(trip.step, trip.kind, diagnosis, action.kind, duration_s)
            for diagnosis in diagnoses
        ]
        # Write bundles before acting: they hold the weights that the step failed with, which a rollback replaces.
        events = self._bundled(trip, results, events)
        result = self.act(trip, diagnoses, action)
        facts = result.facts
        if result.action.instead_of:
            facts = {**facts, "instead_of": result.action.instead_of}
        events = [
            replace(event, action=result.action.kind, facts={**event.facts, **facts})
            for event in events
        ]
        for event in events:
            self.write(event)
        # All ranks raise: a rank that continued would hang in the next collective.
        if result.action.kind == "stop":
            raise self.stopped(trip, diagnoses, result, events[0])
        if result.is_news:
            head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}; {result.done}"
            self.say(listed(head, [*self.lines(diagnoses), *result.notes]))
        return result

    @property
    @abstractmethod
    def lockstep(self) -> bool:
        """True if all ranks run the same diagnosis together."""

    @abstractmethod
    def diagnosed(self, trip: TripT) -> list[Found[SourceT]]:
        """The findings of this rank; in lockstep, those of all ranks. Collective."""

    @abstractmethod
    def chosen(self, trip: TripT, verdicts: Sequence[Verdict]) -> Action:
        """Choose the action for these verdicts, and count it."""

    @abstractmethod
    def possible(self, trip: TripT, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """The action, or a stop if it needs something that is missing. Collective."""

    @abstractmethod
    def bundle(self, source: SourceT, event: Event) -> str | None:
        """Write a bundle and return its path below the loop's folder; None if none was written."""

    @abstractmethod
    def act(self, trip: TripT, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        """Carry out the action. Collective."""

    @abstractmethod
    def write(self, event: Event) -> None:
        """Write an event."""

    @abstractmethod
    def stopped(
        self, trip: TripT, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        """Prepare the state for a stop, and return the error that ends the loop. Collective."""

    @abstractmethod
    def say(self, words: str) -> None: ...

    def agreed(self, trip: TripT, found: Sequence[Found[SourceT]]) -> list[Verdict]:
        """The relevant verdicts of all ranks. Collective."""
        diagnoses = [result.verdict for result in found]
        # Ranks that diagnose together have the same diagnoses, so gathering would repeat each of them.
        return telling(trip, diagnoses if self.lockstep else gather_object(diagnoses))

    def lines(self, verdicts: Sequence[Verdict]) -> list[str]:
        """One line per distinct verdict, starting with the ranks and samples that it applies to."""
        return verdict_lines(verdicts)

    def _bundled(
        self, trip: TripT, found: Sequence[Found[SourceT]], events: Sequence[Event]
    ) -> list[Event]:
        """Write this rank's bundles; returns the events with the paths of all ranks' bundles. Collective."""
        # A micro-batch is identified by its rank and its number in the step.
        event_by_position = {(event.rank, event.micro_step): event for event in events}
        local_paths: dict[tuple[int, int | None], str] = {}
        for item in found:
            position = (item.verdict.rank, item.verdict.micro_step)
            if item.source is not None and position in event_by_position:
                path = self.bundle(item.source, event_by_position[position])
                local_paths |= {position: path} if path is not None else {}
        written: dict[tuple[int, int | None], str] = {}
        # Only the rank that wrote a bundle knows its path, and the main process writes the event.
        for rank_paths in gather_object([local_paths]):
            # If several ranks wrote the same bundle, the path of the first one counts.
            written = rank_paths | written
        # Add the bundle's path to the event of the same micro-batch.
        keyed_events = ((item, (item.rank, item.micro_step)) for item in events)
        return [
            replace(item, facts={"bundle": written[position]}) if position in written else item
            for item, position in keyed_events
        ]


def telling(trip: Tripped, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The conclusive verdicts if any rank or micro-batch has one, else the first verdict."""
    # If the state is bad, a rank on which it is good reports the learning rate, which is inconclusive.
    inconclusive = {"transient", "learning_rate"} if trip.kind in OF_WEIGHTS else {"transient"}
    conclusive = [diagnosis for diagnosis in verdicts if diagnosis.cause not in inconclusive]
    # With sharded optimizer state, one rank's bad moments make the weights bad on all ranks.
    moments = [diagnosis for diagnosis in conclusive if diagnosis.cause == "optimizer"]
    return moments or conclusive or list(verdicts[:1])


def verdict_lines(verdicts: Sequence[Verdict], *, alone: bool = False) -> list[str]:
    """One line per distinct verdict; without rank numbers if `alone`, for the only process."""
    # Samples and ranks with the same message share one line.
    positions: dict[str, list[str]] = {}
    for diagnosis in verdicts:
        rank = "" if alone else f"rank {diagnosis.rank}"
        # A message that names its samples itself needs no names in front.
        names = "" if diagnosis.words_name_samples else ", ".join(diagnosis.sample_ids)
        position = f"{names} ({rank})" if names and rank else names or rank
        positions.setdefault(diagnosis.words, []).append(position)
    lines = []
    for message, labels in positions.items():
        # A dict removes repetitions and keeps the order.
        prefix = ", ".join(dict.fromkeys(filter(None, labels)))
        lines.append(f"{prefix}: {message}" if prefix else message)
    return lines
