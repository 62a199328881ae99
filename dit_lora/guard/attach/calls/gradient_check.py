"""Check gradients of any training loop, whose loss function is not known, by replaying the step's model calls.

Each recorded call has the gradient G of its output. The sum of output * G over all calls has the same gradient with
respect to the weights as the loss, as far as the loss depends on them through these outputs. So its slope must agree
with the backward pass of the models, whatever the loss is. This finds faults of forward and backward passes. What a
loop does with gradients (clipping, scaling, penalties on weights) is its own business, with one exception: a gradient
that exactly contains that of the step before was not cleared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.experiments import preserve_model_and_rng_state
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.diagnosis import Event
from dit_lora.guard.gradient_check.cause import (
    ReplayableStep,
    WrongGradientCause,
    build_diagnosis_record,
    find_gradient_cause,
    sample_gradient_elements,
)
from dit_lora.guard.gradient_check.check import MAX_REPLAY_DIFFERENCE, GradientReport
from dit_lora.guard.gradient_check.directions import select_exact_parameters
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.gradient_check.slopes import TOLERANCES
from dit_lora.guard.replay import MicroBatch, get_cuda_devices, preserve_gradients
from dit_lora.numerics.objectives import LossOutput

EVENT_KIND = "gradient_check"
_MAX_CALLS = 32
"""Calls of a step that are replayed: a check runs each of them 25 times or more."""
_MAX_RESIDUAL = 0.05
"""Share of this step's gradient that a stale gradient may leave unexplained: it is an exact sum."""
_ON_PURPOSE = "; if the model detaches or estimates a gradient on purpose, this is expected"

