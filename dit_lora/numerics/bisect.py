"""From a tripped step to its cause: what is bad in the data, in the weights, or what makes the replay finite.

The order is from facts to experiments: tensors that are not finite need no experiment. The smallest change that
makes the replayed micro-batch finite is the cause.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from dit_lora.numerics.finite import abs_max, describe_bad, has_values
from dit_lora.numerics.labels import label_faults
from dit_lora.numerics.narrow import weight_values
from dit_lora.numerics.probe import Trace
from dit_lora.numerics.replay import MicroBatch, Outcome, run, traced
from dit_lora.numerics.shards import Describe, described, is_sharded, local, needs_all_ranks
from dit_lora.numerics.switches import Switch, in_fp32
from dit_lora.numerics.verdict import Cause, Verdict
from dit_lora.objectives import IGNORE

# A trained weight this many times above where it started has diverged; LoRA's grow a few times.
_DIVERGED = 100.0
_LOST = 100.0  # in absolute terms: LoRA's matrices stay below 1

_REDRAWS = 3  # with other noise and timesteps

# Second moments, and the scales of 8-bit ones: torch's and Prodigy's name, then bitsandbytes'.
_NOT_NEGATIVE = ("exp_avg_sq", "state2", "absmax1", "absmax2")

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Suspects:
    """What a diagnosis may look at and switch off."""

    model: nn.Module
    """Bare, as replays run it."""
    optimizer_state: NamedTensors
    switches: list[Switch] = field(default_factory=list)
    start_peak: float = 0.0
    """The largest trained weight when training started."""
    limit: float | None = None
    """Samples' values beyond this are bad though finite."""
    lockstep: bool = False
    """Whether every rank runs the same diagnosis at the same time, as a sharded model (FSDP2) needs. All then get
    the same verdict, on weights and moments as a whole."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Of a model that is not diagnosed in lockstep, this rank's part."""
        return self.model.named_parameters() if self.lockstep else weight_values(self.model)


@dataclass
class _Case:
    """One micro-batch under diagnosis; `found` makes its verdict."""

    micro_batch: MicroBatch
    suspects: Suspects
    kind: str
    control: MicroBatch | None = None
    evidence: dict[str, object] = field(default_factory=dict)
    rank: int = -1
    """Of the weights at fault, where it is not the micro-batch's."""

    def wrong(self, tensors: Iterable[tuple[str, torch.Tensor]], how: Describe) -> list[str]:
        found = described(tensors, how, together=self.suspects.lockstep)
        self.rank = next(iter(found.values()), -1) if self.rank < 0 else self.rank
        return list(found)

    def found(self, cause: Cause, words: str, **facts: Any) -> Verdict:
        batch = self.micro_batch
        return Verdict(
            cause,
            words,
            step=batch.step,
            rank=batch.rank if self.rank < 0 else self.rank,
            micro_step=batch.micro_step,
            evidence=self.evidence,
            **facts,
        )

    def healthy(self, batch: MicroBatch | None = None) -> bool:
        outcome = run(batch or self.micro_batch, self.suspects.model)
        return outcome.is_healthy(needs_gradient=self.kind == "zero_gradient")


def diagnose(
    micro_batch: MicroBatch,
    suspects: Suspects,
    *,
    kind: str,
    control: MicroBatch | None = None,
) -> Verdict:
    """The cause of a trip of this kind, as far as this rank's micro-batch shows it.

    `control` is one that was healthy a step ago: if it still is, the fault is in what is new.
    """
    case = _Case(micro_batch, suspects, kind, control)
    verdict = _bad_data(case) or bad_state(case.micro_batch, suspects)
    if verdict is not None:
        return verdict
    if needs_all_ranks(suspects.model) and not suspects.lockstep:
        ids = micro_batch.ids if kind in ("non_finite_loss", "bad_data") else ()
        words = "not replayed: the model is sharded, and one rank cannot run it alone"
        return case.found("unknown", words, sample_ids=ids)
    outcome = run(micro_batch, suspects.model)
    if outcome.is_healthy(needs_gradient=kind == "zero_gradient"):
        trained = [p.detach() for p in suspects.model.parameters() if p.requires_grad]
        peak = weight_peak(trained, together=suspects.lockstep)
        if has_run_away(peak, suspects.start_peak):
            return run_away(micro_batch, suspects)
        return case.found(
            "transient", "finite when it was run again: it did not come from the data"
        )
    if (unlabelled := _unlabelled(case, outcome)) is not None:
        return unlabelled
    trace, case.rank = traced(micro_batch, suspects.model)
    case.evidence |= _evidence(outcome, trace)
    verdict = _experiments(case, outcome)
    return _located(verdict, trace, outcome, micro_batch)


