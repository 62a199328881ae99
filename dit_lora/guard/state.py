"""Find weights, moments, averages and buffers that are damaged or have diverged."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dit_lora.config.optimizers import of_all
from dit_lora.guard.frozen import untrained
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.suspects import Case, Suspects
from dit_lora.guard.verdict import Cause, Verdict
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import abs_max, describe_bad, has_values
from dit_lora.numerics.outliers import altered
from dit_lora.numerics.ranks import gather_object

# A trained weight that has grown by this factor has diverged; LoRA weights grow by a small factor.
_DIVERGED = 100.0
_LOST = 100.0  # absolute magnitude; LoRA matrices stay below 1
_OVERSHOOTS = 2.0
"""If weight decay removes more than this fraction of a weight in a step, the weight grows and changes its sign."""


def bad_state(micro_batch: MicroBatch, suspects: Suspects) -> Verdict | None:
    """The verdict if a weight, buffer, moment or average is damaged or not finite; else None.

    Frozen weights and buffers must be finite and bitwise equal to the start. Trained state must be finite, without a
    few elements far beyond all others. Collective in lockstep.
    """
    pending = Case(micro_batch, suspects, "non_finite_weights")
    # Check frozen weights first: no snapshot holds them, so other findings would not help.
    return _frozen(pending) or _not_finite(pending) or _altered(pending)


def _frozen(case: Case) -> Verdict | None:
    context = case.suspects
    trained = {name for name, p in context.model.named_parameters() if p.requires_grad}
    # Masks of -inf are infinite from the start, so they are not damaged.
    excluded = trained | set(context.infinite)
    weights = ((f"weight {n}", p) for n, p in context.named_parameters() if n not in excluded)
    buffers = (
        (n, b)
        for n, b in untrained(context.model)
        if n.startswith("buffer ") and n.removeprefix("buffer ") not in excluded
    )
    problems = case.wrong([*weights, *buffers], describe_bad) or _gathered(
        case, context.frozen.changed() if context.frozen is not None else []
    )
    if not problems:
        return None
    case.evidence["frozen"] = problems[:20]
    # A description starts with "weight <name>" or "buffer <name>".
    kind, _, name = problems[0].partition(" ")
    subject = f"the frozen weight {name}" if kind == "weight" else f"the buffer {name}"
    message = f"{subject}{others(problems)}; the checkpoint or memory is damaged"
    return case.found("weights", message, module=_module(name))


def _not_finite(case: Case) -> Verdict | None:
    context = case.suspects
    trained = {n: p for n, p in context.model.named_parameters() if p.requires_grad}
    state = list(context.optimizer_state())
    # Check moments before weights: a bad moment makes its weight bad in the next update, but not vice versa.
    moments = case.wrong(state, describe_bad) or case.wrong(state, _negative)
    weights = case.wrong(trained.items(), describe_bad)
    if not moments and not weights:
        return None
    case.evidence["not_finite"] = [*moments, *weights][:20]
    if moments and _most_are_lost(case) and diverged(case):
        return _too_high(case)  # with such weights, squared gradients overflow
    if moments:
        cause, message = _owner(moments[0], ())
        return case.found(cause, message + others(moments), module=_module(moments[0]))
    # A description starts with the parameter's name.
    bad = {name.split(" ")[0] for name in weights}
    if any(p.dtype is torch.float16 for n, p in trained.items() if n in bad):
        message = f"the trained weight {weights[0]}{others(weights)}; it is fp16, where AdamW's eps of 1e-8 is 0 "
        return case.found(
            "precision", message + "and a gradient of 0 becomes NaN", module=_module(weights[0])
        )
    if diverged(case):
        return _too_high(case)
    # Faulty memory damages single elements, and a step that is too large overflows most of them. Only NaN has another
    # cause.
    if _most_elements_overflowed(trained.values()):
        message = f"{len(weights)} of {len(trained)} trained tensors overflowed in one update, with finite moments: "
        return case.found("learning_rate", message + "the learning rate is too high")
    message = f"the trained weight {weights[0]}{others(weights)}, with finite gradients and moments"
    return case.found("weights", message, module=_module(weights[0]))


def _most_elements_overflowed(weights: Iterable[torch.Tensor]) -> bool:
    """True if more than half of all trained elements are not finite, and at least one is infinite."""
    bad, infinite, count = 0, 0, 0
    for weight in map(local, weights):
        bad += int((~torch.isfinite(weight)).sum())
        infinite += int(torch.isinf(weight).sum())
        count += weight.numel()
    return bad > count / 2 and infinite > 0


def _owner(described: str, trained: Collection[str]) -> tuple[Cause, str]:
    """Cause and description for a trained weight, an average, or else a tensor of the optimizer."""
    # A description starts with the tensor's name, perhaps with a colon after it.
    name = described.split(" ")[0].rstrip(":")
    if name.startswith("ema/"):
        return "weights", f"the moving average {described}"
    if name not in trained:
        return "optimizer", f"the optimizer's {described}"
    return "weights", f"the trained weight {described}"


def _altered(case: Case) -> Verdict | None:
    """The verdict if memory has altered a few elements: they are restored, with unchanged learning rates."""
    descriptions = _gathered(case, altered_state(case.suspects))
    if not descriptions:
        return None
    trained = {name for name, p in case.suspects.model.named_parameters() if p.requires_grad}
    # Report moments first: an altered moment also changes its weight, but not vice versa.
    descriptions.sort(key=lambda description: _owner(description, trained)[0] != "optimizer")
    case.evidence["altered"] = descriptions[:20]
    cause, description = _owner(descriptions[0], trained)
    description = (
        f"{description}{others(descriptions)}: altered in memory, for no update moves them alone"
    )
    return case.found(cause, description, module=_module(descriptions[0].split(":")[0]))


def altered_state(suspects: Suspects) -> list[str]:
    """Describe this rank's trained weights, moments and averages with an element that memory has altered."""
    trained = {n: p for n, p in suspects.model.named_parameters() if p.requires_grad}
    return altered({**trained, **dict(suspects.optimizer_state())}, suspects.peaks())