GradientBundleWriter = Callable[[Sequence[CapturedCall], Mapping[str, torch.Tensor], torch.dtype, Event], str | None]
"""Writes the bundle of a wrong gradient: calls, gradients by parameter, the lowest precision, the event."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputGradientMicroBatch(MicroBatch):
    """A recorded call as a micro-batch whose loss is the sum of output * recorded gradient, plus a constant."""

    call: CapturedCall
    model: nn.Module
    num_calls: int

    def forward(self) -> LossOutput:
        # Counters and buffers of the model must be the same at every evaluation.
        with preserve_model_and_rng_state([self.model]):
            outputs = self.call.rerun_model_call(self.model)
        terms = []
        for output, recorded, gradient in zip(outputs, self.call.outputs, self.call.output_gradients, strict=True):
            if gradient is None:
                continue
            wide_gradient = gradient.double()
            # In fp64: the sum over an output must not add rounding to that of the model.
            change = wide_gradient * (output.double() - recorded.double())
            # A constant as large as a loss would be: relative step sizes are chosen from it.
            scale = wide_gradient.norm() * recorded.double().norm() + wide_gradient.norm()
            # (B, ...) -> (B,). A scalar output counts as one sample.
            sums = change.reshape(len(change), -1).sum(1) if change.ndim else change[None]
            terms.append(sums + scale / len(sums))
        joined = torch.cat(terms)
        # A step's loss is the mean over its micro-batches' means; here it is a sum over all calls.
        losses = joined * (len(joined) * self.num_calls)
        return LossOutput(losses, torch.full((len(losses),), -1))

    def select_sample(self, index: int) -> "OutputGradientMicroBatch":
        raise NotImplementedError("gradients are checked over whole steps")

    def reproduces_recorded_output(self, tolerance: float) -> bool:
        """True if the call, run again without gradients, has the recorded outputs up to rounding."""
        with torch.no_grad(), preserve_model_and_rng_state([self.model]):
            outputs = self.call.rerun_model_call(self.model)
        if len(outputs) != len(self.call.outputs):
            return False
        return all(
            output.shape == recorded.shape
            and bool((output.double() - recorded.double()).norm() <= tolerance * recorded.double().norm())
            for output, recorded in zip(outputs, self.call.outputs, strict=True)
        )


class LoopGradientCheck:
    """Checks gradients of a loop's steps before they are taken. The loop's weights and gradients stay as they are."""

    def __init__(
        self,
        host: LoopProcessContext,
        watched: WatchedModels,
        interval_steps: int,
        write: Callable[[Event], None],
        write_bundle: GradientBundleWriter,
    ) -> None:
        self._host = host
        self._watched = watched
        self._interval_steps = interval_steps
        self._write = write
        self._write_bundle = write_bundle
        self._is_first = True
        """True until a step with recorded calls was checked."""
        self._has_agreed = False
        self._logged_reasons: set[str] = set()
        self._previous: tuple[int, int, torch.Tensor] | None = None
        """Number, generation of gradients and sampled gradient of the step before one that is due."""

    def check_step(self, step: int, calls: Sequence[CapturedCall], cleared_names: Sequence[str]) -> None:
        """Check a step's gradient if it is due, and report a wrong one. Errors are for the caller to contain.

        Args:
            step: The step's number.
            calls: The model calls that its gradients come from.
            cleared_names: Names of the parameters whose gradients the loop must have cleared since the step before.
        """
        parameters = self._trained_parameters()
        names = [name for name in cleared_names if name in parameters]
        generation = self._watched.log.generation
        previous = None
        # Only if the guard has not seen that the loop cleared its gradients: clipping by value makes steps alike too.
        if self._previous is not None and self._previous[:2] == (step - 1, generation):
            previous = self._previous[2]
        self._previous = None
        if names and self._is_due(step + 1) and not self._has_sparse_gradients():
            self._previous = (step, generation, sample_gradient_elements(parameters[name] for name in names))
        if not self._is_due(step):
            return
        reason = self._find_replay_obstacle(calls)
        if reason is None:
            self._is_first = False
            reason = self._check_and_report_gradient(step, calls, names, previous)
        if reason is not None and reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            self._host.log(f"guard: step {step}: the gradient cannot be checked: {reason} (shown once)")

    def _is_due(self, step: int) -> bool:
        return self._is_first or step % self._interval_steps == 0

    def _trained_parameters(self) -> dict[str, torch.Tensor]:
        model = self._watched.joint_context.model
        return select_exact_parameters({name: p for name, p in model.named_parameters() if p.requires_grad})

    def _has_sparse_gradients(self) -> bool:
        gradients = [p.grad for p in self._trained_parameters().values() if p.grad is not None]
        return any(gradient.layout is not torch.strided for gradient in gradients)

    def _find_replay_obstacle(self, calls: Sequence[CapturedCall]) -> str | None:
        """Why a step's calls cannot be replayed, or would prove nothing; None if they can."""
        if self._host.num_ranks > 1 or self._watched.collective_forward:
            return "this loop runs in several processes"
        # The other parameters have no gradient yet.
        if torch._C._current_graph_task_id() != -1:
            return "the optimizer takes its steps inside the backward pass"
        if self._has_sparse_gradients():
            return "gradients are sparse"
        hooked = [name for name, p in self._trained_parameters().items() if p._backward_hooks]
        if hooked:
            return f"a hook of the loop may change gradients: {hooked[0]}"
        if not calls or not all(call.has_gradient and call.has_finite_output for call in calls):
            return "its gradients come from no recorded model call"
        if len(calls) > _MAX_CALLS:
            return f"a step calls its models more than {_MAX_CALLS} times"
        if any(call.is_differentiated_twice for call in calls):
            return "the loop differentiates gradients (create_graph=True)"
        if not all(call.has_unmodified_arguments for call in calls):
            return "inputs of a model call were overwritten since"
        if any(tensor.is_complex() for tensor in _list_tensors(calls)):
            return "outputs or weights are complex"
        return None

    def _check_and_report_gradient(
        self, step: int, calls: Sequence[CapturedCall], names: Sequence[str], previous: torch.Tensor | None
    ) -> str | None:
        """Check a step, log and write the result. Returns a reason if nothing can be said."""
        model = self._watched.joint_context.model
        dtypes = {tensor.dtype for tensor in _list_tensors(calls) if tensor.is_floating_point()}
        dtypes |= {dtype for call in calls for _, dtype in call.autocasts}
        if not dtypes <= TOLERANCES.keys():
            return f"{', '.join(sorted(str(dtype) for dtype in dtypes - TOLERANCES.keys()))} is not supported"
        dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        batches = [make_micro_batch(call, step, len(calls)) for call in calls]
        replayable = ReplayableStep(batches, model, dtype)
        with (
            preserve_model_and_rng_state(self._watched.all_models()),
            torch.random.fork_rng(get_cuda_devices(model)),
            # A loop may take its steps inside `no_grad`.
            torch.enable_grad(),
        ):
            if not all(batch.reproduces_recorded_output(MAX_REPLAY_DIFFERENCE[dtype]) for batch in batches):
                return "a model call has another output when it is run again"
            with preserve_gradients(model):
                replayable.run_backward()
                report = check_step_gradient(replayable)
                finding = WrongGradientCause("unknown", "")
                gradients: dict[str, torch.Tensor] = {}
                if report.result == "differs":
                    finding = find_gradient_cause(replayable, report, self._watched.joint_context)
                    # The loop gets its own gradients back below.
                    gradients = _copy_gradients(model)
            if (
                report.result == "agrees"
                and previous is not None
                and _includes_previous_gradient(replayable, names, previous)
            ):
                message = "the gradient contains that of the step before, which was not cleared"
                report = GradientReport("differs", (), report.num_evaluations, reason=message)
                finding = WrongGradientCause("stale", "")
        if report.result == "cannot tell":
            return report.message.partition(": ")[2]
        if report.result == "agrees":
            if not self._has_agreed:
                self._host.log(f"guard: step {step}: {report.message} (backward passes of this step's model calls)")
            self._has_agreed = True
            return None
        self._report_wrong_gradient(step, calls, report, finding, gradients, dtype)
        return None

    def _report_wrong_gradient(
        self,
        step: int,
        calls: Sequence[CapturedCall],
        report: GradientReport,
        finding: WrongGradientCause,
        gradients: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        message = f"{report.message}{finding.message}"
        # Without a component at fault, the code itself is such.
        if finding.fallback is None and finding.cause != "stale":
            message += _ON_PURPOSE
        obstacle = self._find_bundle_obstacle(calls, finding)
        if obstacle is not None:
            message += f"; no bundle is written: {obstacle}"
        event = Event(step, EVENT_KIND, build_diagnosis_record(report, finding, message))
        bundle = None
        if obstacle is None:
            # The finding must not be lost with the bundle.
            bundle = try_or_warn(
                lambda: self._write_bundle(calls, gradients, dtype, event), "bundle of a wrong gradient"
            )
        self._write(replace(event, facts={"bundle": bundle} if bundle else {}))
        self._host.log(f"guard: step {step}: {message}")

    def _find_bundle_obstacle(self, calls: Sequence[CapturedCall], finding: WrongGradientCause) -> str | None:
        """Why a replay could not repeat the result; None if it can."""
        if finding.cause == "stale":
            return "a replay has no gradient of the step before"
        # A replay loads the weights of one model, and names its parameters as that model does.
        if any(call.owner is not self._watched.joint_context.model for call in calls):
            return "the loop trains several models, or calls parts of one"
        return None


def _copy_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def make_micro_batch(call: CapturedCall, step: int, num_calls: int) -> OutputGradientMicroBatch:
    # A recorded call has its model.
    assert call.owner is not None
    return OutputGradientMicroBatch(
        ids=call.ids,
        step=step,
        micro_step=call.micro_step,
        rank=0,
        tensors={},
        uses_autocast=bool(call.autocasts),
        call=call,
        model=call.owner,
        num_calls=num_calls,
    )


def _list_tensors(calls: Sequence[CapturedCall]) -> list[torch.Tensor]:
    """Weights of the called models, and the calls' outputs."""
    owners = {id(call.owner): call.owner for call in calls if call.owner is not None}
    weights = [p for owner in owners.values() for p in owner.parameters()]
    return [*weights, *(output for call in calls for output in call.outputs)]


def _includes_previous_gradient(step: ReplayableStep, names: Sequence[str], previous: torch.Tensor) -> bool:
    """True if the gradient in place is the sum of this step's and that of the step before, up to a factor."""
    target = sample_gradient_elements(step.parameters[name] for name in names)
    if len(target) != len(previous) or not bool(previous.any()):
        return False
    # Of the whole step: the number of calls is the factor of a mean.
    gradients = step.gather_sampled_gradients(step.micro_batches, names)
    current = torch.stack(gradients).mean(0)
    return not _is_scalar_multiple(target, current, current) and _is_scalar_multiple(
        target, previous + current, current
    )


def _is_scalar_multiple(target: torch.Tensor, vector: torch.Tensor, current: torch.Tensor) -> bool:
    """True if `target` is a multiple of `vector`, except for a small share of this step's gradient `current`.

    A penalty on weights makes successive gradients alike too, but leaves the difference of two steps' gradients.
    """
    factor = (target @ vector / (vector @ vector).clamp(min=1e-300)).item()
    return bool((target - factor * vector).norm() <= _MAX_RESIDUAL * abs(factor) * current.norm())
