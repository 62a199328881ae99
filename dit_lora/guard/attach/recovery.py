"""Recover from a failed step of any training loop, and log and record the action.

By default nothing ends the loop: a failed step is skipped, and bad weights are restored from the snapshot. If nothing
can be restored, the loop continues as it would without a guard. It ends only if `on_nonfinite` contains `stop`.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.bundles import Bundles
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.diagnosis import CallDiagnosis, no_call, state_verdict
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches, is_row_of_micro_batch
from dit_lora.guard.attach.save_weights import save_trained
from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.episode import (
    OF_STATE,
    OF_WEIGHTS,
    Capabilities,
    Episode,
    Found,
    Resolved,
    verdict_lines,
)
from dit_lora.guard.event import Event, event_of
from dit_lora.guard.gate import NonFiniteError
from dit_lora.guard.policy import Action, Policy
from dit_lora.guard.switches import find_switch
from dit_lora.guard.verdict import Verdict

_LOG = logging.getLogger("dit_lora")
WEIGHTS = "non_finite_weights"
OF_FROZEN = "altered_frozen"
_FROZEN_HINT = (
    "what was trained since the last save may have met the damage; if the loop itself writes there, give checks= "
    "without frozen"
)
_COPIES_HINT = "; what the loop has copied from them since, in files too, may have the bad values"
_OF_SAMPLES = ("data", "labels", "inputs")
_NOT_OF_THE_LOSS = ("kernel", "attention_backend", "rank", *OF_STATE)
_MAX_DIAGNOSED = 10
"""Consecutive failed steps that are diagnosed by experiments; after these, only state and inputs are checked."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class StepFailure:
    """A step that is not taken, or weights that must be restored."""

    step: int
    kind: str
    calls: Sequence[CapturedCall] = ()
    gradients: Sequence[str] = ()
    """Parameters with a bad gradient, if known."""
    controls: Mapping[int, CapturedCall] = field(default_factory=dict)
    """The last healthy call of each model, by the model's id."""
    weights_are_bad: bool = False
    """True if a trained weight is not finite."""
    between_steps: bool = False
    """True if state was found bad at a save: no step is lost."""
    required: bool = False
    """True if the loop requires good state, so that failing to restore it raises an error."""
    raised_by_torch: bool = False
    """True if torch itself raises an error for this step right after."""

    def has_bad_weights(self, verdicts: Sequence[Verdict]) -> bool:
        """True if trained state is damaged, so that skipping this step is not enough."""
        if self.kind in OF_WEIGHTS or self.weights_are_bad:
            return True
        return any(map(_is_about_trained_state, verdicts))


@dataclass(frozen=True)
class Recovered:
    """The decision about a failed step."""

    is_skipped: bool
    """False if nothing could be restored and the loop continues as without a guard."""
    went_back: bool
    """True if weights were restored."""


