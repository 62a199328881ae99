"""Find weights, moments, averages and buffers that are damaged or have diverged."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from dit_lora.config.optimizers import collect_optimizer_names
from dit_lora.errors import format_remaining_count
from dit_lora.guard.diagnosis import Cause, Diagnosis, DiagnosisContext, PendingDiagnosis
from dit_lora.guard.frozen_weights import iter_frozen_tensors
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import abs_max, can_hold_nonfinite, describe_bad_values
from dit_lora.numerics.outliers import describe_corrupted_tensors
from dit_lora.numerics.ranks import gather_object

# A trained weight that has grown by this factor has diverged; LoRA weights grow by a small factor.
_DIVERGENCE_FACTOR = 100.0
_MAX_USABLE_MAGNITUDE = 100.0  # absolute magnitude; LoRA matrices stay below 1
_OVERSHOOT_SHARE = 2.0
"""If weight decay removes more than this fraction of a weight in a step, the weight grows and changes its sign."""


def find_bad_state(micro_batch: MicroBatch, context: DiagnosisContext) -> Diagnosis | None:
    """Diagnose damaged or non-finite weights, buffers, optimizer moments and averages; None if all are good.

    Frozen weights and buffers must be finite and equal to those at the start bit for bit. Trained state must be finite
    and must not have a few elements far larger than all others. All ranks call it together if forwards are collective.
    """
    pending = PendingDiagnosis(micro_batch, context, "non_finite_weights")
    # Check frozen weights first: no snapshot holds them, so other findings would not help.
    return _find_bad_frozen_tensor(pending) or _find_nonfinite_state(pending) or _find_altered_state(pending)


def _find_bad_frozen_tensor(pending: PendingDiagnosis) -> Diagnosis | None:
    context = pending.context
    trained = {name for name, p in context.model.named_parameters() if p.requires_grad}
    # Masks of -inf are infinite from the start, so they are not damaged.
    excluded = trained | set(context.infinite_names)
    weights = ((f"weight {n}", p) for n, p in context.named_parameters() if n not in excluded)
    frozen = ((n, b) for n, b in iter_frozen_tensors(context.model) if n.startswith("buffer "))
    buffers = ((n, b) for n, b in frozen if n.removeprefix("buffer ") not in excluded)
    problems = pending.describe_bad_tensors([*weights, *buffers], describe_bad_values)
    if not problems:
        changes = context.frozen_record.describe_changes() if context.frozen_record is not None else []
        problems = _gather_descriptions(pending, changes)
    if not problems:
        return None
    pending.evidence["frozen"] = problems[:20]
    # A description starts with "weight <name>" or "buffer <name>".
    kind, _, name = problems[0].partition(" ")
    subject = f"the frozen weight {name}" if kind == "weight" else f"the buffer {name}"
    message = f"{subject}{format_remaining_count(problems)}; the checkpoint or memory is damaged"
    return pending.build_final_diagnosis("weights", message, module=_find_module_name(name))


def _find_nonfinite_state(pending: PendingDiagnosis) -> Diagnosis | None:
    context = pending.context
    trained = {n: p for n, p in context.model.named_parameters() if p.requires_grad}
    state = list(context.collect_optimizer_state().items())
    # Check moments before weights: a bad moment makes its weight bad in the next update, but not vice versa.
    moments = pending.describe_bad_tensors(state, describe_bad_values)
    moments = moments or pending.describe_bad_tensors(state, _describe_negative_values)
    weights = pending.describe_bad_tensors(trained.items(), describe_bad_values)
    if not moments and not weights:
        return None
    pending.evidence["not_finite"] = [*moments, *weights][:20]
    if moments and _has_mostly_unusable_weights(pending) and has_diverged(pending):
        return _diagnose_grown_weights(pending)  # with such weights, squared gradients overflow
    if moments:
        cause, message = _describe_bad_state_tensor(moments[0], ())
        return pending.build_final_diagnosis(
            cause, message + format_remaining_count(moments), module=_find_module_name(moments[0])
        )
    # A description starts with the parameter's name.
    bad = {name.split(" ")[0] for name in weights}
    if any(p.dtype is torch.float16 for n, p in trained.items() if n in bad):
        message = f"the trained weight {weights[0]}{format_remaining_count(weights)}; it is fp16, where "
        message += "AdamW's eps of 1e-8 is 0 and a gradient of 0 becomes NaN"
        return pending.build_final_diagnosis("precision", message, module=_find_module_name(weights[0]))
    if has_diverged(pending):
        return _diagnose_grown_weights(pending)
    num_bad, num_infinite, num_elements = 0, 0, 0
    for weight in map(get_local_tensor, trained.values()):
        num_bad += int((~torch.isfinite(weight)).sum())
        num_infinite += int(torch.isinf(weight).sum())
        num_elements += weight.numel()
    # Faulty memory damages single elements, and a step that is too large overflows most of them. NaN without any
    # infinity has another cause.
    if num_bad > num_elements / 2 and num_infinite > 0:
        message = f"{len(weights)} of {len(trained)} trained tensors overflowed in one update, with finite moments: "
        return pending.build_final_diagnosis("learning_rate", message + "the learning rate is too high")
    message = f"the trained weight {weights[0]}{format_remaining_count(weights)}, with finite gradients and moments"
    return pending.build_final_diagnosis("weights", message, module=_find_module_name(weights[0]))


def _describe_bad_state_tensor(description: str, trained: Collection[str]) -> tuple[Cause, str]:
    """Cause and description of a bad tensor: a trained weight, a moving average, or a tensor of the optimizer."""
    # A description starts with the tensor's name, perhaps with a colon after it.
    name = description.split(" ")[0].rstrip(":")
    if name.startswith("ema/"):
        return "weights", f"the moving average {description}"
    if name not in trained:
        return "optimizer", f"the optimizer's {description}"
    return "weights", f"the trained weight {description}"


def _find_altered_state(pending: PendingDiagnosis) -> Diagnosis | None:
    """Diagnosis if faulty memory has altered a few elements of the trained state; else None.

    The recovery restores them, with unchanged learning rates.
    """
    descriptions = _gather_descriptions(pending, describe_altered_state(pending.context))
    if not descriptions:
        return None
    trained = {name for name, p in pending.context.model.named_parameters() if p.requires_grad}
    # Report moments first: an altered moment also changes its weight, but not vice versa.
    descriptions.sort(key=lambda description: _describe_bad_state_tensor(description, trained)[0] != "optimizer")
    pending.evidence["altered"] = descriptions[:20]
    cause, message = _describe_bad_state_tensor(descriptions[0], trained)
    message += f"{format_remaining_count(descriptions)}: altered in memory, because no update changes only these"
    return pending.build_final_diagnosis(cause, message, module=_find_module_name(descriptions[0].split(":")[0]))


def describe_altered_state(context: DiagnosisContext) -> list[str]:
    """Describe this rank's trained weights, moments and averages in which faulty memory has altered an element."""
    trained = {n: p for n, p in context.model.named_parameters() if p.requires_grad}
    return describe_corrupted_tensors(
        {**trained, **context.collect_optimizer_state()}, context.compute_snapshot_peaks()
    )