def bad_state(micro_batch: MicroBatch, suspects: Suspects) -> Verdict | None:
    """A verdict if a moment or a weight is not finite, or a frozen weight is; None if all are. Collective in lockstep."""
    case = _Case(micro_batch, suspects, "non_finite_weights")
    trained = {n: p for n, p in suspects.model.named_parameters() if p.requires_grad}
    others = ((n, p) for n, p in suspects.named_parameters() if n not in trained)
    frozen = case.wrong(others, describe_bad)
    if frozen:
        case.evidence["frozen"] = frozen[:20]
        words = (
            f"the frozen weight {frozen[0]}{_others(frozen)}; the checkpoint or memory is damaged"
        )
        return case.found("weights", words, module=_module(frozen[0]))
    state = list(suspects.optimizer_state())
    moments = case.wrong(state, describe_bad) or case.wrong(state, _negative)
    weights = case.wrong(trained.items(), describe_bad)
    if not moments and not weights:
        return None
    case.evidence["not_finite"] = [*moments, *weights][:20]
    if moments:
        is_average = moments[0].startswith("ema/")
        owner = "the moving average" if is_average else "the optimizer's"
        words = f"{owner} {moments[0]}{_others(moments)}"
        cause: Cause = "weights" if is_average else "optimizer"
        return case.found(cause, words, module=_module(moments[0]))
    bad = {name.split(" ")[0] for name in weights}
    if any(p.dtype is torch.float16 for n, p in trained.items() if n in bad):
        words = f"the trained weight {weights[0]}{_others(weights)}; it is fp16, where AdamW's eps of 1e-8 is 0 "
        return case.found(
            "precision", words + "and a gradient of 0 becomes NaN", module=_module(weights[0])
        )
    if _diverged(case):
        return case.found("learning_rate", _diverged_words(case), module=_module(weights[0]))
    if len(weights) > len(trained) / 2:
        words = f"{len(weights)} of {len(trained)} trained tensors overflowed in one update, with finite moments: "
        return case.found("learning_rate", words + "the learning rate is too high")
    words = f"the trained weight {weights[0]}{_others(weights)}, with finite gradients and moments"
    return case.found("weights", words, module=_module(weights[0]))


def _negative(name: str, tensor: torch.Tensor) -> str | None:
    if not name.endswith(_NOT_NEGATIVE) or not tensor.numel() or tensor.min() >= 0:
        return None
    return f"{name} must not be negative and reaches {tensor.min().item():.3g}"


def _bad_data(case: _Case) -> Verdict | None:
    """Samples whose tensors are not finite, are out of range, or have no label to learn from."""
    batch = case.micro_batch
    faults = dict(batch.faults)
    for index, sample in enumerate(batch.ids):
        rows = {name: tensor[index] for name, tensor in batch.tensors.items() if tensor.ndim}
        words = [w for n, row in rows.items() if (w := _describe_row(n, row, case.suspects.limit))]
        if words and sample not in faults:
            faults[sample] = "; ".join(words)
    if faults:
        return case.found("data", _each(faults), sample_ids=tuple(faults))
    labels = _label_faults(batch)
    if labels and len(labels) == len(batch.ids):
        return case.found("labels", _each(labels), sample_ids=tuple(labels))
    return None


def _label_faults(batch: MicroBatch) -> dict[str, str]:
    """What is wrong with each sample's labels, where the micro-batch has labels."""
    rows = zip(batch.ids, batch.tensors.get("labels", ()), strict=False)
    found = {sample: label_faults(row, ignore=IGNORE) for sample, row in rows}
    return {sample: fault for sample, fault in found.items() if fault}


