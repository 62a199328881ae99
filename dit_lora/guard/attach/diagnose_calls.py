"""Find the cause of a failed step in any training loop: check state and inputs first, then run experiments.

A sample is named only if the failing tensor is proven to belong to it (`samples/loaded_batches.py`). Values that come
from outside the model, such as the gradient of its output, prove nothing about a sample. An experiment that raises has
no result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite
from typing import Any

import torch

from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.calls.call_batch import RecordedCallMicroBatch
from dit_lora.guard.attach.calls.call_rows import SamplePart, iter_sample_parts
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.calls.gather_calls import RankCalls
from dit_lora.guard.attach.containment import try_call
from dit_lora.guard.attach.experiments import preserve_model_and_rng_state
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.samples.loaded_batches import describe_values, find_bad_rows
from dit_lora.guard.attach.samples.row_names import format_row_name
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.recovery import RankDiagnosis
from dit_lora.guard.replay import MicroBatch, replay_micro_batch
from dit_lora.guard.state_checks import diagnose_diverged_weights, find_bad_state
from dit_lora.numerics.objectives import LossOutput

BAD_LOSS_MESSAGE = (
    "the model's output is finite, but the gradient of the output is not: the cause is a target, another model or the "
    "loop's loss computation"
)
_FINITE_GRADIENT_MESSAGE = (
    "the model's output and the gradient of the output are finite: the cause is the loop's loss computation, or "
    "another output of the model"
)
_DOUBLE_BACKWARD_MESSAGE = (
    "not replayed: the loop differentiates through this call's gradient (create_graph=True), which a replay of the "
    "call cannot repeat"
)
_MANY_FAILURES_MESSAGE = "not replayed: too many consecutive steps have failed"
_OVERWRITTEN_MESSAGE = "not replayed: the call's inputs have been overwritten in place"


class _EmptyBatch(MicroBatch):
    """Placeholder for a micro-batch when only weights and optimizer state are diagnosed. It cannot be replayed."""

    def forward(self) -> LossOutput:
        raise DitLoraError("there is nothing to replay")

    def select_sample(self, index: int) -> MicroBatch:
        raise DitLoraError("there is nothing to replay")


def diagnose_state(watched: WatchedModels, kind: str, step: int, rank: int) -> Diagnosis | None:
    """Check every model's weights and optimizer state for bad values; None if all are finite."""
    placeholder = _EmptyBatch(ids=(), step=step, micro_step=0, rank=rank, tensors={})
    diagnosis = find_bad_state(placeholder, watched.joint_context)
    if diagnosis is None and kind == "diverged_weights":
        return diagnose_diverged_weights(placeholder, watched.joint_context)
    return diagnosis