def _gather_descriptions(pending: PendingDiagnosis, local_descriptions: list[str]) -> list[str]:
    """Gather descriptions of all ranks if forward passes are collective; otherwise return this rank's.

    The first rank that has any is noted.
    """
    if not pending.context.collective_forward:
        return local_descriptions
    descriptions: list[list[str]] = gather_object([local_descriptions])
    first_rank = next((rank for rank, description in enumerate(descriptions) if description), -1)
    pending.rank = first_rank if pending.rank < 0 else pending.rank
    return list(dict.fromkeys(description for rank in descriptions for description in rank))


def _describe_negative_values(name: str, tensor: torch.Tensor) -> str | None:
    # Suffixes of state that no optimizer makes negative, such as second moments.
    cannot_be = name.endswith(collect_optimizer_names(lambda record: record.nonnegative_state))
    if not cannot_be or not tensor.numel() or tensor.is_complex() or tensor.min() >= 0:
        return None
    return f"{name} must not be negative and reaches {tensor.min().item():.3g}"


def has_diverged(pending: PendingDiagnosis) -> bool:
    """True if the finite trained weights grew far beyond their size at the start."""
    trained = [p.detach() for p in pending.context.model.parameters() if p.requires_grad]
    peak = compute_weight_peak(trained, finite_only=True, all_ranks=pending.context.collective_forward)
    pending.evidence |= {"weight_peak": peak, "weight_peak_at_start": pending.context.start_peak}
    # Weights that all started at zero, such as OFT's rotations, have no initial scale, so use the absolute limit.
    start = pending.context.start_peak
    return peak > _DIVERGENCE_FACTOR * start if start else is_unusable_magnitude(peak, start)