@dataclass
class PluginRecovery(Episode[StepFailure, CapturedCall]):
    """Finds the cause of a failed step and acts on it, identically on all ranks."""

    can: ClassVar[Capabilities] = Capabilities(takes_again=False, leaves_out=False)

    host: Host
    state: LoopState
    config: LadderConfig
    folder: Path | None
    watched: WatchedModels
    namer: SampleNamer
    note: Callable[[], None]
    """Called after an event was written and handled."""
    guard_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    budget: SkipBudget = field(default_factory=SkipBudget)
    has_given_up: bool = False
    """True once trained weights are bad and there is no snapshot to restore."""

    def __post_init__(self) -> None:
        self._policy = Policy(self.config)
        self._bundles = Bundles(self.host, self.config, self.folder)
        self._known = False
        """True if the current step failed only because of samples already known to be bad."""
        self._is_apart = False
        self._may_stop = "stop" in self.config.on_nonfinite
        self._restored: list[str] = []
        """Buffers that were restored before the current step was diagnosed."""
        self._zero_in_a_row = 0
        self._num_said = 0
        self._has_said_scale = False

    def recover(self, failure: StepFailure) -> Recovered:
        """Recover from a failed step.

        Raises:
            NonFiniteError: On every rank, if the ladder has a `stop` and no other action fits.
        """
        self._is_apart = self.host.is_apart
        with self.host.ranks_that_agree():
            result = self.resolve(failure)
        self.note()
        return Recovered(not self.has_given_up, result.target is not None)

    @property
    def lockstep(self) -> bool:
        return self.watched.lockstep

    def diagnosed(self, trip: StepFailure) -> list[Found[CapturedCall]]:
        results = self._diagnose(trip)
        if self._is_apart:
            results = [
                replace(result, verdict=_of_this_process(result.verdict)) for result in results
            ]
        return [
            replace(result, verdict=_with_gradients(result.verdict, trip.gradients))
            for result in results
        ]

    def agreed(self, trip: StepFailure, found: Sequence[Found[CapturedCall]]) -> list[Verdict]:
        return super().agreed(trip, found) or [no_call(trip.step, self.host.rank)]

    def chosen(self, trip: StepFailure, verdicts: Sequence[Verdict]) -> Action:
        # A known bad sample needs neither a new action nor a new message.
        self._known = not trip.has_bad_weights(verdicts) and self.budget.knows(verdicts)
        # Check this before known samples: while every step is lost, for any reason, nothing is trained.
        if self._may_stop and self.budget.is_stuck(self.config.max_skips):
            return Action("stop", why=f"none of the last {self.budget.in_a_row} steps was taken")
        if self._known or trip.raised_by_torch:
            return Action("skip")
        # In a guarded loop `max_skips` limits recent failures with new causes, not all skips.
        self._policy.skips = self.budget.spent(trip.step)
        if self._may_pass(trip, verdicts):
            return Action("skip")
        # Samples that were named before; a second failure with other noise makes them the cause.
        skipped = [sample for event in self.events for sample in event["sample_ids"]]
        action = self._policy.choose(trip.step, verdicts, skipped)
        # Without `stop` in `on_nonfinite` the loop must go on.
        if action.kind == "stop" and not self._may_stop and not trip.required:
            return Action("skip", why=action.why)
        return action

    def possible(self, trip: StepFailure, action: Action, verdicts: Sequence[Verdict]) -> Action:
        """The action, or a replacement if it needs a snapshot and no finite one is held. Collective."""
        # Leaving out a step does not repair weights that are bad already.
        needs_snapshot = action.kind == "rollback" or (
            trip.has_bad_weights(verdicts) and action.kind != "stop"
        )
        if not needs_snapshot or self.state.newest(self.host.gathered) is not None:
            return action
        hint = "" if self.state.every else ", for guard.snapshot_every is 0"
        reason = f"no snapshot that is finite is held{hint}"
        return Action("stop" if self._may_stop or trip.required else "skip", why=reason)

    def bundle(self, source: CapturedCall, event: Event) -> str | None:
        if self._known:  # a known sample already has a bundle
            return None
        # Record the switches that were off before this event's action.
        facts = {
            "switched_off": sorted(self.watched.switched_off),
            "start_peak": self.watched.suspects[id(source.owner)].start_peak,
        }
        return self._bundles.write(source, event.record(), facts, all_of=self.lockstep)

    def act(self, trip: StepFailure, verdicts: Sequence[Verdict], action: Action) -> Resolved:
        # Snapshots hold no frozen weights, so this can only be reported.
        if trip.kind == OF_FROZEN and action.kind != "stop":
            return Resolved(Action("report"), _FROZEN_HINT, facts={"guard": self.guard_id})
        if action.kind == "skip" and not trip.between_steps:
            self.budget.skip(trip.step, verdicts)
        # A check between steps loses no step.
        elif not trip.between_steps:
            self.budget.lose(trip.step, verdicts)
        # Restore before a stop too: the run must end with good weights.
        has_bad_state = trip.has_bad_weights(verdicts)
        restored_step = self._put_back() if has_bad_state or action.kind == "rollback" else None
        if restored_step is None and action.kind == "rollback":
            reason = "the snapshot that is held does not fit any more"
            action = Action("stop" if self._may_stop or trip.required else "skip", why=reason)
        buffers = [*self._restored, *self.state.restore_bad_buffers()]
        self._restored = []
        facts: dict[str, Any] = {"guard": self.guard_id} | ({"known": True} if self._known else {})
        facts |= {"weights_of_step": restored_step} if restored_step is not None else {}
        # From here on no step is skipped.
        if has_bad_state and restored_step is None and action.kind != "stop":
            self.has_given_up = True
            outcome = f"{action.why}: nothing can be put back, and the loop goes on as it would without a guard"
            return Resolved(replace(action, kind="report"), outcome, facts=facts)
        undone_steps = self._undone(trip, restored_step)
        if trip.between_steps and undone_steps:
            undone_steps += _COPIES_HINT
        outcome = undone_steps if action.kind == "stop" else self._done(trip, action, undone_steps)
        if buffers:
            outcome += f"; not finite and put back: {', '.join(buffers[:5])}"
        return Resolved(action, outcome, facts=facts, target=restored_step, is_news=self._is_news())

    def write(self, event: Event) -> None:
        self.events.append(event.record())
        if self.folder is None or self.host.rank != 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / "events.jsonl", json.dumps(self.events[-1]))
        except OSError as error:
            self.say(f"guard: cannot write {self.folder}/events.jsonl: {error.strerror}")
            self.folder = None

    def stopped(
        self, trip: StepFailure, verdicts: Sequence[Verdict], answered: Resolved, event: Event
    ) -> NonFiniteError:
        state = "the weights are not to be used"
        if answered.target is not None or not trip.has_bad_weights(verdicts):
            state = self._left_behind(trip, answered.target, answered.done)
        if trip.kind == OF_FROZEN:
            state += f"; {_FROZEN_HINT}"
        self.note()
        head = f"guard: step {trip.step}: {trip.kind.replace('_', ' ')}"
        message = f"{head}; {state}; stopped: {answered.action.why}"
        return NonFiniteError(listed(message, self.lines(verdicts)), event.record())

    def say(self, words: str) -> None:
        self.host.say(words)

    def lines(self, verdicts: Sequence[Verdict]) -> list[str]:
        named = [v.with_sample_ids(tuple(map(self._shown_name, v.sample_ids))) for v in verdicts]
        return verdict_lines(named, alone=self.host.ranks == 1)

    # Reports on steps that are taken

    def report_save(self, step: int, path: str, bad: str) -> None:
        """Report that the loop is about to save values that are not finite."""
        message = f"{path or 'a file'} is saved with values that are not finite: {bad}"
        self._report(step, "non_finite_save", message)

    def report_zero_gradient(self, step: int) -> None:
        """Report that no trained weight got a gradient though the loss asks for one. The step is taken."""
        self._zero_in_a_row += 1
        count = self._zero_in_a_row
        if self._may_stop and count > self.config.max_skips:
            message = f"no gradient reached a trained weight in {count} steps in a row, though the loss asks for one"
            event = self._report(step, "zero_gradient", message, action="stop")
            hint = "checks= without zero_gradient goes on"
            raise NonFiniteError(f"guard: step {step}: {message} ({hint})", event.record())
        # Report at powers of ten, not at every step.
        if count in (1, 10, 100, 1000):
            count_text = f" in {count} steps in a row" if count > 1 else ""
            message = (
                f"no gradient reached a trained weight{count_text}, though the loss asks for one"
            )
            self._report(step, "zero_gradient", message)

    def gradient_arrived(self) -> None:
        self._zero_in_a_row = 0

    def report_loss_scale(self, step: int, scale: float) -> None:
        """Report that a gradient scaler has lowered its loss scale until gradients no longer fit fp16.

        Raises:
            NonFiniteError: If the ladder has a `stop`.
        """
        message = f"gradients overflow fp16 at every loss scale down to {scale:g}; use bf16, or a lower learning rate"
        if self._may_stop:
            event = self._report(step, "loss_scale", message, action="stop")
            raise NonFiniteError(f"step {step}: {message}", event.record())
        if not self._has_said_scale:
            self._has_said_scale = True
            self._report(step, "loss_scale", message)

    def report_loss(self, failure: StepFailure) -> None:
        """Report why a loss is not finite though every gradient is. The step is taken."""
        found_diagnoses = [entry.verdict for entry in self._diagnose(failure)]
        diagnoses = found_diagnoses or [no_call(failure.step, self.host.rank)]
        for diagnosis in diagnoses:
            event = event_of(failure.step, failure.kind, diagnosis, "report", 0.0)
            self.write(replace(event, facts={"guard": self.guard_id}))
        head = f"guard: step {failure.step}: the loss is not finite, but every gradient is; the step was taken"
        self.say(listed(head, self.lines(diagnoses)))

    def put_back_alone(self, step: int) -> None:
        """Restore the newest good snapshot on this rank, which is about to save bad weights. Not collective.

        If other ranks have bad weights too, they find them at their next step and restore the same snapshot.
        """
        diagnosis = state_verdict(self.watched, WEIGHTS, step, self.host.rank)
        restored_step = self._put_back(list)
        if restored_step is None or diagnosis is None:
            return  # the saved values are checked in any case
        event = event_of(step, WEIGHTS, diagnosis, "rollback", 0.0)
        self.write(replace(event, facts={"guard": self.guard_id, "weights_of_step": restored_step}))
        head = f"guard: rank {self.host.rank} was about to save weights that are not finite: {diagnosis.words}"
        _LOG.warning("%s; those of step %d are saved", head, restored_step)

    def _report(self, step: int, kind: str, words: str, *, action: str = "report") -> Event:
        event = Event(
            step,
            kind,
            {"cause": "unknown", "words": words},
            action,
            rank=self.host.rank,
            facts={"guard": self.guard_id},
        )
        self.write(event)
        if action != "stop":
            self.say(f"guard: step {step}: {words}")
        return event

    def _diagnose(self, failure: StepFailure) -> list[Found[CapturedCall]]:
        step, rank = failure.step, self.host.rank
        # Check the state first: with bad weights every call fails, whatever the samples.
        state = state_verdict(self.watched, failure.kind, step, rank)
        if state is not None and not self._is_written_by_loop(state):
            # A loop that writes to weights itself may have spoiled them with a bad sample of this step.
            inputs = self._from_inputs(failure) if _are_spoiled_as_a_whole(state) else []
            return inputs or [Found(state)]
        if failure.kind in (*OF_WEIGHTS, OF_FROZEN):
            # Without a finding here, another rank has the bad state.
            return [Found(state)] if state is not None else []
        # NaN that the failed forward left in a buffer would make every replay fail.
        self._restored = self.state.restore_bad_buffers()
        calls: Sequence[CapturedCall] = failure.calls
        if self.lockstep:
            calls = [self.namer.with_proven_names(call) for call in calls]
        diagnoser = CallDiagnosis(
            self.watched,
            # Ranks that diagnose together must find the same names, so they use only those stored in the calls.
            SampleNamer(LoadedBatches()) if self.lockstep else self.namer,
            failure.kind,
            step,
            is_raised=failure.raised_by_torch,
            has_experiments=self.budget.in_a_row < _MAX_DIAGNOSED,
        )
        results = [
            entry
            for rank_calls in self.watched.shared(calls, failure.controls)
            for entry in diagnoser.verdicts(rank_calls)
        ]
        if state is None:
            return results or [Found(no_call(step, rank))]
        # A bad sample leaves NaN in a buffer that the model writes to. Report the buffer only if no sample is bad.
        sample_results = [entry for entry in results if entry.verdict.cause in _OF_SAMPLES]
        return sample_results or [Found(_as_written_buffer(state))]

    def _from_inputs(self, failure: StepFailure) -> list[Found[CapturedCall]]:
        """Samples that were bad in the inputs of this step's models."""
        if self.lockstep:
            return []
        diagnoser = CallDiagnosis(self.watched, self.namer, failure.kind, failure.step)
        return diagnoser.bad_samples(failure.calls, failure.controls, self.host.rank)

    def _is_written_by_loop(self, verdict: Verdict) -> bool:
        """True if all bad frozen values are written by the model or the loop itself."""
        record, bad_tensors = self.watched.record, verdict.evidence.get("frozen", [])
        return record is not None and bool(bad_tensors) and all(map(record.is_own, bad_tensors))

    def _may_pass(self, trip: StepFailure, verdicts: Sequence[Verdict]) -> bool:
        """True if the next step may be healthy.

        If no sample is named, or every sample fails, a replay cannot show whether only this step fails. A loop in fp16
        expects to lose some steps to its range.
        """
        # Nothing ties the failure to a sample, so the next step may well be healthy.
        is_general = all(
            diagnosis.evidence.get("every_sample")
            or diagnosis.evidence.get("of_the_loop")
            or diagnosis.cause == "precision"
            or (diagnosis.cause in ("inputs", "unknown") and not diagnosis.sample_ids)
            for diagnosis in verdicts
        )
        allowed = "skip" in self.config.on_nonfinite and self._policy.skips < self.config.max_skips
        return is_general and allowed and not trip.has_bad_weights(verdicts)

    def _is_news(self) -> bool:
        """False for a sample known to be bad, and for most failures once there are many."""
        if self._known:
            return False
        self._num_said += 1
        count = self._num_said
        # After the first ten, show those whose number is a power of two.
        return count <= _MAX_SHOWN or count & (count - 1) == 0

    def _shown_name(self, name: str) -> str:
        # Loops without a DataLoader have no dataset index that could be missing.
        is_unknown = is_row_of_micro_batch(name) and self.namer.batches.has_batches
        return f"{name} (its dataset index is not known)" if is_unknown else name

    def _put_back(self, gathered: Callable[[Sequence[str]], list[str]] | None = None) -> int | None:
        """Restore the newest good snapshot and return its step; None if none fits.

        Collective, unless `gathered` asks only this rank.
        """
        step = self.state.newest(gathered or self.host.gathered)
        if step is None:
            return None
        try:
            self.state.restore(step)
        except DitLoraError as problem:  # a tensor has changed its shape or dtype
            self.host.say(f"guard: {problem}")
            return None
        return step

    def _undone(self, trip: StepFailure, put_back: int | None) -> str:
        """One sentence on the steps that restoring a snapshot has undone."""
        if put_back is None:
            return ""
        # Steps taken since the snapshot. The failed step itself was not taken.
        num_lost = trip.step - 1 - put_back
        interval = f"; a snapshot is taken every {self.state.every} steps" if num_lost else ""
        undone_text = "1 step is undone" if num_lost == 1 else f"{num_lost} steps are undone"
        return f"weights and optimizer are those of step {put_back}, {undone_text}{interval}"

    def _done(self, trip: StepFailure, action: Action, undone: str) -> str:
        if action.kind == "fallback":
            fallbacks = [
                fallback
                for context in self.watched.suspects.values()
                for fallback in context.switches
            ]
            for name in action.switches:
                find_switch(fallbacks, name).turn_off()
                self.watched.switched_off.add(name)
            disabled_text = f"{', '.join(action.switches)} switched off for this run"
            return f"{disabled_text}; {undone or 'the step was not taken'}"
        if action.kind == "rollback" and action.lower_lr:
            self.state.lower_rates(self.config.rollback_lr)
            return f"{undone}; learning rates are multiplied by {self.config.rollback_lr:g}"
        if trip.raised_by_torch:
            return "torch raises an error for it"
        return undone or "the step was not taken"

    def _left_behind(self, trip: StepFailure, put_back: int | None, undone: str) -> str:
        """Describe the weights after a stop, and write good ones to disk."""
        step = trip.step - 1 if put_back is None else put_back
        state = undone or "the weights are those of the step before"
        if self.host.under_deepspeed:  # its engine holds them
            return state
        folder = self.folder if self.folder is not None else self.host.folder
        weights = {name: p.detach() for name, p in self.state.parameters.items()}
        location = save_trained(weights, folder, step, is_main=self.host.rank == 0)
        return f"{state}; {location}" if location else state


