"""Compares the gradient in a bundle, and the one that is computed here, with the slope of the step's loss."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.commands.replayed import ReplayResult, apply_replay_options
from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Diagnosis, DiagnosisContext
from dit_lora.guard.fallbacks import convert_to_fp32
from dit_lora.guard.gradient_check.cause import ReplayableStep, WrongGradientCause, find_gradient_cause
from dit_lora.guard.gradient_check.check import GradientReport
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.replay import MicroBatch, ReplayOutcome, get_cuda_devices, preserve_gradients
from dit_lora.guard.repro_bundle import Bundle
from dit_lora.training.recovery.gradient_watch import list_gradient_fallbacks


@dataclass(frozen=True)
class GradientReplayResult(ReplayResult):
    """The result of replaying the bundle of a wrong gradient."""

    recorded: GradientReport
    """The bundle's gradient against the loss that is computed here."""
    computed: GradientReport
    """The gradient that is computed here against that loss."""
    finding: WrongGradientCause
    """The cause, if the gradient computed here is wrong."""

    def record(self) -> dict[str, Any]:
        gradients = {
            "recorded_gradient": _describe_report(self.recorded),
            "computed_gradient": _describe_report(self.computed),
        }
        verdict = None
        # Causes of wrong gradients are not among those of a `Diagnosis`.
        if self.diagnosis is not None:
            verdict = {**self.diagnosis.to_record(), "cause": self.finding.cause}
        return {**super().record(), "verdict": verdict, **gradients}

    def format_text(self) -> str:
        """Result of a replay as text: the event, both comparisons, and each sample's loss."""
        step, verdict = self.recorded_event["step"], self.recorded_event["verdict"]
        lines = [
            f"recorded: step {step}: {verdict['cause']}: {verdict['words']}",
            f"replayed with the recorded gradient: {self.recorded.message}",
            f"replayed with the gradient computed here: {self.computed.message}{self.finding.message}",
        ]
        # Without timesteps, unlike a failed micro-batch: they do not explain a gradient.
        rows = zip(self.sample_ids, self.outcome.losses, strict=True)
        return "\n".join([*lines, *(f"  {sample}: loss {loss:g}" for sample, loss in rows), *self.notes])


def _describe_report(report: GradientReport) -> dict[str, Any]:
    described: dict[str, Any] = {"result": report.result, "words": report.message}
    if report.location is not None and report.location.layer is not None:
        described["module"] = report.location.layer
    if report.worst is None:
        return described
    # Infinite without a gradient, which JSON cannot hold.
    figures = {"ratio": report.worst.ratio, "bound": report.worst.bound}
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return described | {"along": report.worst.direction} | finite


def replay_gradient(
    bundle: Bundle,
    micro_batches: Sequence[MicroBatch],
    model: nn.Module,
    *,
    dtype: torch.dtype,
    fp32: bool,
    disabled_names: Sequence[str],
    masked_attention: bool | None,
    notes: Sequence[str],
    has_losses: bool = True,
) -> GradientReplayResult:
    """Compare a bundle's gradient, and the one that is computed here, with the loss of its micro-batches.

    Args:
        bundle: The bundle.
        micro_batches: All micro-batches of the step, ready to run.
        model: The model that they run on.
        dtype: The lowest precision of the model's forward pass in the run.
        fp32: Compute in fp32.
        disabled_names: Names of the guard's fallbacks to apply.
        masked_attention: That of `run_and_diagnose_micro_batch`.
        notes: Messages to report with the result.
        has_losses: False if the micro-batches have no losses of their own, as calls of another loop.
    """
    with ExitStack() as stack:
        fallbacks = apply_replay_options(
            stack, bundle, model, disabled_names=disabled_names, masked_attention=masked_attention
        )
        if fp32:
            stack.enter_context(convert_to_fp32(model))
        step = ReplayableStep(micro_batches, model, torch.float32 if fp32 else dtype)
        # First the recorded gradient: it shows the run's fault, whatever made it.
        with preserve_gradients(model), torch.random.fork_rng(get_cuda_devices(model)):
            parameters = step.parameters
            shapes = {name: p.shape for name, p in parameters.items()}
            # DoRA's A and B are in the bundle, and are not checked.
            if any(shapes.get(name, gradient.shape) != gradient.shape for name, gradient in bundle.gradients.items()):
                raise DitLoraError("the gradients of the bundle do not fit its trained weights")
            for name, parameter in parameters.items():
                # A missing gradient was None in the step.
                if name in bundle.gradients:
                    parameter.grad = bundle.gradients[name].to(parameter.device, parameter.dtype)
            recorded = check_step_gradient(step)
        with preserve_gradients(model), torch.random.fork_rng(get_cuda_devices(model)):
            # The fault may be one of the run's machine or process, so the step's gradient is computed here too.
            losses = step.run_backward()
            computed = check_step_gradient(step)
            finding = WrongGradientCause("unknown", "")
            # A gradient that is right here has no cause to be found on this machine.
            if computed.result == "differs":
                context = DiagnosisContext(
                    model, fallbacks, disabled_names=[*disabled_names, *bundle.facts["switched_off"]]
                )
                finding = find_gradient_cause(step, computed, context, list_gradient_fallbacks(model))
    # With other settings, the gradient of the run need not be right: only the one computed here counts.
    reports = [computed] if fp32 or disabled_names else [recorded, computed]
    failed_report = next((report for report in reports if report.result != "agrees"), None)
    diagnosis = None
    if failed_report is not None:
        module = failed_report.location.layer if failed_report.location else None
        message = f"{failed_report.message}{finding.message}"
        # Its own cause, which is one of a gradient, is in the finding.
        diagnosis = Diagnosis("unknown", message, micro_batches[0].step, micro_batches[0].rank, module=module)
    return GradientReplayResult(
        ReplayOutcome(
            tuple(loss for values in losses for loss in values.tolist()) if has_losses else (),
            (),
            (),
            has_zero_gradient=False,
        ),
        diagnosis,
        sample_ids=tuple(sample for batch in micro_batches for sample in batch.ids) if has_losses else (),
        recorded_event=bundle.facts["event"],
        notes=tuple(notes),
        recorded=recorded,
        computed=computed,
        finding=finding,
    )
