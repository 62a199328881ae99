"""Handle one failed step in any loop: diagnose, agree on all ranks, act, record and log.

A loop implements a subclass: how it diagnoses, and which actions it can take. Every rank makes the same calls.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

from dit_lora.errors import format_list
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.event import Event, make_event
from dit_lora.guard.finite_gate import NonFiniteError, StepFailure
from dit_lora.guard.recovery_policy import Action
from dit_lora.numerics.ranks import gather_object

# Kinds of failure in which the state itself is bad: no micro-batch is replayed for them.
BAD_STATE_KINDS = ("non_finite_weights", "diverged_weights", "altered_state", "diverged_averages", "ranks_differ")

FailureT = TypeVar("FailureT", bound=StepFailure)
SourceT = TypeVar("SourceT")
"""The object that a loop diagnoses: a micro-batch, or a model call."""


@dataclass(frozen=True)
class RankDiagnosis(Generic[SourceT]):
    """Diagnosis made by one rank, with the object that it is about."""

    diagnosis: Diagnosis
    source: SourceT | None = None
    """The object that a bundle is written from; None if the diagnosis is not about a micro-batch."""


class RecoveryHandler(ABC, Generic[FailureT, SourceT]):
    """Base class for handling failed steps: `RunRecovery` is for a run, `LoopRecovery` for another loop."""

    unsupported_actions: ClassVar[frozenset[str]] = frozenset()
    """Kinds of actions that the loop does not support, and that a skip replaces."""

    def resolve(self, failure: FailureT) -> Action:
        """Diagnose a failed step and act on it; returns the action taken. Collective.

        Raises:
            NonFiniteError: On every rank, if the action is `stop`.
        """
        start_s = time.perf_counter()
        results = self.diagnose_step(failure)
        diagnoses = self.gather_diagnoses(failure, results)
        # From here on, every rank computes the same from the same diagnoses, without further communication.
        chosen = self.choose_action(failure, diagnoses)
        if chosen.kind in self.unsupported_actions:
            chosen = replace(chosen, kind="skip", replaced_kind=chosen.kind)
        action = self.replace_impossible(failure, chosen, diagnoses)
        duration_s = time.perf_counter() - start_s
        # One event per diagnosis. The action that was really taken is filled in below.
        events = [
            make_event(failure.step, failure.kind, diagnosis, action.kind, duration_s) for diagnosis in diagnoses
        ]
        # Write bundles before acting: they hold the weights that the step failed with, which a rollback replaces.
        events = self._write_bundles(failure, results, events)
        action = self.apply_action(failure, diagnoses, action)
        facts = action.facts
        if action.replaced_kind:
            facts = {**facts, "instead_of": action.replaced_kind}
        events = [replace(event, action=action.kind, facts={**event.facts, **facts}) for event in events]
        for event in events:
            self.write_event(event)
        # All ranks raise: a rank that continued would hang in the next collective.
        if action.kind == "stop":
            raise self.make_stop_error(failure, diagnoses, action, events[0])
        if action.should_log:
            head = f"guard: step {failure.step}: {failure.kind.replace('_', ' ')}; {action.description}"
            self.log(format_list(head, [*self.format_diagnoses(diagnoses), *action.notes]))
        return action

    @property
    @abstractmethod
    def collective_forward(self) -> bool:
        """True if all ranks run the same diagnosis together."""

    @abstractmethod
    def diagnose_step(self, failure: FailureT) -> list[RankDiagnosis[SourceT]]:
        """Diagnose a failed step; returns the diagnoses of this rank, or of all ranks for a sharded model.

        Collective.
        """

    @abstractmethod
    def choose_action(self, failure: FailureT, diagnoses: Sequence[Diagnosis]) -> Action:
        """Choose the recovery action for these diagnoses of a failed step, and count it."""

    @abstractmethod
    def replace_impossible(self, failure: FailureT, action: Action, diagnoses: Sequence[Diagnosis]) -> Action:
        """Replace a recovery action by a stop if it needs something that is missing. Collective."""

    @abstractmethod
    def write_bundle(self, source: SourceT, event: Event) -> str | None:
        """Write a replay bundle and return its path relative to the loop's folder; None if none was written."""

    @abstractmethod
    def apply_action(self, failure: FailureT, diagnoses: Sequence[Diagnosis], action: Action) -> Action:
        """Carry out a recovery action; returns it, or the one taken instead, with what was done. Collective."""

    @abstractmethod
    def write_event(self, event: Event) -> None:
        """Write an event to events.jsonl."""

    @abstractmethod
    def make_stop_error(
        self, failure: FailureT, diagnoses: Sequence[Diagnosis], action: Action, event: Event
    ) -> NonFiniteError:
        """Prepare the state for a stop, and return the error that ends the loop. Collective."""

    @abstractmethod
    def log(self, message: str) -> None: ...

    def gather_diagnoses(self, failure: FailureT, results: Sequence[RankDiagnosis[SourceT]]) -> list[Diagnosis]:
        """Gather the conclusive diagnoses of all ranks, or the first one if none is conclusive. Collective."""
        diagnoses = [result.diagnosis for result in results]
        # Ranks that diagnose together have the same diagnoses, so gathering would repeat each of them.
        return select_conclusive(failure, diagnoses if self.collective_forward else gather_object(diagnoses))

    def format_diagnoses(self, diagnoses: Sequence[Diagnosis]) -> list[str]:
        """Format diagnoses as text, one line each, starting with the ranks and samples that the line applies to."""
        return format_diagnosis_lines(diagnoses)

    def _write_bundles(
        self, failure: FailureT, results: Sequence[RankDiagnosis[SourceT]], events: Sequence[Event]
    ) -> list[Event]:
        """Write this rank's replay bundles; returns the events with the paths of all ranks' bundles. Collective."""
        # A micro-batch is identified by its rank and its number in the step.
        event_by_position = {(event.rank, event.micro_step): event for event in events}
        local_paths: dict[tuple[int, int | None], str] = {}
        for item in results:
            position = (item.diagnosis.rank, item.diagnosis.micro_step)
            if item.source is not None and position in event_by_position:
                path = self.write_bundle(item.source, event_by_position[position])
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


