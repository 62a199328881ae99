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

import torch

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import DitLoraError, format_event_kind, format_list, format_remaining_count
from dit_lora.files import append_line
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.bundles import BundleWriter
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.diagnose_calls import CallDiagnoser, diagnose_state, make_missing_call_diagnosis
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.row_names import is_micro_batch_row
from dit_lora.guard.attach.save_weights import save_trained_weights
from dit_lora.guard.attach.skip_budget import SkipBudget
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.diagnosis import Diagnosis, Event, make_event
from dit_lora.guard.fallbacks import find_fallback
from dit_lora.guard.finite_gate import NonFiniteError, StepFailure
from dit_lora.guard.recovery import (
    BAD_STATE_KINDS,
    STATE_CAUSES,
    Action,
    Policy,
    RankDiagnosis,
    RecoveryHandler,
    format_diagnosis_lines,
)

_LOG = logging.getLogger("dit_lora")
BAD_WEIGHTS = "non_finite_weights"
ALTERED_FROZEN = "altered_frozen"
_FROZEN_HINT = (
    "steps since the last save may have used the damaged weights; if the loop itself changes them, leave frozen out "
    "of checks="
)
_COPIES_HINT = "; copies that the loop has made of them since, also in files, may have the bad values"
_OTHER_PROCESS_MESSAGE = (
    "this process's calls are finite when they are replayed; if processes sum their gradients, the cause is in "
    "another process"
)
_SAMPLE_CAUSES = ("data", "labels", "inputs")
_NON_LOSS_CAUSES = ("kernel", "attention_backend", "rank", *STATE_CAUSES)
_MAX_DIAGNOSED = 10
"""Consecutive failed steps that are diagnosed by experiments; after these, only state and inputs are checked."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class LoopFailure(StepFailure):
    """A failed step of an external training loop, with everything needed to diagnose it."""

    calls: Sequence[CapturedCall] = ()
    gradients: Sequence[str] = ()
    """Parameters with a bad gradient, if known."""
    controls: Mapping[int, CapturedCall] = field(default_factory=dict)
    """The last healthy call of each model, by the model's id."""
    has_nonfinite_weights: bool = False
    """True if a trained weight is not finite."""
    between_steps: bool = False
    """True if state was found bad at a save: no step is lost."""
    required: bool = False
    """True if the loop requires good state, so that failing to restore it raises an error."""
    raised_by_torch: bool = False
    """True if torch itself raises an error for this step right after."""

    def has_bad_weights(self, diagnoses: Sequence[Diagnosis]) -> bool:
        """True if weights or optimizer state are damaged, so that skipping the failed step is not enough."""
        if self.kind in BAD_STATE_KINDS or self.has_nonfinite_weights:
            return True
        return any(
            (diagnosis.cause in STATE_CAUSES or "not_finite" in diagnosis.evidence)
            and not diagnosis.evidence.get("frozen")
            for diagnosis in diagnoses
        )