def _has_mostly_unusable_weights(pending: PendingDiagnosis) -> bool:
    """True if most trained tensors have unusably large values, which memory errors do not cause.

    Collective if forward passes are.
    """
    trained = [p.detach() for p in pending.context.model.parameters() if p.requires_grad]
    local_peaks = [compute_weight_peak([p], finite_only=True) for p in trained]
    # (ranks, trained tensors): of sharded weights, each rank sees its own shards only.
    ranks: list[list[float]] = gather_object([local_peaks]) if pending.context.collective_forward else [local_peaks]
    peaks = [max(peak) for peak in zip(*ranks, strict=True)]
    return sum(is_unusable_magnitude(peak, pending.context.start_peak) for peak in peaks) > len(peaks) / 2


def compute_decay_share(groups: Iterable[Mapping[str, Any]]) -> float:
    """The largest fraction of a weight that one step's weight decay removes.

    Groups with a learning rate above 1 do not count: with such rates, Adam's steps move weights away even without
    decay.
    """
    # Decoupled weight decay multiplies a weight by 1 - lr * weight_decay in each step.
    shares = [group["lr"] * group.get("weight_decay", 0.0) for group in groups if group["lr"] <= 1]
    return max(shares, default=0.0)


def _diagnose_grown_weights(pending: PendingDiagnosis) -> Diagnosis:
    peak, start = pending.evidence["weight_peak"], pending.evidence["weight_peak_at_start"]
    growth_text = f"trained weights reach {peak:.3g}, from {start:.3g} at the start"
    share = pending.context.compute_decay_share()
    if share > _OVERSHOOT_SHARE:
        pending.evidence["weight_decay"] = share
        reason = f"weight decay times learning rate is {share:.3g}, and above 2 each step makes weights larger"
        return pending.build_final_diagnosis("optimizer", f"{growth_text}: {reason}")
    message = f"{growth_text}: the learning rate is too high, or one batch had a huge gradient"
    return pending.build_final_diagnosis("learning_rate", message)


def diagnose_diverged_weights(micro_batch: MicroBatch, context: DiagnosisContext) -> Diagnosis:
    """Diagnosis of trained weights that grew out of bounds, finite or not."""
    pending = PendingDiagnosis(micro_batch, context, "diverged_weights")
    has_diverged(pending)
    return _diagnose_grown_weights(pending)


def find_grown_weights(pending: PendingDiagnosis) -> Diagnosis | None:
    """Diagnosis of a micro-batch that fails because the trained weights have grown; else None."""
    return _diagnose_grown_weights(pending) if has_diverged(pending) else None


def _find_module_name(description: str) -> str:
    """Name of the module that a described tensor belongs to.

    The description starts with `parameter`, or `group/parameter/moment`.
    """
    # The parameter is the last part but one, or the last of a weight or an average.
    parts = description.split(" ")[0].split("/")
    parameter = parts[-2] if len(parts) > 1 and parts[0] != "ema" else parts[-1]
    return parameter.rpartition(".")[0]


def compute_weight_peak(
    weights: Iterable[torch.Tensor], *, finite_only: bool = False, all_ranks: bool = False
) -> float:
    """Largest magnitude among a model's weights, NaN if one is NaN; with `finite_only`, of their finite values.

    For sharded weights, of this rank's shards; with `all_ranks`, which is collective, of all ranks' shards.
    """
    peaks = []
    for weight in map(get_local_tensor, weights):
        if can_hold_nonfinite(weight):
            values = weight.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if finite_only else weight
            peaks.append(abs_max(values))
    peak = torch.stack(peaks).max().item() if peaks else 0.0
    # torch.max keeps a NaN.
    return torch.tensor(gather_object([peak])).max().item() if all_ranks else peak


def is_unusable_magnitude(peak: float, start_peak: float) -> bool:
    """True if a peak of trained weights is finite and yet unusable: no working adapter has such large values."""
    # Weights that were large from the start may stay large.
    return peak > max(_MAX_USABLE_MAGNITUDE, _MAX_USABLE_MAGNITUDE * 10 * start_peak)