def _gathered(case: Case, own: list[str]) -> list[str]:
    """The descriptions of all ranks in lockstep, noting the first rank that has any; else this rank's."""
    if not case.suspects.lockstep:
        return own
    descriptions: list[list[str]] = gather_object([own])
    first_rank = next((rank for rank, description in enumerate(descriptions) if description), -1)
    case.rank = first_rank if case.rank < 0 else case.rank
    return list(dict.fromkeys(description for rank in descriptions for description in rank))


def _negative(name: str, tensor: torch.Tensor) -> str | None:
    # Suffixes of state that no optimizer makes negative, such as second moments.
    cannot_be = name.endswith(of_all(lambda record: record.never_negative))
    if not cannot_be or not tensor.numel() or tensor.is_complex() or tensor.min() >= 0:
        return None
    return f"{name} must not be negative and reaches {tensor.min().item():.3g}"


def diverged(case: Case) -> bool:
    """True if the finite trained weights grew far beyond the start."""
    trained = [p.detach() for p in case.suspects.model.parameters() if p.requires_grad]
    peak = weight_peak(trained, finite_only=True, together=case.suspects.lockstep)
    case.evidence |= {"weight_peak": peak, "weight_peak_at_start": case.suspects.start_peak}
    # Weights that all started at zero, such as OFT's rotations, have no initial scale, so use the absolute limit.
    start = case.suspects.start_peak
    return peak > _DIVERGED * start if start else has_run_away(peak, start)


def _most_are_lost(case: Case) -> bool:
    """True if most trained tensors are too large to be usable, which memory errors do not cause. Collective in
    lockstep.
    """
    trained = [p.detach() for p in case.suspects.model.parameters() if p.requires_grad]
    local_peaks = [weight_peak([p], finite_only=True) for p in trained]
    # (ranks, trained tensors): of sharded weights, each rank sees its own shards only.
    ranks: list[list[float]] = (
        gather_object([local_peaks]) if case.suspects.lockstep else [local_peaks]
    )
    peaks = [max(peak) for peak in zip(*ranks, strict=True)]
    return sum(has_run_away(peak, case.suspects.start_peak) for peak in peaks) > len(peaks) / 2


def decay_share(groups: Iterable[Mapping[str, Any]]) -> float:
    """The largest fraction of a weight that one step's weight decay removes.

    Groups with a learning rate above 1 do not count: with such rates, Adam's steps move weights away even without
    decay.
    """
    # Decoupled weight decay multiplies a weight by 1 - lr * weight_decay in each step.
    shares = [group["lr"] * group.get("weight_decay", 0.0) for group in groups if group["lr"] <= 1]
    return max(shares, default=0.0)


def _too_high(case: Case) -> Verdict:
    """The verdict on weights that grew: because of weight decay if it overshoots, else of the learning rate."""
    peak, start = case.evidence["weight_peak"], case.evidence["weight_peak_at_start"]
    growth_text, share = f"trained weights reach {peak:.3g}, from {start:.3g} at the start", 0.0
    share = case.suspects.decay()
    if share > _OVERSHOOTS:
        case.evidence["weight_decay"] = share
        message = (
            f"{growth_text}: weight decay times learning rate is {share:.3g}, "
            "and beyond 2 each step makes weights larger"
        )
        return case.found("optimizer", message)
    message = f"{growth_text}: the learning rate is too high, or one batch had a huge gradient"
    return case.found("learning_rate", message)


def run_away(micro_batch: MicroBatch, suspects: Suspects) -> Verdict:
    """The verdict on trained weights that grew out of bounds, finite or not."""
    pending = Case(micro_batch, suspects, "diverged_weights")
    diverged(pending)
    return _too_high(pending)


def too_high(case: Case) -> Verdict | None:
    """The verdict on a micro-batch that fails because the trained weights have grown; else None."""
    return _too_high(case) if diverged(case) else None


def others(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _module(described: str) -> str:
    """The module of the parameter at the start of a description: `parameter`, or `group/parameter/moment`."""
    # The parameter is the last part but one, or the last of a weight or an average.
    parts = described.split(" ")[0].split("/")
    parameter = parts[-2] if len(parts) > 1 and parts[0] != "ema" else parts[-1]
    return parameter.rpartition(".")[0]


def weight_peak(
    weights: Iterable[torch.Tensor], *, finite_only: bool = False, together: bool = False
) -> float:
    """Largest magnitude among weights, NaN if one is NaN; with `finite_only`, of their finite values.

    For sharded weights, of this rank's shards; with `together`, which is collective, of all ranks' shards.
    """
    peaks = []
    for weight in map(local, weights):
        if has_values(weight):
            values = weight.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if finite_only else weight
            peaks.append(abs_max(values))
    peak = torch.stack(peaks).max().item() if peaks else 0.0
    # torch.max keeps a NaN.
    return torch.tensor(gather_object([peak])).max().item() if together else peak


def has_run_away(peak: float, start: float) -> bool:
    """True if trained weights are finite and yet unusable: no working adapter has such large values."""
    # Weights that were large from the start may stay large.
    return peak > max(_LOST, _LOST * 10 * start)
