"""Recover from one failed step in any loop: diagnose it, choose an action, act, record and log.

`RecoveryHandler.diagnose_and_recover` shows the sequence. A loop implements a subclass: how it diagnoses, and which
actions it can take. `Policy` chooses the action: the first of `guard.on_nonfinite` that fits every cause, within the
limits of `guard.max_skips` and `guard.max_rollbacks`. One rule goes before this order: `skip` does not fit a sample
that would fail again in the next epoch if `quarantine` is in the list. Every rank makes the same calls.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import format_event_kind, format_list
from dit_lora.guard.diagnosis import Diagnosis, Event, make_event
from dit_lora.guard.finite_gate import NonFiniteError, StepFailure
from dit_lora.numerics.ranks import gather_object

# Kinds of failure in which the state itself is bad: no micro-batch is replayed for them.
BAD_STATE_KINDS = ("non_finite_weights", "diverged_weights", "altered_state", "diverged_averages", "ranks_differ")
# Data that is stored bad will fail again; another noise, timestep or position in the run will not.
_STORED_DATA_CAUSES = ("data", "labels")
# Causes for which every rank fails in the same way, and no sample is the cause.
STATE_CAUSES = ("weights", "optimizer", "learning_rate")
_COMPONENT_CAUSES = ("kernel", "attention_backend")

FailureT = TypeVar("FailureT", bound=StepFailure)
SourceT = TypeVar("SourceT")
"""The object that a loop diagnoses: a micro-batch, or a model call."""


@dataclass(frozen=True)
class Action:
    """The recovery action for a failed step: chosen by the policy, and completed by the loop that carries it out."""

    kind: str
    """`retry`, `skip`, `quarantine`, `fallback`, `rollback` or `stop`; `report` if a loop can do nothing."""
    samples: tuple[str, ...] = ()
    """Samples to leave out. A `skip` without samples skips the whole step, since no sample is at fault."""
    fallbacks: tuple[str, ...] = ()
    should_lower_lr: bool = False
    replaced_kind: str = ""
    """The kind that was chosen, if the loop does not support it."""
    reason: str = ""
    """Reasons for not continuing, for `stop`."""
    description: str = ""
    """End of the message about the step: the action taken, in words."""
    notes: Sequence[str] = ()
    """Further lines of the message."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the events."""
    restored_step: int | None = None
    """The healthy step after which a run continues. In other loops, None unless weights were restored."""
    should_log: bool = True


