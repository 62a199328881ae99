"""Find the cause of a wrong gradient: `find_gradient_cause` computes the step again, with one component off at a time.

1. The step is replayed three times. If its gradient is wrong each time, the fault is in the forward or backward pass.
2. Then each component is switched off in turn, with the rules of `diagnose`: it is the cause only if the gradient
   agrees with the loss each time without it, and differs each time with it (A-B-A).
3. If the replays agree with the loss, the fault is in how the loop made the gradient from its micro-batches. The
   weights with which they are in it show whether one counts too often, whether the step before is in it too, or
   whether it is not the mean over all ranks.

On several ranks (DDP), the loss and the gradient are those of all ranks, and all take part in every replay.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from dit_lora.guard.diagnose import NUM_REPLAYS, InconsistentReplayError, find_faulty_component
from dit_lora.guard.diagnosis import DiagnosisContext, PendingDiagnosis
from dit_lora.guard.fallbacks import CHECKPOINTING, COMPILE, OFFLOAD, Fallback, convert_to_fp32
from dit_lora.guard.gradient_check.check import (
    GRADIENT_NOT_FINITE,
    FaultLocation,
    GradientReport,
    get_module_name,
    repeat_comparison,
)
from dit_lora.guard.gradient_check.directions import Parameters, UntrainedDirection, select_exact_parameters
from dit_lora.guard.gradient_check.ranks import average_gradients, find_unequal_tensors, gather_or_raise
from dit_lora.guard.gradient_check.slopes import CheckResult, SlopeComparison
from dit_lora.guard.replay import MicroBatch, get_cuda_devices, preserve_gradients
from dit_lora.numerics.ranks import get_num_processes

GradientCause = Literal[
    "kernel",
    "attention_backend",
    "compile",
    "recomputation",  # gradient checkpointing
    "offload",
    "accumulation",  # right in replays, but the micro-batches have wrong weights in the step's gradient
    "stale",  # right in replays, but the step's gradient contains that of the step before
    "ranks",  # not equal on all ranks, or not the mean over their micro-batches
    "detached",  # missing or zero in replays too, although the loss depends on the parameters
    "transient",  # wrong in some replays only
    "unknown",
]

_CAUSE_BY_FALLBACK: dict[str, GradientCause] = {
    COMPILE: "compile",
    CHECKPOINTING: "recomputation",
    OFFLOAD: "offload",
}
"""Causes with a name of their own; other components have that of their `Fallback`."""
_MAX_SAMPLED_ELEMENTS = 65_536
"""Elements of the gradient that the micro-batches' weights are computed from; the weights are equal in all of them."""
_MAX_RESIDUAL = 0.05
"""Share of the gradient that its micro-batches may leave unexplained: several times the rounding of bf16."""
_SURE_WEIGHT = 0.05
"""A weight differs from the right one by at least this, relative to it."""


@dataclass(frozen=True)
class ReplayableStep:
    """A step whose loss and gradient can be computed again, without changing gradients or random state."""

    micro_batches: Sequence[MicroBatch]
    model: nn.Module
    dtype: torch.dtype
    """The lowest precision of the model's forward pass, such as autocast's."""
    previous_batch: MicroBatch | None = None
    """The last micro-batch of the step before; None if unknown."""
    is_in_fp32: bool = False
    """True to replay it in fp32 instead of its own precision."""

    @property
    def parameters(self) -> Parameters:
        """The trained parameters that can be checked."""
        return select_exact_parameters({name: p for name, p in self.model.named_parameters() if p.requires_grad})

    def compute_terms(self) -> torch.Tensor:
        """Each sample's share of the step's loss, which is the mean over its micro-batches, (samples,). Collective."""
        return gather_loss_terms(lambda: [micro_batch.forward().losses for micro_batch in self.micro_batches])

    @contextmanager
    def use_replay_precision(self) -> Iterator[None]:
        """Context of replays in the precision that `is_in_fp32` says. Converts half-precision weights."""
        with convert_to_fp32(self.model) if self.is_in_fp32 else nullcontext():
            yield

    def compute_gradients(self) -> float:
        """Set `grad` to the gradient of the loss of all ranks, which is returned. Collective."""
        losses = gather_or_raise("backward", lambda: compute_loss_terms(self.run_backward()).sum().item())
        average_gradients(self.parameters.values())
        return sum(losses) / len(losses)

    def compare_again(self, comparison: SlopeComparison) -> CheckResult:
        """Compute the step's gradient again, and repeat a comparison that differed. Collective."""
        dtype = torch.float32 if self.is_in_fp32 else self.dtype
        with (
            self.use_replay_precision(),
            preserve_gradients(self.model),
            torch.random.fork_rng(get_cuda_devices(self.model)),
        ):
            self.compute_gradients()
            return repeat_comparison(self.compute_terms, self.parameters, comparison, dtype=dtype)

    def run_backward(self) -> list[torch.Tensor]:
        """Add the gradient of this rank's loss to the parameters'. Returns the losses of each micro-batch, (B,)."""
        step_losses = []
        for micro_batch in self.micro_batches:
            losses = micro_batch.forward().losses
            (losses.mean() / len(self.micro_batches)).backward()
            step_losses.append(losses.detach().cpu())
        return step_losses

    def gather_sampled_gradients(
        self, micro_batches: Sequence[MicroBatch], names: Iterable[str]
    ) -> list[torch.Tensor]:
        """Gradients of single micro-batches, those of all ranks in order, at elements of these parameters. Collective.

        `sample_gradient_elements` selects the elements.
        """
        names = list(names)
        local_gradients = gather_or_raise(
            "gradients", lambda: [self._compute_sampled_gradient(batch, names) for batch in micro_batches]
        )
        return [gradient for gradients in local_gradients for gradient in gradients]

    def _compute_sampled_gradient(self, micro_batch: MicroBatch, names: Sequence[str]) -> torch.Tensor:
        with preserve_gradients(self.model), torch.random.fork_rng(get_cuda_devices(self.model)):
            micro_batch.forward().losses.mean().backward()
            return sample_gradient_elements(self.parameters[name] for name in names)