@dataclass
class LoopRecovery(RecoveryHandler[LoopFailure, CapturedCall]):
    """Finds the cause of a failed step in an external training loop and acts on it, identically on all ranks."""

    # The guard cannot repeat a step of a loop that it does not run, nor take samples out of its data.
    unsupported_actions: ClassVar[frozenset[str]] = frozenset({"retry", "quarantine"})

    host: LoopProcessContext
    state: LoopState
    config: RecoveryConfig
    folder: Path | None
    watched: WatchedModels
    namer: SampleNamer
    on_event: Callable[[], None]
    """Called after an event was written and handled."""
    guard_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    budget: SkipBudget = field(default_factory=SkipBudget)
    has_given_up: bool = False
    """True once trained weights are bad and there is no snapshot to restore."""

    def __post_init__(self) -> None:
        self._policy = Policy(self.config)
        self._bundles = BundleWriter(self.host, self.config, self.folder)
        self._is_known_failure = False
        """True if the current step failed only because of samples already known to be bad."""
        self._is_independent = False
        self._can_stop = "stop" in self.config.on_nonfinite
        self._restored_buffers: list[str] = []
        """Buffers that were restored before the current step was diagnosed."""
        self._num_zero_gradients = 0
        self._num_logged = 0
        self._has_logged_scale = False

    def recover(self, failure: LoopFailure) -> bool:
        """Recover from a failed step. True if weights were restored.

        Raises:
            NonFiniteError: On every rank, if the recovery actions include `stop` and no other fits.
        """
        self._is_independent = self.host.is_independent
        with self.host.use_training_process_group():
            action = self.diagnose_and_recover(failure)
        self.on_event()
        return action.restored_step is not None

    @property
    def collective_forward(self) -> bool:
        return self.watched.collective_forward

    def diagnose_step(self, failure: LoopFailure) -> list[RankDiagnosis[CapturedCall]]:
        results = []
        for result in self._diagnose(failure):
            diagnosis = result.diagnosis
            # Other processes may have added to the gradients.
            if self._is_independent and diagnosis.cause == "transient":
                diagnosis = replace(diagnosis, cause="unknown", message=_OTHER_PROCESS_MESSAGE)
            results.append(replace(result, diagnosis=_add_bad_gradients(diagnosis, failure.gradients)))
        return results

    def gather_diagnoses(
        self, failure: LoopFailure, results: Sequence[RankDiagnosis[CapturedCall]]
    ) -> list[Diagnosis]:
        return super().gather_diagnoses(failure, results) or [
            make_missing_call_diagnosis(failure.step, self.host.rank)
        ]

    def choose_action(self, failure: LoopFailure, diagnoses: Sequence[Diagnosis]) -> Action:
        # A known bad sample needs neither a new action nor a new message.
        self._is_known_failure = not failure.has_bad_weights(diagnoses) and self.budget.has_known_causes(diagnoses)
        # Check this before known samples: while every step is lost, for any reason, nothing is trained.
        if self._can_stop and self.budget.has_too_many_lost_steps(self.config.max_skips):
            return Action("stop", reason=f"none of the last {self.budget.num_consecutive_lost} steps was taken")
        if self._is_known_failure or failure.raised_by_torch:
            return Action("skip")
        # In a guarded loop `max_skips` limits recent failures with new causes, not all skips.
        self._policy.skips = self.budget.count_recent_incidents(failure.step)
        if self._is_possibly_temporary_failure(failure, diagnoses):
            return Action("skip")
        # Samples that were named before; a second failure with other noise makes them the cause.
        skipped = [sample for event in self.events for sample in event["sample_ids"]]
        action = self._policy.choose_and_count_action(failure.step, diagnoses, skipped)
        # Without `stop` in `on_nonfinite` the loop must go on.
        if action.kind == "stop" and not self._can_stop and not failure.required:
            return Action("skip", reason=action.reason)
        return action

    def replace_impossible_action(
        self, failure: LoopFailure, action: Action, diagnoses: Sequence[Diagnosis]
    ) -> Action:
        """Replace a recovery action that needs a snapshot by a skip or stop, if no finite snapshot is held.

        Collective.
        """
        # Leaving out a step does not repair weights that are bad already.
        needs_snapshot = action.kind == "rollback" or (failure.has_bad_weights(diagnoses) and action.kind != "stop")
        if not needs_snapshot or self.state.find_newest_snapshot(self.host.gather_objects) is not None:
            return action
        hint = "" if self.state.interval_steps else ", because guard.snapshot_every is 0"
        reason = f"there is no finite snapshot{hint}"
        return Action("stop" if self._can_stop or failure.required else "skip", reason=reason)

    def write_replay_bundle(self, source: CapturedCall, event: Event) -> str | None:
        if self._is_known_failure:  # a known sample already has a bundle
            return None
        facts = self._make_bundle_facts(source)
        return self._bundles.write_call_bundle(source, event.to_record(), facts, is_shared=self.collective_forward)

    def write_gradient_bundle(
        self, calls: Sequence[CapturedCall], gradients: Mapping[str, torch.Tensor], dtype: torch.dtype, event: Event
    ) -> str | None:
        """Write a bundle of a step whose gradient is wrong. Returns its relative path, or None."""
        return self._bundles.write_gradient_step_bundle(
            calls, gradients, dtype, event.to_record(), self._make_bundle_facts(calls[0])
        )

    def _make_bundle_facts(self, source: CapturedCall) -> dict[str, Any]:
        # Record the switches that were off before this event's action.
        return {
            "switched_off": sorted(self.watched.disabled_names),
            "start_peak": self.watched.contexts[id(source.owner)].start_peak,
        }

    def apply_action(self, failure: LoopFailure, diagnoses: Sequence[Diagnosis], action: Action) -> Action:
        # Snapshots hold no frozen weights, so this can only be reported.
        if failure.kind == ALTERED_FROZEN and action.kind != "stop":
            return Action("report", description=_FROZEN_HINT, facts={"guard": self.guard_id})
        if action.kind == "skip" and not failure.between_steps:
            self.budget.count_skipped_step(failure.step, diagnoses)
        # A check between steps loses no step.
        elif not failure.between_steps:
            self.budget.count_lost_step(failure.step, diagnoses)
        # Restore before a stop too: the run must end with good weights.
        has_bad_state = failure.has_bad_weights(diagnoses)
        restored_step = self._restore_snapshot() if has_bad_state or action.kind == "rollback" else None
        if restored_step is None and action.kind == "rollback":
            reason = "the newest snapshot no longer fits the model"
            action = Action("stop" if self._can_stop or failure.required else "skip", reason=reason)
        buffers = [*self._restored_buffers, *self.state.restore_bad_buffers()]
        self._restored_buffers = []
        facts: dict[str, Any] = {"guard": self.guard_id} | ({"known": True} if self._is_known_failure else {})
        facts |= {"weights_of_step": restored_step} if restored_step is not None else {}
        # From here on no step is skipped.
        if has_bad_state and restored_step is None and action.kind != "stop":
            self.has_given_up = True
            outcome = f"{action.reason}: nothing can be restored, and the loop continues as it would without a guard"
            return replace(action, kind="report", description=outcome, facts=facts)
        undone_steps = ""
        if restored_step is not None:
            # Steps taken since the snapshot. The failed step itself was not taken.
            num_lost = failure.step - 1 - restored_step
            interval = f"; a snapshot is taken every {self.state.interval_steps} steps" if num_lost else ""
            undone_text = "1 step is undone" if num_lost == 1 else f"{num_lost} steps are undone"
            undone_steps = f"weights and optimizer are those of step {restored_step}, {undone_text}{interval}"
            undone_steps += _COPIES_HINT if failure.between_steps else ""
        outcome = undone_steps if action.kind == "stop" else self._finish_action(failure, action, undone_steps)
        if buffers:
            outcome += f"; restored, because they were not finite: {', '.join(buffers[:5])}"
        # A sample known to be bad needs no new message.
        self._num_logged += not self._is_known_failure
        # After the first ten, show those whose number is a power of two.
        is_shown = self._num_logged <= _MAX_SHOWN or self._num_logged & (self._num_logged - 1) == 0
        should_log = not self._is_known_failure and is_shown
        return replace(action, description=outcome, facts=facts, restored_step=restored_step, should_log=should_log)

    def write_event(self, event: Event) -> None:
        self.events.append(event.to_record())
        if self.folder is None or self.host.rank != 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_line(self.folder / "events.jsonl", json.dumps(self.events[-1]))
        except OSError as error:
            self.log(f"guard: cannot write {self.folder}/events.jsonl: {error.strerror}")
            self.folder = None

    def make_stop_error(
        self, failure: LoopFailure, diagnoses: Sequence[Diagnosis], action: Action, event: Event
    ) -> NonFiniteError:
        state = "do not use the weights"
        if action.restored_step is not None or not failure.has_bad_weights(diagnoses):
            step = failure.step - 1 if action.restored_step is None else action.restored_step
            state = action.description or "the weights are those of the step before"
            if not self.host.uses_deepspeed:  # its engine holds them
                folder = self.folder if self.folder is not None else self.host.folder
                weights = {name: p.detach() for name, p in self.state.parameters.items()}
                location = save_trained_weights(weights, folder, step, is_main=self.host.rank == 0)
                state += f"; {location}" if location else ""
        if failure.kind == ALTERED_FROZEN:
            state += f"; {_FROZEN_HINT}"
        self.on_event()
        head = f"guard: step {failure.step}: {format_event_kind(failure.kind)}"
        message = f"{head}; {state}; stopped: {action.reason}"
        return NonFiniteError(format_list(message, self.format_diagnoses(diagnoses)), event.to_record())

    def log(self, message: str) -> None:
        self.host.log(message)

    def format_diagnoses(self, diagnoses: Sequence[Diagnosis]) -> list[str]:
        named = []
        for diagnosis in diagnoses:
            names = list(diagnosis.sample_ids)
            # Loops without a DataLoader have no dataset index that could be missing.
            if self.namer.batches.has_batches:
                names = [f"{n} (its dataset index is not known)" if is_micro_batch_row(n) else n for n in names]
            named.append(diagnosis.replace_sample_ids(tuple(names)))
        return format_diagnosis_lines(named, is_single_rank=self.host.num_ranks == 1)

    # Reports on steps that are taken

    def report_nonfinite_save(self, step: int, path: str, bad: str) -> None:
        """Report that the loop is about to save values that are not finite."""
        message = f"{path or 'a file'} is saved with values that are not finite: {bad}"
        self._report(step, "non_finite_save", message)

    def report_zero_gradient(self, step: int) -> None:
        """Report that no trained weight got a gradient though the loss asks for one. The step is taken."""
        self._num_zero_gradients += 1
        count = self._num_zero_gradients
        if self._can_stop and count > self.config.max_skips:
            message = f"no gradient reached a trained weight in {count} steps in a row, though the loss asks for one"
            event = self._report(step, "zero_gradient", message, action="stop")
            hint = "to continue, leave zero_gradient out of checks="
            raise NonFiniteError(f"guard: step {step}: {message} ({hint})", event.to_record())
        # Report at powers of ten, not at every step.
        if count in (1, 10, 100, 1000):
            count_text = f" in {count} steps in a row" if count > 1 else ""
            message = f"no gradient reached a trained weight{count_text}, though the loss asks for one"
            self._report(step, "zero_gradient", message)

    def reset_zero_gradients(self) -> None:
        self._num_zero_gradients = 0

    def report_low_loss_scale(self, step: int, scale: float) -> None:
        """Report that a gradient scaler has lowered its loss scale until gradients no longer fit fp16.

        Raises:
            NonFiniteError: If the recovery actions include `stop`.
        """
        message = f"gradients overflow fp16 at every loss scale down to {scale:g}; use bf16, or a lower learning rate"
        if self._can_stop:
            event = self._report(step, "loss_scale", message, action="stop")
            raise NonFiniteError(f"step {step}: {message}", event.to_record())
        if not self._has_logged_scale:
            self._has_logged_scale = True
            self._report(step, "loss_scale", message)

    def report_nonfinite_loss(self, failure: LoopFailure, *, is_on_this_rank: bool) -> None:
        """Report why a rank's loss is not finite though every gradient is. The step is taken. Collective."""
        with self.host.use_training_process_group():
            results = self._diagnose(failure)
            # If this rank's loss is finite, its own replays explain nothing; those made with all ranks still count.
            if not is_on_this_rank and not self.collective_forward:
                results = []
            diagnoses = self.gather_diagnoses(failure, results)
        for diagnosis in diagnoses:
            event = make_event(failure.step, failure.kind, diagnosis, "report", 0.0)
            self.write_event(replace(event, facts={"guard": self.guard_id}))
        head = f"guard: step {failure.step}: the loss is not finite, but every gradient is; the step was taken"
        self.log(format_list(head, self.format_diagnoses(diagnoses)))

    def restore_snapshot_on_this_rank(self, step: int) -> None:
        """Restore the newest good snapshot on this rank, which is about to save bad weights. Not collective.

        If other ranks have bad weights too, they find them at their next step and restore the same snapshot.
        """
        diagnosis = diagnose_state(self.watched, BAD_WEIGHTS, step, self.host.rank)
        restored_step = self._restore_snapshot(list)
        if restored_step is None or diagnosis is None:
            return  # the saved values are checked in any case
        event = make_event(step, BAD_WEIGHTS, diagnosis, "rollback", 0.0)
        self.write_event(replace(event, facts={"guard": self.guard_id, "weights_of_step": restored_step}))
        head = f"guard: rank {self.host.rank} was about to save weights that are not finite: {diagnosis.message}"
        _LOG.warning("%s; the weights of step %d are saved instead", head, restored_step)

    def _report(self, step: int, kind: str, message: str, *, action: str = "report") -> Event:
        diagnosis = {"cause": "unknown", "words": message}
        event = Event(step, kind, diagnosis, action, rank=self.host.rank, facts={"guard": self.guard_id})
        self.write_event(event)
        if action != "stop":
            self.log(f"guard: step {step}: {message}")
        return event

    def _diagnose(self, failure: LoopFailure) -> list[RankDiagnosis[CapturedCall]]:
        step, rank = failure.step, self.host.rank
        # Check the state first: with bad weights every call fails, whatever the samples.
        state = diagnose_state(self.watched, failure.kind, step, rank)
        record = self.watched.frozen_record
        bad_frozen = state.evidence.get("frozen", []) if state is not None else []
        # Tensors that the model or the loop itself writes to are not the cause.
        is_written = record is not None and bool(bad_frozen) and all(map(record.is_changed_by_loop, bad_frozen))
        if state is not None and not is_written:
            # A loop that writes to weights itself may have spoiled them with a bad sample of this step.
            if _are_weights_all_nan(state) and not self.collective_forward:
                diagnoser = CallDiagnoser(self.watched, self.namer, failure.kind, step)
                if inputs := diagnoser.find_bad_samples(failure.calls, failure.controls, rank):
                    return inputs
            return [RankDiagnosis(state)]
        if failure.kind in (*BAD_STATE_KINDS, ALTERED_FROZEN):
            # Without a finding here, another rank has the bad state.
            return [RankDiagnosis(state)] if state is not None else []
        # NaN that the failed forward left in a buffer would make every replay fail.
        self._restored_buffers = self.state.restore_bad_buffers()
        calls: Sequence[CapturedCall] = failure.calls
        if self.collective_forward:
            calls = [self.namer.add_proven_names(call) for call in calls]
        diagnoser = CallDiagnoser(
            self.watched,
            # Ranks that diagnose together must find the same names, so they use only those stored in the calls.
            SampleNamer(LoadedBatches()) if self.collective_forward else self.namer,
            failure.kind,
            step,
            is_raised_by_torch=failure.raised_by_torch,
            runs_experiments=self.budget.num_consecutive_lost < _MAX_DIAGNOSED,
        )
        results = [
            entry
            for rank_calls in self.watched.gather_calls_to_diagnose(calls, failure.controls)
            for entry in diagnoser.diagnose_micro_batches(rank_calls)
        ]
        if state is None:
            return results or [RankDiagnosis(make_missing_call_diagnosis(step, rank))]
        # A bad sample leaves NaN in a buffer that the model writes to. Report the buffer only if no sample is bad.
        sample_results = [entry for entry in results if entry.diagnosis.cause in _SAMPLE_CAUSES]
        if sample_results:
            return sample_results
        # The buffer is not damaged: it holds a call's bad values.
        message = state.message.replace("; the checkpoint or memory is damaged", "; the model itself writes to it")
        return [RankDiagnosis(replace(state, cause="unknown", message=message, evidence={}))]

    def _is_possibly_temporary_failure(self, failure: LoopFailure, diagnoses: Sequence[Diagnosis]) -> bool:
        """True if the step after a failed one may be healthy, because the failure is not tied to a sample.

        If no sample is named, or every sample fails, a replay cannot show whether only this step fails. A loop in fp16
        expects to lose some steps to its range.
        """
        # Nothing ties the failure to a sample, so the next step may well be healthy.
        is_general = all(
            diagnosis.evidence.get("every_sample")
            or diagnosis.evidence.get("of_the_loop")
            or diagnosis.cause == "precision"
            or (diagnosis.cause in ("inputs", "unknown") and not diagnosis.sample_ids)
            for diagnosis in diagnoses
        )
        allowed = "skip" in self.config.on_nonfinite and self._policy.skips < self.config.max_skips
        return is_general and allowed and not failure.has_bad_weights(diagnoses)

    def _restore_snapshot(self, gather: Callable[[Sequence[str]], list[str]] | None = None) -> int | None:
        """Restore weights from the newest good snapshot and return its step; None if none fits.

        Collective, unless `gather` asks only this rank.
        """
        step = self.state.find_newest_snapshot(gather or self.host.gather_objects)
        if step is None:
            return None
        try:
            self.state.restore_snapshot(step)
        except DitLoraError as problem:  # a tensor has changed its shape or dtype
            self.host.log(f"guard: {problem}")
            return None
        return step

    def _finish_action(self, failure: LoopFailure, action: Action, undone_steps: str) -> str:
        if action.kind == "fallback":
            fallbacks = [fallback for context in self.watched.contexts.values() for fallback in context.fallbacks]
            for name in action.fallbacks:
                find_fallback(fallbacks, name).disable()
                self.watched.disabled_names.add(name)
            disabled_text = f"{', '.join(action.fallbacks)} switched off for this run"
            return f"{disabled_text}; {undone_steps or 'the step was not taken'}"
        if action.kind == "rollback" and action.should_lower_lr:
            self.state.scale_learning_rates(self.config.rollback_lr)
            return f"{undone_steps}; learning rates are multiplied by {self.config.rollback_lr:g}"
        if failure.raised_by_torch:
            return "torch raises an error for this step"
        return undone_steps or "the step was not taken"


def _are_weights_all_nan(diagnosis: Diagnosis) -> bool:
    """True if several trained weights contain only NaN, as after an update with a NaN gradient."""
    matches = [
        # Matches "name has 12 NaN among 12 values" and captures both numbers.
        re.search(r"has (\d+) NaN among (\d+)", line)
        for line in diagnosis.evidence.get("not_finite", ())
    ]
    # Tensors in which every value is NaN.
    all_nan = [match for match in matches if match is not None and match[1] == match[2]]
    return diagnosis.cause == "weights" and len(all_nan) > 1


def _add_bad_gradients(diagnosis: Diagnosis, names: Sequence[str]) -> Diagnosis:
    """Add the parameters with bad gradients to a diagnosis, unless a replay has found the module."""
    if not names or diagnosis.cause in (*_NON_LOSS_CAUSES, *_SAMPLE_CAUSES):
        return diagnosis
    diagnosis = replace(diagnosis, evidence={**diagnosis.evidence, "gradients": list(names[:20])})
    if diagnosis.module is not None:
        return diagnosis
    message = f"{diagnosis.message}; the gradient of {names[0]}{format_remaining_count(names)} was not finite"
    return replace(diagnosis, message=message, module=names[0].rpartition(".")[0])
