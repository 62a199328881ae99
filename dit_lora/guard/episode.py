"""One step that tripped, in any loop: diagnosed, agreed on by all ranks, answered, put down, and told.

A loop provides an adapter: how it diagnoses and which actions it can take. Every rank makes the same calls.
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

# Kinds that say that the state itself is bad: no micro-batch is replayed for them.
OF_WEIGHTS = (
    "non_finite_weights",
    "diverged_weights",
    "altered_state",
    "diverged_averages",
    "ranks_differ",
)
# Causes for which every rank fails alike, and a sample is never to blame.
OF_STATE = ("weights", "optimizer", "learning_rate")


class Tripped(Protocol):
    """Says of a step that tripped what all loops know."""

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> str: ...


TripT = TypeVar("TripT", bound=Tripped)
SourceT = TypeVar("SourceT")
"""The thing that is diagnosed in a loop: a micro-batch, or a call of a model."""


@dataclass(frozen=True)
class Found(Generic[SourceT]):
    """One rank says a verdict, and what it is about."""

    verdict: Verdict
    source: SourceT | None = None
    """The thing that a bundle is made of; None where the verdict is on no micro-batch."""


@dataclass(frozen=True)
class Capabilities:
    """Says what a loop is able to do about a step that tripped, beyond leaving it out and going back to a snapshot."""

    takes_again: bool
    """True if it can take the step again, as it was or without a sample."""
    leaves_out: bool
    """True if it can leave a sample out for good."""

    def within(self, action: Action) -> Action:
        """Return the action, or the one that stands in for what the loop is not able to do."""
        unable = {"retry": not self.takes_again, "quarantine": not self.leaves_out}
        if not unable.get(action.kind):
            return action
        return replace(action, kind="skip", instead_of=action.kind)


@dataclass(frozen=True)
class Resolved:
    """Says what was done about a step that tripped."""

    action: Action
    done: str = ""
    """The words for it, to follow on the step and its kind."""
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the events."""
    target: int | None = None
    """The step whose state the loop goes on from; None where it is as the trip left it."""
    is_news: bool = True


class Episode(ABC, Generic[TripT, SourceT]):
    """The course of a trip; subclasses are the kinds of loops."""

    can: ClassVar[Capabilities]

    def resolve(self, trip: TripT) -> Resolved:
        """Return what was done; raise `NonFiniteError` on every rank where no rung fits. Collective."""
        began = time.perf_counter()
        found = self.diagnosed(trip)
        verdicts = self.agreed(trip, found)
        # From here on every rank computes the same from the same verdicts: nothing more is negotiated.
        action = self.possible(trip, self.can.within(self.chosen(trip, verdicts)), verdicts)
        seconds = time.perf_counter() - began
        events = [event_of(trip.step, trip.kind, one, action.kind, seconds) for one in verdicts]
        # A bundle holds the weights that the step failed with, which going back replaces.
        events = self._bundled(trip, found, events)
        answered = self.act(trip, verdicts, action)
        facts = answered.facts
        if answered.action.instead_of:
            facts = {**facts, "instead_of": answered.action.instead_of}
        events = [
            replace(one, action=answered.action.kind, facts={**one.facts, **facts})
            for one in events
        ]
        for event in events:
            self.write(event)
        # All ranks raise: a rank that went on would wait in the next collective for ever.
        if answered.action.kind == "stop":
            raise self.stopped(trip, verdicts, answered, events[0])
        if answered.is_news:
            head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}; {answered.done}"
            self.say(listed(head, [*self.lines(verdicts), *answered.notes]))
        return answered

    @property
    @abstractmethod
    def lockstep(self) -> bool:
        """True if all ranks diagnose the same together."""

    @abstractmethod
    def diagnosed(self, trip: TripT) -> list[Found[SourceT]]:
        """Return what this rank finds; in lockstep, what all do. Collective."""

    @abstractmethod
    def chosen(self, trip: TripT, verdicts: Sequence[Verdict]) -> Action:
        """Return the answer to these verdicts, and count it."""

    @abstractmethod
    def possible(self, trip: TripT, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """Return the action, or a stop where what it needs is not there. Collective."""

    @abstractmethod
    def bundle(self, source: SourceT, event: Event) -> str | None:
        """Write a bundle and return its path below the loop's folder; None where there is none."""

    @abstractmethod
    def act(self, trip: TripT, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        """Do it. Collective."""

    @abstractmethod
    def write(self, event: Event) -> None:
        """Put an event down."""

    @abstractmethod
    def stopped(
        self, trip: TripT, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        """Return the error that ends the loop, with everything left as it should be. Collective."""

    @abstractmethod
    def say(self, words: str) -> None: ...

    def agreed(self, trip: TripT, found: Sequence[Found[SourceT]]) -> list[Verdict]:
        """Return the verdicts that count, of all ranks. Collective."""
        verdicts = [one.verdict for one in found]
        # In lockstep all ranks have diagnosed the same: gathering would repeat each verdict.
        return telling(trip, verdicts if self.lockstep else gather_object(verdicts))

    def lines(self, verdicts: Sequence[Verdict]) -> list[str]:
        """Return a line for each distinct verdict, beginning with all the places where it holds."""
        return verdict_lines(verdicts)

    def _bundled(
        self, trip: TripT, found: Sequence[Found[SourceT]], events: Sequence[Event]
    ) -> list[Event]:
        """Write this rank's bundles, and return the events with the paths of all ranks' bundles. Collective."""
        by_place = {(event.rank, event.micro_step): event for event in events}
        own: dict[tuple[int, int | None], str] = {}
        for one in found:
            place = (one.verdict.rank, one.verdict.micro_step)
            if one.source is not None and place in by_place:
                path = self.bundle(one.source, by_place[place])
                own |= {place: path} if path is not None else {}
        written: dict[tuple[int, int | None], str] = {}
        # Only the rank that wrote a bundle knows of it, and the event is written by the main process.
        for theirs in gather_object([own]):
            written = theirs | written  # in lockstep the first rank's
        places = ((one, (one.rank, one.micro_step)) for one in events)
        return [
            replace(one, facts={"bundle": written[place]}) if place in written else one
            for one, place in places
        ]


def telling(trip: Tripped, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the conclusive verdicts if any rank or micro-batch has one, else the first."""
    # Of state that is found bad, a rank that has nothing to show says that it grew.
    mute = {"transient", "learning_rate"} if trip.kind in OF_WEIGHTS else {"transient"}
    conclusive = [verdict for verdict in verdicts if verdict.cause not in mute]
    # Where moments are shared out, the weights that one rank's spoil are bad on all.
    moments = [verdict for verdict in conclusive if verdict.cause == "optimizer"]
    return moments or conclusive or list(verdicts[:1])


def verdict_lines(verdicts: Sequence[Verdict], *, alone: bool = False) -> list[str]:
    """Return a line for each distinct verdict; without ranks for the only process, which is `alone`."""
    places: dict[str, list[str]] = {}
    for verdict in verdicts:
        rank = "" if alone else f"rank {verdict.rank}"
        names = "" if verdict.words_name_samples else ", ".join(verdict.sample_ids)
        place = f"{names} ({rank})" if names and rank else names or rank
        places.setdefault(verdict.words, []).append(place)
    lines = []
    for words, where in places.items():
        named = ", ".join(dict.fromkeys(filter(None, where)))
        lines.append(f"{named}: {words}" if named else words)
    return lines