@dataclass
class Policy:
    """Chooses the recovery action for a failed step. Its counts belong to a run and are saved in checkpoints."""

    config: RecoveryConfig
    skips: int = 0
    rollbacks: int = 0
    last_rollback_step: int = 0
    """The failed step that led to the last rollback."""

    def choose_and_count_action(
        self, step: int, diagnoses: Sequence[Diagnosis], previously_skipped: Sequence[str]
    ) -> Action:
        """Choose and count the first action of `guard.on_nonfinite` that fits every diagnosis of a failed step."""
        causes: set[str] = {diagnosis.cause for diagnosis in diagnoses}
        reasons: list[str] = []
        # Take the first action that fits every cause, in the user's order.
        for action_kind in self.config.on_nonfinite:
            if action_kind == "stop":
                break
            action = self._match_action(action_kind, step, diagnoses, causes, previously_skipped)
            if isinstance(action, Action):
                if action.kind in ("retry", "skip", "quarantine"):
                    self.skips += 1
                if action.kind == "rollback":
                    self.rollbacks += 1
                    self.last_rollback_step = step
                return action
            if action:
                reasons.append(action)
        actions = ", ".join(self.config.on_nonfinite)
        reason = "; ".join(dict.fromkeys(reasons))
        return Action("stop", reason=reason or f"no action of guard.on_nonfinite [{actions}] fits this cause")

    def _match_action(
        self,
        action_kind: str,
        step: int,
        diagnoses: Sequence[Diagnosis],
        causes: set[str],
        previously_skipped: Sequence[str],
    ) -> Action | str:
        """Build the recovery action of this kind, or the reason why it does not fit the failed step.

        An empty string means that it never applies here.
        """
        # Nothing that a run can do repairs a rank that computes wrong values.
        faulty_ranks = [diagnosis.rank for diagnosis in diagnoses if diagnosis.cause == "rank"]
        if faulty_ranks:
            return f"rank {faulty_ranks[0]} computes wrong values, so no further step can be trusted"
        # With several causes, handle state first, then switches, then samples; a remaining cause fails again.
        if causes & set(STATE_CAUSES):
            return self._match_rollback(step, diagnoses) if action_kind == "rollback" else ""
        if causes & set(_COMPONENT_CAUSES):
            fallbacks = tuple(sorted({diagnosis.switch for diagnosis in diagnoses if diagnosis.switch}))
            return Action("fallback", fallbacks=fallbacks) if action_kind == "fallback" else ""
        # The remaining causes lie in samples, in noise, or in chance.
        if action_kind not in ("skip", "quarantine"):
            return ""
        # Retries count too: otherwise a run on an unreliable machine would retry forever.
        if self.skips >= self.config.max_skips:
            return f"guard.max_skips={self.config.max_skips} is used up"
        # No sample has to be left out: repeat the step unchanged.
        if causes == {"transient"}:
            return Action("retry")
        # Each sample once, in order; a set would order them differently in each run.
        samples = tuple(dict.fromkeys(sample for diagnosis in diagnoses for sample in diagnosis.sample_ids))
        # If no sample is the cause, only the whole step can be skipped.
        if not samples:
            return Action("skip") if action_kind == "skip" and "step" in causes else ""
        bad_as_stored: set[str] = set()
        # Samples that fail only with their noise, although another sample is healthy with it.
        fail_with_noise: set[str] = set()
        for diagnosis in diagnoses:
            if diagnosis.cause in _STORED_DATA_CAUSES:
                bad_as_stored.update(diagnosis.sample_ids)
            elif diagnosis.cause == "inputs" and diagnosis.evidence.get("control_with_the_same_draws") == "healthy":
                fail_with_noise.update(diagnosis.sample_ids)
        # If such a sample was skipped before, it is the cause, even if its stored data is good.
        repeated = fail_with_noise & {*previously_skipped}
        lasting = tuple(sample for sample in samples if sample in bad_as_stored or sample in repeated)
        if action_kind == "quarantine":
            return Action(action_kind, samples=lasting) if lasting else ""
        # A sample that will fail again is left to `quarantine`, even if `skip` comes first.
        if lasting and "quarantine" in self.config.on_nonfinite:
            return ""
        return Action(action_kind, samples=lasting or samples)

    def _match_rollback(self, step: int, diagnoses: Sequence[Diagnosis]) -> Action | str:
        if self.rollbacks >= self.config.max_rollbacks:
            return f"guard.max_rollbacks={self.config.max_rollbacks} is used up"
        # Restoring trained weights does not repair a frozen one.
        if any(diagnosis.cause == "weights" and diagnosis.evidence.get("frozen") for diagnosis in diagnoses):
            return "a snapshot does not hold the frozen weights"
        if any("weight_decay" in diagnosis.evidence for diagnosis in diagnoses):
            return "a rollback does not help: lower optim.weight_decay or the learning rate"
        # Steps repeat bit for bit, so a failure that returns at the same step is not a random memory error.
        is_repeated = step == self.last_rollback_step
        if is_repeated and any(diagnosis.evidence.get("ranks") for diagnosis in diagnoses):
            return "the ranks differ again after a rollback: continue without that machine"
        is_lr_too_high = any(diagnosis.cause == "learning_rate" for diagnosis in diagnoses)
        return Action("rollback", should_lower_lr=is_repeated or is_lr_too_high)

    def state_dict(self) -> dict[str, int]:
        """Counts of skips and rollbacks for a checkpoint; `Policy(config, **state)` continues with them."""
        return {"skips": self.skips, "rollbacks": self.rollbacks, "last_rollback_step": self.last_rollback_step}


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

    def diagnose_and_recover(self, failure: FailureT) -> Action:
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
        action = self.replace_impossible_action(failure, chosen, diagnoses)
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
            head = f"guard: step {failure.step}: {format_event_kind(failure.kind)}; {action.description}"
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
    def replace_impossible_action(self, failure: FailureT, action: Action, diagnoses: Sequence[Diagnosis]) -> Action:
        """Replace a recovery action by a stop if it needs something that is missing. Collective."""

    @abstractmethod
    def write_replay_bundle(self, source: SourceT, event: Event) -> str | None:
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
        return select_conclusive_diagnoses(failure, diagnoses if self.collective_forward else gather_object(diagnoses))

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
                path = self.write_replay_bundle(item.source, event_by_position[position])
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


def select_conclusive_diagnoses(failure: StepFailure, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
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
        positions.setdefault(diagnosis.message, []).append(position)
    lines = []
    for message, labels in positions.items():
        # A dict removes repetitions and keeps the order.
        prefix = ", ".join(dict.fromkeys(filter(None, labels)))
        lines.append(f"{prefix}: {message}" if prefix else message)
    return lines