def select_conclusive(failure: StepFailure, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Select the conclusive diagnoses if any rank or micro-batch has one, else the first diagnosis."""
    # If the state is bad, a rank on which it is good reports the learning rate, which is inconclusive.
    inconclusive = {"transient", "learning_rate"} if failure.kind in BAD_STATE_KINDS else {"transient"}
    conclusive = [diagnosis for diagnosis in diagnoses if diagnosis.cause not in inconclusive]
    # With sharded optimizer state, one rank's bad moments make the weights bad on all ranks.
    moments = [diagnosis for diagnosis in conclusive if diagnosis.cause == "optimizer"]
    return moments or conclusive or list(diagnoses[:1])


def format_diagnosis_lines(diagnoses: Sequence[Diagnosis], *, is_single_rank: bool = False) -> list[str]:
    """Format diagnoses as lines of text, each distinct one once; without rank numbers if `is_single_rank`."""
    # Samples and ranks with the same message share one line.
    positions: dict[str, list[str]] = {}
    for diagnosis in diagnoses:
        rank = "" if is_single_rank else f"rank {diagnosis.rank}"
        # A message that names its samples itself needs no names in front.
        names = "" if diagnosis.has_sample_names else ", ".join(diagnosis.sample_ids)
        position = f"{names} ({rank})" if names and rank else names or rank
        positions.setdefault(diagnosis.words, []).append(position)
    lines = []
    for message, labels in positions.items():
        # A dict removes repetitions and keeps the order.
        prefix = ", ".join(dict.fromkeys(filter(None, labels)))
        lines.append(f"{prefix}: {message}" if prefix else message)
    return lines