@dataclass
class CallDiagnoser:
    """Diagnoses the recorded model calls of one failed step of a loop."""

    watched: WatchedModels
    namer: SampleNamer
    kind: str
    step: int
    is_raised_by_torch: bool = False
    """True if torch has raised or will raise an error for this step, possibly in the middle of its backward."""
    runs_experiments: bool = True
    """False to run no experiments, after many failed steps in a row."""

    def diagnose_micro_batches(self, rank_calls: RankCalls) -> list[RankDiagnosis[CapturedCall]]:
        """Diagnose each micro-batch that has non-finite values, or all if none has. Collective for sharded models."""
        # A call without an output ended in an error, or its step is over.
        calls = [call for call in rank_calls.calls if call.outputs]
        # Calls are in order, so those of a micro-batch are neighbours, as groupby needs.
        groups = [list(group) for _, group in groupby(calls, lambda call: call.micro_step)]
        bad_groups = [group for group in groups if any(not call.has_finite_output for call in group)]
        # A bad output explains the bad gradients that other calls of the step get.
        if not bad_groups:
            bad_groups = [group for group in groups if any(call.has_bad_gradient for call in group)]
        # Without any bad values, all micro-batches are diagnosed.
        return [self._diagnose_micro_batch(group, rank_calls) for group in bad_groups or groups]

    def find_bad_samples(
        self, calls: Sequence[CapturedCall], controls: Mapping[int, CapturedCall], rank: int
    ) -> list[RankDiagnosis[CapturedCall]]:
        """Samples that were already non-finite when loaded: names and descriptions. Replays nothing."""
        results = []
        for call in calls:
            diagnosis = self._diagnose_inputs(call, controls.get(id(call.owner)), rank)
            if diagnosis is None or diagnosis.cause != "data":
                items = self.namer.find_bad_items(call, 0)
                if not items:
                    continue
                diagnosis = self._make_diagnosis(call, rank, "data", _format_descriptions(items), tuple(items), {})
            results.append(RankDiagnosis(_add_model_name(diagnosis, self.watched.prefixes[id(call.owner)]), call))
        return results

    def _diagnose_micro_batch(
        self, group: Sequence[CapturedCall], rank_calls: RankCalls
    ) -> RankDiagnosis[CapturedCall]:
        """Diagnose the model call in which the non-finite values of one micro-batch start.

        A model's output is the next model's input; gradients flow in the opposite direction.
        """
        bad_output = next((call for call in group if not call.has_finite_output), None)
        if bad_output is not None:
            return self._diagnose_call(bad_output, rank_calls)
        # Only the last model's output gradient comes from the loss; others get theirs from a later model.
        result = self._diagnose_call(group[-1], rank_calls, is_last=True)
        # The backward runs from the last model to the first: if a model is healthy, examine the one before it.
        for call in reversed(group[:-1]):
            if result.diagnosis.cause != "transient":
                break
            result = self._diagnose_call(call, rank_calls)
        return result

    def _diagnose_call(
        self, call: CapturedCall, rank_calls: RankCalls, *, is_last: bool = False
    ) -> RankDiagnosis[CapturedCall]:
        control = rank_calls.controls.get(id(call.owner))
        diagnosis = self._diagnose_inputs(call, control, rank_calls.rank)
        # torch raises in the middle of a backward, so the gradient may not have reached the output.
        has_failed_before = self.is_raised_by_torch and not call.has_gradient
        # The output is good and the loss is not: the fault lies after the output.
        is_loss_failure = self.kind == "non_finite_loss" and call.has_finite_output
        if diagnosis is None and is_last and (has_failed_before or is_loss_failure or call.has_bad_gradient):
            diagnosis = self._diagnose_loss(call, rank_calls.rank)
        if diagnosis is None:
            diagnosis = self._diagnose_by_experiments(call, control, rank_calls.rank)
        return RankDiagnosis(_add_model_name(diagnosis, self.watched.prefixes[id(call.owner)]), call)

    def _diagnose_inputs(self, call: CapturedCall, control: CapturedCall | None, rank: int) -> Diagnosis | None:
        """Diagnosis if the batch is empty or an argument has bad values; None if the inputs are good."""
        if call.num_samples == 0:
            return self._make_diagnosis(call, rank, "inputs", "the batch has no samples", (), {})
        tolerated = {part.path for part in _find_nonfinite_sample_parts(control)} if control else set()
        # Ignore arguments in which a healthy call had bad values too, such as masks of -inf.
        bad = [part for part in _find_nonfinite_sample_parts(call) if part.path not in tolerated]
        if not bad:
            return None
        samples: dict[str, str] = {}
        unnamed: dict[str, str] = {}
        for part in bad:
            name = self.namer.find_sample_name(call, part)
            description = describe_values(part.path, part.values)
            if name is not None:
                samples.setdefault(name, description)
            elif part.row is not None and sum(candidate.path == part.path for candidate in bad) < part.num_parts:
                unnamed.setdefault(format_row_name(part.row, call.micro_step), description)
            else:  # every row is bad, so no single row is named
                unnamed.setdefault("", description)
        if unnamed and not samples:
            # The bad rows of the call have to match as many bad items of its batch.
            rows = {part.row for part in bad if part.row is not None}
            samples = self.namer.find_bad_items(call, len(rows))
        # A row number within a ready batch says little; name its file where that is proven.
        samples = self.namer.use_file_names(samples, bad)
        evidence = {"inputs": [describe_values(part.path, part.values) for part in bad[:20]]}
        if samples:
            return self._make_diagnosis(call, rank, "data", _format_descriptions(samples), tuple(samples), evidence)
        message = _format_descriptions(unnamed)
        # The value is an output of an earlier step, so nothing in this batch made it.
        if any(self.watched.log.is_earlier_output(part.values) for part in bad):
            message += "; it was carried over from an earlier call"
            return self._make_diagnosis(call, rank, "unknown", message, (), evidence)
        # An empty name stands for an argument that is bad in all rows.
        named_rows = tuple(name for name in unnamed if name)
        return self._make_diagnosis(call, rank, "inputs", message, named_rows, evidence)

    def _diagnose_loss(self, call: CapturedCall, rank: int) -> Diagnosis:
        """Diagnosis of a model call whose output is finite and whose output gradient is not: the loss is the cause."""
        rows = call.bad_gradient_rows
        evidence: dict[str, Any] = {"of_the_loop": True, "rows_with_bad_gradient": rows[:50]}
        items = self.namer.find_bad_items(call, len(rows))
        if items:
            return self._make_diagnosis(call, rank, "data", _format_descriptions(items), tuple(items), evidence)
        message = BAD_LOSS_MESSAGE
        peak = call.gradient_peak
        if call.has_gradient and not call.has_bad_gradient:
            return self._make_diagnosis(call, rank, "unknown", _FINITE_GRADIENT_MESSAGE, (), evidence)
        if not call.has_gradient:
            message = "the backward failed in the loss, before it reached the model's output"
        elif isfinite(peak):
            message = f"the gradient from the loss reaches {peak:.3g}, whose square overflows fp32 in the optimizer"
        return self._make_diagnosis(call, rank, "unknown", message, (), evidence)

    def _diagnose_by_experiments(self, call: CapturedCall, control: CapturedCall | None, rank: int) -> Diagnosis:
        if not self.runs_experiments:
            return self._make_diagnosis(call, rank, "unknown", _MANY_FAILURES_MESSAGE, (), {})
        if call.is_differentiated_twice:
            return self._make_diagnosis(call, rank, "unknown", _DOUBLE_BACKWARD_MESSAGE, (), {})
        if not call.has_unmodified_arguments:
            return self._make_diagnosis(call, rank, "unknown", _OVERWRITTEN_MESSAGE, (), {})
        # A control whose inputs were overwritten is no longer the healthy call.
        if control is not None and not control.has_unmodified_arguments:
            control = None
        with preserve_model_and_rng_state(self.watched.all_models()):
            if self.watched.collective_forward:
                # All ranks run this together: a rank that gave up would leave the others waiting.
                return self._run_experiments(call, control, rank)
            failure: list[str] = []
            diagnosis = try_call(
                lambda: self._run_experiments(call, control, rank),
                on_error=lambda error: failure.append(f"{type(error).__name__}: {error}"),
            )
        if diagnosis is not None:
            return diagnosis
        reason = failure[0].strip().splitlines()[0]
        reason = reason if len(reason) <= 120 else f"{reason[:117]}..."
        message = f"no cause found: the call cannot be replayed by itself ({reason})"
        return self._make_diagnosis(call, rank, "unknown", message, (), {})

    def _run_experiments(self, call: CapturedCall, control: CapturedCall | None, rank: int) -> Diagnosis:
        context = self.watched.contexts[id(call.owner)]

        def make_micro_batch(captured: CapturedCall, step: int) -> MicroBatch:
            return RecordedCallMicroBatch.from_call(
                captured, context.model, step=step, micro_step=call.micro_step, rank=rank, failed_call=call
            )

        healthy = None
        if control is not None:
            # Row numbers of different batches do not correspond, so tell an earlier step's rows apart.
            row_names = control.sample_names or tuple(f"{name} of an earlier step" for name in control.ids)
            # `failed_call` lets the control run with the failed call's random state.
            healthy = make_micro_batch(replace(control, sample_names=row_names), self.step - 1)
        failed = make_micro_batch(call, self.step)
        diagnosis = diagnose(failed, context, kind=self.kind, control=healthy)
        if diagnosis.cause == "precision":
            diagnosis = _add_failing_rows(diagnosis, failed, healthy, context.model)
        # A model with batch norm cannot run a single sample. Exchange one row at a time instead.
        if diagnosis.cause == "unknown":
            name = None
            if not diagnosis.evidence.get("every_sample") and not self.watched.collective_forward:
                name = try_call(lambda: self.namer.find_row_by_replacement(call, context.model))
            if name is None:
                return replace(diagnosis, sample_ids=())
            # The replay appends "; first nan in the forward: <op> at <module>" to its message; keep that.
            _, separator, first_bad_value = diagnosis.message.partition("; first ")
            message = f"it is healthy if another sample replaces this one{separator}{first_bad_value}"
            return replace(diagnosis, cause="inputs", message=message, sample_ids=(name,))
        if not diagnosis.sample_ids:
            return diagnosis
        # The experiments know rows only; find out which samples these are.
        names = self.namer.name_failing_rows(call, control, diagnosis.sample_ids, context.model, failed)
        return diagnosis.replace_sample_ids(names)

    def _make_diagnosis(
        self,
        call: CapturedCall,
        rank: int,
        cause: Any,
        message: str,
        sample_ids: tuple[str, ...],
        evidence: Mapping[str, Any],
    ) -> Diagnosis:
        return Diagnosis(
            cause,
            message,
            step=self.step,
            rank=rank,
            micro_step=call.micro_step,
            sample_ids=sample_ids,
            evidence=dict(evidence),
        )