def gather_loss_terms(compute_losses: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
    """Each sample's share of a step's loss, the mean over the micro-batches of all ranks, (samples,). Collective.

    `compute_losses` computes the losses of this rank's micro-batches, each (B,).
    """
    terms = gather_or_raise("loss", lambda: compute_loss_terms(compute_losses()).detach().cpu())
    return torch.cat(terms) / len(terms)


def compute_loss_terms(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each sample's share of one rank's loss, (samples,), from the losses of its micro-batches, each (B,)."""
    return torch.cat([values / (len(values) * len(losses)) for values in losses])


@dataclass(frozen=True)
class WrongGradientCause:
    """The cause of a wrong gradient."""

    cause: GradientCause
    message: str
    """Continues the sentence of the report, or is empty."""
    fallback: Fallback | None = None
    """The component without which the gradient agrees with the loss; None if there is none."""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class _PendingGradientDiagnosis(PendingDiagnosis):
    """Experiments about a wrong gradient: a run is healthy if the gradient that it computes agrees with the loss."""

    compare_again: Callable[[], CheckResult] = field(kw_only=True)

    def run_and_check_health(self, batch: MicroBatch | None = None) -> bool:
        # A component whose absence leaves it open is not the cause.
        return self.compare_again() == "agrees"

    def rerun_and_check_health(self) -> bool:
        result = self.compare_again()
        if result == "cannot tell":
            raise InconsistentReplayError
        self.num_runs += 1
        self.num_failed += result == "differs"
        return result == "agrees"


def find_gradient_cause(
    step: ReplayableStep, report: GradientReport, context: DiagnosisContext, extra_fallbacks: Sequence[Fallback] = ()
) -> WrongGradientCause:
    """Find the cause of a gradient that differs from the slope of the loss; `grad` of the parameters still has it.

    Args:
        step: The step with the wrong gradient.
        report: The result of `check_gradient`.
        context: Lists the components that can be switched off.
        extra_fallbacks: Further components, which change only how a gradient is computed.
    """
    worst = report.worst
    # A report that differs without a comparison is about replays, which have another gradient.
    if worst is None:
        return _explain_by_micro_batches(step)
    step = replace(step, is_in_fp32=report.is_in_fp32)
    # Without a change: a fault that comes and goes proves no cause.
    results = [step.compare_again(worst) for _ in range(NUM_REPLAYS)]
    evidence: dict[str, Any] = {"replays": results}
    if set(results) == {"agrees"}:
        # A replay has the step's forward and backward passes, but sums the gradients itself.
        finding = _explain_by_micro_batches(step)
    elif set(results) == {"differs"}:
        context = replace(context, fallbacks=[*context.fallbacks, *extra_fallbacks])
        finding = _find_component_cause(step, worst, context)
    elif {"agrees", "differs"} <= set(results):
        finding = WrongGradientCause(
            "transient", "; replays of the step are right and wrong by turns: a race, or hardware"
        )
    else:
        finding = WrongGradientCause("unknown", "")
    return replace(finding, evidence=evidence | finding.evidence)


def _find_component_cause(
    step: ReplayableStep, comparison: SlopeComparison, context: DiagnosisContext
) -> WrongGradientCause:
    pending = _PendingGradientDiagnosis(
        step.micro_batches[0], context, "gradient_check", compare_again=lambda: step.compare_again(comparison)
    )
    try:
        fallback = find_faulty_component(pending)
    except InconsistentReplayError:
        message = "; it agrees with the loss in some replays only, so no component is known to be the cause"
        return WrongGradientCause("unknown", message, evidence=pending.evidence)
    if fallback is not None:
        cause = _CAUSE_BY_FALLBACK.get(fallback.name, fallback.cause)
        message = f"; it is right with {fallback.name} off ({fallback.replacement} in its place)"
        return WrongGradientCause(cause, message, fallback, pending.evidence)
    names = [fallback.name for fallback in context.list_enabled_fallbacks()]
    pending.evidence["switched_off_without_effect"] = [name for name in names if name not in pending.evidence]
    # The loop's own steps are ruled out too: replays run without them.
    is_missing = comparison.direction == UntrainedDirection.label
    return WrongGradientCause("detached" if is_missing else "unknown", "", evidence=pending.evidence)


def _explain_by_micro_batches(step: ReplayableStep) -> WrongGradientCause:
    """The cause of a gradient that is right in replays, from the weights of the micro-batches' gradients in it."""
    names = list(step.parameters)
    target = sample_gradient_elements(step.parameters.values())
    gradients = step.gather_sampled_gradients(step.micro_batches, names)
    count = len(gradients)
    if (weights := fit_micro_batch_weights(target, gradients)) is not None:
        # Relative to the mean, in which each has the weight 1 / count.
        relative = [count * weight for weight in weights]
        evidence = {"micro_batch_weights": [round(weight, 4) for weight in relative]}
        if all(abs(weight - 1) <= _SURE_WEIGHT for weight in relative):
            return WrongGradientCause("unknown", "; replays of the step agree with the loss", evidence=evidence)
        message = (
            f"; it counts its {'micro-batches' if count > 1 else 'micro-batch'} {_format_weights(relative)} times"
        )
        return WrongGradientCause(_find_cause_of_fitted_weights(relative), message, evidence=evidence)
    # Gradients that were not cleared are those of the step before, of which one micro-batch of each rank is known.
    if step.previous_batch is not None:
        previous = torch.stack(step.gather_sampled_gradients([step.previous_batch], names)).mean(0)
        weights = fit_micro_batch_weights(target, [*gradients, previous])
        if weights is not None and abs(weights[-1]) * count > _SURE_WEIGHT:
            evidence = {"micro_batch_weights": [round(count * weight, 4) for weight in weights]}
            message = "; it contains the gradient of the step before"
            return WrongGradientCause("stale", message, evidence=evidence)
    return WrongGradientCause("unknown", "; replays of the step agree with the loss")


def _find_cause_of_fitted_weights(weights: Sequence[float]) -> GradientCause:
    """The cause of wrong weights of the micro-batches of all ranks, given in rank order and relative to the mean."""
    num_ranks = get_num_processes()
    num_per_rank = len(weights) // num_ranks
    by_rank = [weights[start : start + num_per_rank] for start in range(0, len(weights), num_per_rank)]
    # Each rank has one weight for all its micro-batches, so the fault came after accumulation.
    is_even = all(max(values) - min(values) <= _SURE_WEIGHT for values in by_rank)
    is_same = max(weights) - min(weights) <= _SURE_WEIGHT
    # One factor for everything may come from either, unless there is nothing to accumulate.
    if num_ranks > 1 and is_even and (not is_same or num_per_rank == 1):
        return "ranks"
    return "accumulation" if num_per_rank > 1 else "unknown"


def check_ranks_are_equal(step: ReplayableStep) -> tuple[GradientReport, WrongGradientCause] | None:
    """Check that trained weights and gradients are equal on all ranks; None if they are. Collective.

    Without equal gradients, DDP's ranks train different weights, so at most one of the gradients is right.
    """
    parameters = step.parameters
    if names := find_unequal_tensors(parameters):
        return _report_unequal("trained weights", names), WrongGradientCause("ranks", "")
    names = find_unequal_tensors({name: p.grad for name, p in parameters.items() if p.grad is not None})
    if not names:
        return None
    # NaN of several ranks has no order in a sum, so its bits may differ; the step's gate handles it.
    if not all(gather_or_raise("finite", lambda: all(_is_finite(parameters[name].grad) for name in names))):
        return GradientReport("cannot tell", (), 0, reason=GRADIENT_NOT_FINITE), WrongGradientCause("unknown", "")
    report = _report_unequal("gradients", names)
    gradients = step.gather_sampled_gradients(step.micro_batches, names)
    # What each rank has in place of the mean.
    fitted = gather_or_raise(
        "weights", lambda: fit_micro_batch_weights(sample_gradient_elements(parameters[n] for n in names), gradients)
    )
    relative = {
        rank: [round(len(gradients) * weight, 4) for weight in weights]
        for rank, weights in enumerate(fitted)
        if weights is not None
    }
    faulty_ranks = {
        rank: weights
        for rank, weights in relative.items()
        if any(abs(weight - 1) > _SURE_WEIGHT for weight in weights)
    }
    texts = [f"on rank {rank} it counts {_format_weights(weights)} times" for rank, weights in faulty_ranks.items()]
    message = f"; of all ranks' micro-batches, {' and '.join(texts)}" if texts else ""
    evidence = {"micro_batch_weights_by_rank": relative, "ranks": list(faulty_ranks)}
    return report, WrongGradientCause("ranks", message, evidence=evidence)


def _format_weights(weights: Iterable[float]) -> str:
    # Adding zero turns -0 into 0.
    return ", ".join(f"{round(weight, 2) + 0.0:g}" for weight in weights)


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def _report_unequal(tensors: str, names: Sequence[str]) -> GradientReport:
    layers = tuple(dict.fromkeys(map(get_module_name, names)))
    location_text = layers[0] if len(layers) == 1 else f"{len(layers)} layers"
    location = FaultLocation(layers[0] if len(layers) == 1 else None, layers)
    reason = f"the {tensors} are not equal on all ranks, in {location_text}"
    return GradientReport("differs", (), 0, location, reason)


def sample_gradient_elements(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Evenly spaced elements of the parameters' gradients, fp64 (elements,) on the CPU. Missing gradients are zero."""
    parameters = list(parameters)
    # A stride and not the first elements: every tensor is in the sample.
    spacing = max(1, sum(p.numel() for p in parameters) // _MAX_SAMPLED_ELEMENTS)
    sampled = []
    for parameter in parameters:
        values = parameter.detach() if parameter.grad is None else parameter.grad
        elements = values.flatten()[::spacing].double().cpu()
        sampled.append(elements if parameter.grad is not None else torch.zeros_like(elements))
    return torch.cat(sampled)


def fit_micro_batch_weights(target: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[float] | None:
    """Weights of the gradients in `target` by least squares; None if their sum is not `target`, or not the only one.

    All are vectors of the same elements, (elements,).
    """
    # (elements, gradients), with columns of length 1.
    columns = torch.stack(list(gradients), dim=1)
    lengths = columns.norm(dim=0)
    if not bool((lengths > 0).all()) or not bool(target.any()):
        return None
    columns = columns / lengths
    # Nearly parallel gradients do not say which of them it is.
    if torch.linalg.svdvals(columns).min().item() < _MAX_RESIDUAL:
        return None
    # In fp64: the weights are known to more digits than they are compared with.
    solution = torch.linalg.lstsq(columns, target).solution
    residual = (columns @ solution - target).norm() / target.norm()
    return (solution / lengths).tolist() if residual.item() <= _MAX_RESIDUAL else None


def build_diagnosis_record(report: GradientReport, finding: WrongGradientCause, message: str) -> dict[str, Any]:
    """The diagnosis in the event of a gradient check, with its figures as evidence."""
    verdict: dict[str, Any] = {"cause": finding.cause, "words": message}
    evidence = {**finding.evidence, "result": report.result, "evaluations": report.num_evaluations}
    if finding.fallback is not None:
        verdict["switch"] = finding.fallback.name
    if report.location is not None:
        if report.location.layer is not None:
            verdict["module"] = report.location.layer
        evidence["groups"] = list(report.location.groups)
    if report.worst is not None:
        # Infinite without a gradient, which JSON cannot hold.
        figures = {"ratio": report.worst.ratio, "bound": report.worst.bound}
        evidence |= {name: value if math.isfinite(value) else None for name, value in figures.items()}
        evidence["along"] = report.worst.direction
    if report.is_in_fp32:
        evidence["precision"] = "fp32"
    return {**verdict, "evidence": evidence}