def _is_about_trained_state(verdict: Verdict) -> bool:
    if verdict.evidence.get("frozen"):
        return False
    return verdict.cause in OF_STATE or "not_finite" in verdict.evidence


def _are_spoiled_as_a_whole(verdict: Verdict) -> bool:
    """True if several trained weights contain only NaN, as after an update with a NaN gradient."""
    matches = [
        # Matches "name has 12 NaN among 12 values" and captures both numbers.
        re.search(r"has (\d+) NaN among (\d+)", line)
        for line in verdict.evidence.get("not_finite", ())
    ]
    # Tensors in which every value is NaN.
    all_nan = [match for match in matches if match is not None and match[1] == match[2]]
    return verdict.cause == "weights" and len(all_nan) > 1


def _as_written_buffer(verdict: Verdict) -> Verdict:
    """The verdict on a buffer that the model writes to, which is not damaged but holds a call's bad values."""
    message = verdict.words.replace(
        "; the checkpoint or memory is damaged", "; the model itself writes to it"
    )
    return replace(verdict, cause="unknown", words=message, evidence={})


def _with_gradients(verdict: Verdict, names: Sequence[str]) -> Verdict:
    """Add the parameters with bad gradients to a verdict, unless a replay has found the module."""
    if not names or verdict.cause in (*_NOT_OF_THE_LOSS, *_OF_SAMPLES):
        return verdict
    verdict = replace(verdict, evidence={**verdict.evidence, "gradients": list(names[:20])})
    if verdict.module is not None:
        return verdict
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    message = f"{verdict.words}; the gradient of {names[0]}{more} was not finite"
    return replace(verdict, words=message, module=names[0].rpartition(".")[0])


def _of_this_process(verdict: Verdict) -> Verdict:
    """Weaken a `transient` verdict, since other processes may have added to the gradients."""
    if verdict.cause != "transient":
        return verdict
    message = (
        "this process's own calls are finite when they are run again; where processes add up their gradients, another "
        "one has the cause"
    )
    return replace(verdict, cause="unknown", words=message)
