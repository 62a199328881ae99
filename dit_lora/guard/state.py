"""Find weights, moments, averages and buffers that are not as training left them."""

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

# A trained weight this many times above where it started has diverged; LoRA's grow a few times.
_DIVERGED = 100.0
_LOST = 100.0  # in absolute terms: LoRA's matrices stay below 1
_OVERSHOOTS = 2.0
"""A step whose weight decay takes away more than this share of a weight leaves a larger one, of the other sign."""


def bad_state(micro_batch: MicroBatch, suspects: Suspects) -> Verdict | None:
    """Return a verdict if a weight, buffer, moment or average is not as training left it; else None.

    Frozen weights and buffers must be finite and have the bits of the start; what is trained must be finite, and no
    few elements of it far beyond all others. Collective in lockstep.
    """
    case = Case(micro_batch, suspects, "non_finite_weights")
    # Frozen weights first: no snapshot holds them, so that nothing else is worth finding.
    return _frozen(case) or _not_finite(case) or _altered(case)


def _frozen(case: Case) -> Verdict | None:
    suspects = case.suspects
    trained = {name for name, p in suspects.model.named_parameters() if p.requires_grad}
    left_out = trained | set(suspects.infinite)
    weights = ((f"weight {n}", p) for n, p in suspects.named_parameters() if n not in left_out)
    buffers = (
        (n, b)
        for n, b in untrained(suspects.model)
        if n.startswith("buffer ") and n.removeprefix("buffer ") not in left_out
    )
    wrong = case.wrong([*weights, *buffers], describe_bad) or _gathered(
        case, suspects.frozen.changed() if suspects.frozen is not None else []
    )
    if not wrong:
        return None
    case.evidence["frozen"] = wrong[:20]
    kind, _, rest = wrong[0].partition(" ")
    what = f"the frozen weight {rest}" if kind == "weight" else f"the buffer {rest}"
    words = f"{what}{others(wrong)}; the checkpoint or memory is damaged"
    return case.found("weights", words, module=_module(rest))


def _not_finite(case: Case) -> Verdict | None:
    suspects = case.suspects
    trained = {n: p for n, p in suspects.model.named_parameters() if p.requires_grad}
    state = list(suspects.optimizer_state())
    # Moments before weights: a bad moment makes its weight bad in the next update, and not the other way round.
    moments = case.wrong(state, describe_bad) or case.wrong(state, _negative)
    weights = case.wrong(trained.items(), describe_bad)
    if not moments and not weights:
        return None
    case.evidence["not_finite"] = [*moments, *weights][:20]
    if moments and _most_are_lost(case) and diverged(case):
        return _too_high(case)  # of such weights gradients overflow when they are squared
    if moments:
        cause, words = _owner(moments[0], ())
        return case.found(cause, words + others(moments), module=_module(moments[0]))
    bad = {name.split(" ")[0] for name in weights}
    if any(p.dtype is torch.float16 for n, p in trained.items() if n in bad):
        words = f"the trained weight {weights[0]}{others(weights)}; it is fp16, where AdamW's eps of 1e-8 is 0 "
        return case.found(
            "precision", words + "and a gradient of 0 becomes NaN", module=_module(weights[0])
        )
    if diverged(case):
        return _too_high(case)
    # Memory spoils an element, and a step that is too large most of them; NaN alone comes from elsewhere.
    if _most_elements_overflowed(trained.values()):
        words = f"{len(weights)} of {len(trained)} trained tensors overflowed in one update, with finite moments: "
        return case.found("learning_rate", words + "the learning rate is too high")
    words = f"the trained weight {weights[0]}{others(weights)}, with finite gradients and moments"
    return case.found("weights", words, module=_module(weights[0]))


def _most_elements_overflowed(weights: Iterable[torch.Tensor]) -> bool:
    """True if more than half of all trained elements are not finite, and an infinite one among them."""
    bad, infinite, count = 0, 0, 0
    for weight in map(local, weights):
        bad += int((~torch.isfinite(weight)).sum())
        infinite += int(torch.isinf(weight).sum())
        count += weight.numel()
    return bad > count / 2 and infinite > 0


def _owner(described: str, trained: Collection[str]) -> tuple[Cause, str]:
    """Return the cause and the words for a trained weight, an average, or else a tensor of the optimizer."""
    name = described.split(" ")[0].rstrip(":")
    if name.startswith("ema/"):
        return "weights", f"the moving average {described}"
    if name not in trained:
        return "optimizer", f"the optimizer's {described}"
    return "weights", f"the trained weight {described}"