def _unlabelled(case: _Case, outcome: Outcome) -> Verdict | None:
    """Where each sample has a loss of its own: those without a label are bad, and no other is."""
    batch = case.micro_batch
    labels = _label_faults(batch)
    bad = {sample for sample, loss in zip(batch.ids, outcome.losses, strict=False) if loss != loss}
    if not labels or len(outcome.losses) != len(batch.ids) or bad != labels.keys():
        return None
    return case.found("labels", _each(labels), sample_ids=tuple(labels))


def _each(faults: Mapping[str, str]) -> str:
    """The fault of one sample, or of each by its name."""
    if len(faults) == 1:
        return next(iter(faults.values()))
    return "; ".join(f"{sample}: {fault}" for sample, fault in faults.items())


def _describe_row(name: str, row: torch.Tensor, limit: float | None) -> str | None:
    words = describe_bad(name, row, limit)
    if words is None or row.ndim != 2 or "embed" not in name:
        return words
    bad = ~torch.isfinite(row).all(dim=-1)
    tokens = bad.nonzero().flatten().tolist()
    return f"{words}, at token {tokens[0]} of {len(row)}{_others(tokens)}" if tokens else words


def _experiments(case: _Case, outcome: Outcome) -> Verdict:
    """Change one thing at a time until the replay is healthy."""
    for switch in case.suspects.switches:
        if _healthy_without(case, switch):
            words = f"finite with {switch.name} switched off ({switch.remedy} in its place)"
            return case.found(switch_cause(switch), words, switch=switch.name)
    if _diverged(case):
        return case.found("learning_rate", _diverged_words(case))
    if case.kind != "zero_gradient" and _finite_in_fp32(case):
        return case.found("precision", "finite in fp32: the values leave the range of the dtype")
    samples = _samples_at_fault(case)
    others_are_healthy = 0 < len(samples) < len(case.micro_batch.ids)
    if others_are_healthy or (case.control is not None and case.healthy(case.control)):
        return _at_fault(case, samples or case.micro_batch.ids)
    return case.found("unknown", "nothing that was switched off makes it healthy")


def _healthy_without(case: _Case, switch: Switch) -> bool:
    try:
        with switch.off():
            return case.healthy()
    except torch.OutOfMemoryError:
        if case.suspects.lockstep:
            raise  # other ranks may wait in the middle of a pass for this one
        case.evidence[switch.name] = "not tried: without it, a step does not fit into memory"
        return False


def _at_fault(case: _Case, samples: Sequence[str]) -> Verdict:
    """Samples that fail where others do not: always, or only with this noise and timestep."""
    batch = case.micro_batch
    rows = [batch.single(batch.ids.index(sample)) for sample in samples]
    redraws = [row.redrawn(n) for row in rows if row.redrawn is not None for n in range(_REDRAWS)]
    if any(case.healthy(redraw) for redraw in redraws):
        words = "only with this noise and timestep: finite with others, whatever is switched off"
        return case.found("inputs", words, sample_ids=tuple(samples))
    words = "it fails whatever is switched off; other samples are healthy"
    return case.found("data", words, sample_ids=tuple(samples))


def switch_cause(switch: Switch) -> Cause:
    return "kernel" if switch.cause == "kernel" else "attention_backend"


def _located(verdict: Verdict, trace: Trace, outcome: Outcome, micro_batch: MicroBatch) -> Verdict:
    """The verdict with the first module and op, the timesteps, and whose input it was."""
    timesteps = outcome.timesteps
    if verdict.sample_ids:
        rows = [micro_batch.ids.index(sample) for sample in verdict.sample_ids]
        timesteps = tuple(outcome.timesteps[row] for row in rows)
    # What the forward hid may still be what the backward chokes on.
    hidden = None if trace.bad_inputs else next(iter(trace.hidden), None)
    origin = trace.origin or hidden
    ids = verdict.sample_ids
    if verdict.cause == "unknown" and not outcome.gradient_is_zero:
        ids = micro_batch.ids  # nothing else is left: the weights were healthy a step ago
    verdict = replace(verdict, sample_ids=ids, timesteps=timesteps)
    if origin is None:
        return _given(verdict, trace)
    place = f" at {origin.module}" if origin.module else " outside the model, in the loss"
    words = f"{verdict.words}; first {origin.kind} in the {origin.direction}: {origin.op}{place}"
    return replace(
        verdict,
        words=words,
        module=origin.module,
        op=origin.op,
        direction=origin.direction,
        dtype=origin.dtype,
    )