def make_missing_call_diagnosis(step: int, rank: int) -> Diagnosis:
    message = "no call of a watched model led to these gradients, so there is nothing to replay"
    return Diagnosis("unknown", message, step, rank)


def _find_nonfinite_sample_parts(call: CapturedCall) -> list[SamplePart]:
    """Parts of a call's arguments with values that are not finite or whose square overflows fp32."""
    if not call.has_unmodified_arguments:  # overwritten arguments are no longer those of the call
        return []
    return [
        part
        for parts in iter_sample_parts(call.arguments)
        for part in parts
        if part.values.is_floating_point() and find_bad_rows(part.values.reshape(1, -1))
    ]


def _add_failing_rows(
    diagnosis: Diagnosis, failed: MicroBatch, healthy: MicroBatch | None, model: torch.nn.Module
) -> Diagnosis:
    """Add to a diagnosis the samples that fail when run individually, unless every sample does."""

    def is_replay_nonfinite(micro_batch: MicroBatch) -> bool:
        return not replay_micro_batch(micro_batch, model).is_healthy(needs_gradient=False)

    # Run every sample by itself.
    singles = [failed.select_sample(row) for row in range(len(failed.ids))]
    failing = [single for single in singles if is_replay_nonfinite(single)]
    # If every sample fails, and a healthy one of the step before too, none of them is the cause.
    if len(failing) == len(singles) and (healthy is None or is_replay_nonfinite(healthy.select_sample(0))):
        return diagnosis
    return replace(diagnosis, sample_ids=tuple(single.ids[0] for single in failing))


def _add_model_name(diagnosis: Diagnosis, prefix: str) -> Diagnosis:
    """Prefix the message of a diagnosis with the model's name, if there are several models."""
    if not prefix or diagnosis.cause == "transient":
        return diagnosis
    # A prefix is a model's name with a dot, as in the names of its parameters.
    message = f"{prefix.removesuffix('.')}: {diagnosis.message}"
    module = None if diagnosis.module is None else prefix + diagnosis.module
    return replace(diagnosis, message=message, module=module)


def _format_descriptions(descriptions: Mapping[str, str]) -> str:
    """Format descriptions of bad samples as one text; names are omitted if there is only one sample."""
    if len(descriptions) == 1:
        return next(iter(descriptions.values()))
    return "; ".join(
        f"{name}: {description}" if name else description for name, description in list(descriptions.items())[:20]
    )