def _altered(case: Case) -> Verdict | None:
    """Return a verdict if memory has altered a few elements: they go back to the snapshot, at the same rates."""
    descriptions = _gathered(case, altered_state(case.suspects))
    if not descriptions:
        return None
    trained = {name for name, p in case.suspects.model.named_parameters() if p.requires_grad}
    # A moment that was altered takes its weight along, and no weight takes its moment.
    descriptions.sort(key=lambda words: _owner(words, trained)[0] != "optimizer")
    case.evidence["altered"] = descriptions[:20]
    cause, words = _owner(descriptions[0], trained)
    words = f"{words}{others(descriptions)}: altered in memory, for no update moves them alone"
    return case.found(cause, words, module=_module(descriptions[0].split(":")[0]))


def altered_state(suspects: Suspects) -> list[str]:
    """Describe the trained weights, moments and averages of this rank of which memory has altered an element."""
    trained = {n: p for n, p in suspects.model.named_parameters() if p.requires_grad}
    return altered({**trained, **dict(suspects.optimizer_state())}, suspects.peaks())


def _gathered(case: Case, own: list[str]) -> list[str]:
    """Return what any rank says, and note which, where all ranks diagnose together; else this rank's own words."""
    if not case.suspects.lockstep:
        return own
    said: list[list[str]] = gather_object([own])
    telling = next((rank for rank, words in enumerate(said) if words), -1)
    case.rank = telling if case.rank < 0 else case.rank
    return list(dict.fromkeys(words for rank in said for words in rank))


def _negative(name: str, tensor: torch.Tensor) -> str | None:
    cannot_be = name.endswith(of_all(lambda record: record.never_negative))
    if not cannot_be or not tensor.numel() or tensor.is_complex() or tensor.min() >= 0:
        return None
    return f"{name} must not be negative and reaches {tensor.min().item():.3g}"


def diverged(case: Case) -> bool:
    """Return True if the finite trained weights grew far beyond the start."""
    trained = [p.detach() for p in case.suspects.model.parameters() if p.requires_grad]
    peak = weight_peak(trained, finite_only=True, together=case.suspects.lockstep)
    case.evidence |= {"weight_peak": peak, "weight_peak_at_start": case.suspects.start_peak}
    # Weights that all began at zero, as OFT's rotations do, have no scale to have left but what any adapter has.
    start = case.suspects.start_peak
    return peak > _DIVERGED * start if start else has_run_away(peak, start)


def _most_are_lost(case: Case) -> bool:
    """Return True if most trained tensors are beyond use, as no altered element makes them. Collective in lockstep."""
    trained = [p.detach() for p in case.suspects.model.parameters() if p.requires_grad]
    own = [weight_peak([p], finite_only=True) for p in trained]
    ranks: list[list[float]] = gather_object([own]) if case.suspects.lockstep else [own]
    peaks = [max(peak) for peak in zip(*ranks, strict=True)]
    return sum(has_run_away(peak, case.suspects.start_peak) for peak in peaks) > len(peaks) / 2


def decay_share(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest share of a weight that one step's weight decay takes away.

    Groups with a rate above 1 do not count: Adam's steps are as large as the rate and move weights away without decay.
    """
    shares = [group["lr"] * group.get("weight_decay", 0.0) for group in groups if group["lr"] <= 1]
    return max(shares, default=0.0)


def _too_high(case: Case) -> Verdict:
    """Return the verdict on weights that grew: by their decay if that overshoots, else by the learning rate."""
    peak, start = case.evidence["weight_peak"], case.evidence["weight_peak_at_start"]
    grew, share = f"trained weights reach {peak:.3g}, from {start:.3g} at the start", 0.0
    share = case.suspects.decay()
    if share > _OVERSHOOTS:
        case.evidence["weight_decay"] = share
        words = f"{grew}: weight decay times learning rate is {share:.3g}, and beyond 2 each step makes weights larger"
        return case.found("optimizer", words)
    words = f"{grew}: the learning rate is too high, or one batch had a huge gradient"
    return case.found("learning_rate", words)


def run_away(micro_batch: MicroBatch, suspects: Suspects) -> Verdict:
    """Return the verdict on trained weights that grew out of bounds, be they finite or not."""
    case = Case(micro_batch, suspects, "diverged_weights")
    diverged(case)
    return _too_high(case)


def too_high(case: Case) -> Verdict | None:
    """Return the verdict on a micro-batch that fails because the trained weights have grown; else None."""
    return _too_high(case) if diverged(case) else None


def others(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _module(described: str) -> str:
    """Return the module of the parameter at the start of a description, `group/parameter/moment` or alone."""
    parts = described.split(" ")[0].split("/")
    parameter = parts[-2] if len(parts) > 1 and parts[0] != "ema" else parts[-1]
    return parameter.rpartition(".")[0]


def weight_peak(
    weights: Iterable[torch.Tensor], *, finite_only: bool = False, together: bool = False
) -> float:
    """Return the largest magnitude among weights, NaN if one is; of their finite values, if asked for.

    Of sharded weights that of this rank's parts, or `together`, which is collective, of all.
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
    """Return True if trained weights are finite and yet lost: no adapter that works is so large."""
    return peak > max(_LOST, _LOST * 10 * start)