def _given(verdict: Verdict, trace: Trace) -> Verdict:
    """No op is to blame: the model was given bad values, though the samples' own are good."""
    if not trace.bad_inputs or verdict.cause not in ("unknown", "data", "inputs"):
        return verdict
    given = "; ".join(trace.bad_inputs.values())
    words = f"{verdict.words}; the model was given values that are not finite, though the cached ones are: {given}"
    if verdict.cause != "unknown":
        return replace(verdict, words=words)
    return replace(verdict, cause="inputs", words=words)


def _samples_at_fault(case: _Case) -> list[str]:
    batch = case.micro_batch
    if len(batch.ids) == 1:
        return list(batch.ids)
    return [
        sample for index, sample in enumerate(batch.ids) if not case.healthy(batch.single(index))
    ]


def _finite_in_fp32(case: _Case) -> bool:
    dtypes = {p.dtype for p in case.suspects.model.parameters() if p.is_floating_point()}
    if dtypes <= {torch.float32, torch.float64} and not _autocasts(case.suspects.model):
        return False
    if is_sharded(case.suspects.model):
        case.evidence["fp32"] = "not tried: the weights are sharded"
        return False
    try:
        with in_fp32(case.suspects.model):
            return case.healthy()
    except torch.OutOfMemoryError:
        case.evidence["fp32"] = "not tried: a second copy of the weights does not fit"
        return False


def _autocasts(model: nn.Module) -> bool:
    """Accelerate wraps the forward of a model that computes in half precision."""
    return "_original_forward" in model.__dict__


def _diverged(case: _Case) -> bool:
    trained = [p.detach() for p in case.suspects.model.parameters() if p.requires_grad]
    peak = weight_peak(trained, finite_only=True, together=case.suspects.lockstep)
    case.evidence |= {"weight_peak": peak, "weight_peak_at_start": case.suspects.start_peak}
    return bool(case.suspects.start_peak) and peak > _DIVERGED * case.suspects.start_peak


def _diverged_words(case: _Case) -> str:
    peak, start = case.evidence["weight_peak"], case.evidence["weight_peak_at_start"]
    return f"trained weights reach {peak:.3g}, from {start:.3g} at the start: the learning rate is too high"


def _evidence(outcome: Outcome, trace: Trace) -> dict[str, object]:
    return {
        "losses": [
            loss if loss == loss and abs(loss) < 1e38 else str(loss) for loss in outcome.losses
        ],
        "bad_gradients": list(outcome.bad_gradients[:10]),
        "hidden": [f"{o.kind} in {o.op} at {o.module}" for o in trace.hidden[:10]],
        "trail": [
            f"{s.name} ({s.direction}, {s.dtype}) reaches {s.peak:.3g}, {s.headroom:.3g} times below the limit"
            for s in trace.trail
        ],
    }


def _others(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _module(described: str) -> str:
    """The module of the parameter named at the start of a description, as `group/parameter/moment` or alone."""
    parts = described.split(" ")[0].split("/")
    parameter = parts[-2] if len(parts) > 1 and parts[0] != "ema" else parts[-1]
    return parameter.rpartition(".")[0]


def weight_peak(
    weights: Iterable[torch.Tensor], *, finite_only: bool = False, together: bool = False
) -> float:
    """The largest magnitude among weights, NaN if one is; of their finite values, if asked for.

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
    """Whether trained weights are finite and yet lost: no adapter that works is so large."""
    return peak > max(_LOST, _LOST * 10 * start)


def run_away(micro_batch: MicroBatch, suspects: Suspects) -> Verdict:
    """The verdict on trained weights that grew out of bounds, be they finite or not."""
    case = _Case(micro_batch, suspects, "diverged_weights")
    _diverged(case)
    return case.found("learning_rate", _diverged_words(case))
