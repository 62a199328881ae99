"""Find the cause of a failed step: bad data or weights, or the change that makes its replay finite.

Checks come before experiments: tensors that are not finite, or have been altered, need no experiment. A failure that
does not repeat is `transient`, and proves no cause.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from dit_lora.guard.probe import Trace
from dit_lora.guard.replay import MicroBatch, Outcome, Traced, traced
from dit_lora.guard.state import bad_state, has_run_away, others, run_away, too_high, weight_peak
from dit_lora.guard.suspects import Case, Suspects
from dit_lora.guard.trials import (
    REPLAYS,
    ROUNDS,
    UnsteadyError,
    blamed,
    finite_in_fp32,
    switch_at_fault,
)
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.dtensors import is_sharded, needs_all_ranks
from dit_lora.numerics.finite import describe_bad
from dit_lora.numerics.labels import label_faults
from dit_lora.numerics.memory import room_for_fp32
from dit_lora.numerics.objectives import IGNORE

_RATE_OF = 8  # minimum number of runs for a reported failure rate


def diagnose(
    micro_batch: MicroBatch, suspects: Suspects, *, kind: str, control: MicroBatch | None = None
) -> Verdict:
    """Find the cause of a failed step of this kind, as far as this rank's micro-batch shows it.

    `control` was healthy in the previous step, for comparison at the place where this micro-batch fails.
    """
    pending = Case(micro_batch, suspects, kind, control)
    # Facts that can be read from data and state come first; they need no replay.
    diagnosis = _bad_data(pending) or bad_state(pending.micro_batch, suspects)
    if diagnosis is not None:
        return diagnosis
    # A pass of a sharded model would wait for ranks that are not diagnosing.
    if needs_all_ranks(suspects.model) and not suspects.lockstep:
        # A loss belongs to a sample; a gradient is summed over all samples and names none.
        ids = micro_batch.ids if kind in ("non_finite_loss", "bad_data") else ()
        message = "not replayed: the model is sharded, and one rank cannot run it alone"
        return pending.found("unknown", message, sample_ids=ids)
    try:
        return _replayed(pending)
    except UnsteadyError:
        return _unsteady(pending)
    except torch.OutOfMemoryError:
        if suspects.lockstep:
            raise  # other ranks may wait in the middle of a pass for this one
        message = "not found: a replay does not fit into memory beside what the loop holds"
        return pending.found("unknown", message, sample_ids=micro_batch.ids)


def _replayed(case: Case) -> Verdict:
    """Find the cause by running the micro-batch again. Raises `UnsteadyError` if it fails only in some runs."""
    outcome = case.again()
    # The same inputs must fail each time: a random failure proves no cause.
    for _ in range(REPLAYS - 1):
        repeat = case.again()
        if case.is_healthy(repeat) != case.is_healthy(outcome):
            raise UnsteadyError
    if not case.failed:
        return _healthy_again(case)
    if (label_diagnosis := _unlabelled(case, outcome)) is not None:
        return label_diagnosis
    # With sequence parallelism, ranks hold different tokens of a micro-batch; with only sharded weights, the same.
    ranks_share_inputs = case.suspects.lockstep and is_sharded(case.suspects.model)
    # Ranks that compute the same must fail together. One that fails where others succeed is the cause.
    if outcome.failed_on and ranks_share_inputs:
        return _of_ranks(case, outcome.failed_on, lambda: case.again().failed_on)
    case.evidence["replays"] = {"failed": case.failed, "of": case.runs}
    # A probed run finds the first bad value. It changes nothing, so it comes before the experiments.
    traced_run = _trace(case)
    case.rank = traced_run.rank
    case.evidence |= _evidence(outcome, traced_run.trace)
    # The loss fails on all ranks or on none, but only some ranks compute the first bad value themselves.
    if traced_run.alone and ranks_share_inputs:
        diagnosis = _of_ranks(case, traced_run.alone, lambda: _trace(case).alone)
    else:
        diagnosis = _experiments(case)
    return _located(diagnosis, traced_run.trace, outcome, case.micro_batch)


def _healthy_again(case: Case) -> Verdict:
    context = case.suspects
    trained = [p.detach() for p in context.model.parameters() if p.requires_grad]
    peak = weight_peak(trained, together=context.lockstep)
    # Diverged weights may still be finite, and so may be the losses computed with them.
    if has_run_away(peak, context.start_peak):
        return run_away(case.micro_batch, context)
    case.evidence["replays"] = {"failed": 0, "of": case.runs}
    return case.found("transient", "finite when it was run again: it did not come from the data")


def _unsteady(case: Case) -> Verdict:
    # A failure rate over two or three runs would be meaningless.
    while case.runs < _RATE_OF:
        case.again()
    case.evidence["replays"] = {"failed": case.failed, "of": case.runs}
    case.rank = -1  # the failure is not tied to the module at which one run began to fail
    message = f"it fails in {case.failed} of {case.runs} runs on equal bits: hardware or memory, or a race"
    return case.found("transient", message)


def _of_ranks(
    case: Case, failing: tuple[int, ...], again: Callable[[], tuple[int, ...]]
) -> Verdict:
    """The verdict on ranks that fail each time in a computation that succeeds on others with the same inputs."""
    if any(again() != failing for _ in range(ROUNDS)):
        raise UnsteadyError
    case.rank = failing[0]
    ranks = ", ".join(map(str, failing))
    message = (
        f"it fails on rank {ranks} alone: other ranks run the same micro-batch and are healthy"
    )
    case.evidence["replays"] = {"failed": case.failed, "of": case.runs}
    return case.found("rank", message)


def _trace(case: Case) -> Traced:
    """Probe the micro-batch; an empty trace if a probed run does not fit into memory."""
    try:
        return traced(case.micro_batch, case.suspects.model)
    except torch.OutOfMemoryError:
        if case.suspects.lockstep:
            raise
        case.evidence["trace"] = "not taken: a run that is watched does not fit into memory"
        return Traced(Trace(), case.rank)


def _bad_data(case: Case) -> Verdict | None:
    """The verdict on samples that are not finite, out of range or without labels; None if there are none."""
    batch = case.micro_batch
    faults = dict(batch.faults)
    for index, sample in enumerate(batch.ids):
        # Batch tensors are (B, ...); the row with this index is the sample's.
        rows = {name: tensor[index] for name, tensor in batch.tensors.items() if tensor.ndim}
        described = (_describe_row(name, row, case.suspects.limit) for name, row in rows.items())
        descriptions = [description for description in described if description]
        # Errors found while reading say more: they name the entry and its file.
        if descriptions and sample not in faults:
            faults[sample] = "; ".join(descriptions)
    if faults:
        return case.found("data", _each(faults), sample_ids=tuple(faults))
    # A mean over the tokens of all samples is NaN only if none has a label. For losses per sample see `_unlabelled`.
    labels = _label_faults(batch)
    if labels and len(labels) == len(batch.ids):
        return case.found("labels", _each(labels), sample_ids=tuple(labels))
    return None


def _label_faults(batch: MicroBatch) -> dict[str, str]:
    """Problems with labels, by sample; empty if the micro-batch has no labels."""
    rows = zip(batch.ids, batch.tensors.get("labels", ()), strict=False)
    faults = {sample: label_faults(row, ignore=IGNORE) for sample, row in rows}
    return {sample: fault for sample, fault in faults.items() if fault}


def _unlabelled(case: Case, outcome: Outcome) -> Verdict | None:
    """Name the samples without a label if losses are per sample and only theirs are NaN; else None."""
    batch = case.micro_batch
    labels = _label_faults(batch)
    # Only NaN differs from itself.
    bad = {sample for sample, loss in zip(batch.ids, outcome.losses, strict=False) if loss != loss}
    if not labels or len(outcome.losses) != len(batch.ids) or bad != labels.keys():
        return None
    return case.found("labels", _each(labels), sample_ids=tuple(labels))


def _each(faults: Mapping[str, str]) -> str:
    """The problem of one sample, or of each sample with its name."""
    if len(faults) == 1:
        return next(iter(faults.values()))
    return "; ".join(f"{sample}: {fault}" for sample, fault in faults.items())


def _describe_row(name: str, row: torch.Tensor, limit: float | None) -> str | None:
    description = describe_bad(name, row, limit)
    if description is None or row.ndim != 2 or "embed" not in name:
        return description
    # Text embeddings have one row per token.
    # (tokens, width) -> (tokens,): True for tokens with any value that is not finite.
    bad = ~torch.isfinite(row).all(dim=-1)
    tokens = bad.nonzero().flatten().tolist()
    return (
        f"{description}, at token {tokens[0]} of {len(row)}{others(tokens)}"
        if tokens
        else description
    )


def _experiments(case: Case) -> Verdict:
    """Change one thing at a time until the replay is healthy every time."""
    if (growth := too_high(case)) is not None:  # then an overflow is not caused by a kernel
        return growth
    # Components that can be switched off come next, each tested by itself.
    fallback = switch_at_fault(case)
    if fallback is not None:
        message = f"finite with {fallback.name} switched off ({fallback.remedy} in its place)"
        return case.found(fallback.cause, message, switch=fallback.name)
    if case.kind != "zero_gradient" and _may_try_fp32(case) and finite_in_fp32(case):
        return case.found("precision", "finite in fp32: the values leave the range of the dtype")
    return blamed(case)


def _located(verdict: Verdict, trace: Trace, outcome: Outcome, micro_batch: MicroBatch) -> Verdict:
    """Add to a verdict the first bad module and op, the timesteps, and the samples with bad inputs."""
    timesteps = outcome.timesteps
    if verdict.sample_ids:
        # Report the timesteps of the failing samples only.
        rows = [micro_batch.ids.index(sample) for sample in verdict.sample_ids]
        timesteps = tuple(outcome.timesteps[row] for row in rows)
    # A bad value that the forward hid may still be the one that makes the backward fail.
    hidden = None if trace.bad_inputs else next(iter(trace.hidden), None)
    origin = trace.origin or hidden
    ids = verdict.sample_ids
    # If no sample is proven to be the cause, a skip has to exclude the whole micro-batch.
    is_unexplained = verdict.cause == "unknown" and not verdict.evidence.get("every_sample")
    if is_unexplained and not outcome.gradient_is_zero:
        # They are skipped this time only; the weights were healthy in the previous step.
        ids = micro_batch.ids
    verdict = replace(verdict, sample_ids=ids, timesteps=timesteps)
    if origin is None:
        return _given(verdict, trace)
    position = f" at {origin.module}" if origin.module else " outside the model, in the loss"
    message = (
        f"{verdict.words}; first {origin.kind} in the {origin.direction}: {origin.op}{position}"
    )
    return replace(
        verdict,
        words=message,
        module=origin.module,
        op=origin.op,
        direction=origin.direction,
        dtype=origin.dtype,
    )


def _given(verdict: Verdict, trace: Trace) -> Verdict:
    """Report that the model received bad values although the samples are good, so that no op is the cause."""
    if not trace.bad_inputs or verdict.cause not in ("unknown", "data", "inputs"):
        return verdict
    # The samples were checked before, so these values were made between data and model.
    bad_inputs = "; ".join(trace.bad_inputs.values())
    message = (
        f"{verdict.words}; the model was given values that are not finite, "
        f"though the cached ones are: {bad_inputs}"
    )
    if verdict.cause != "unknown":
        return replace(verdict, words=message)
    return replace(verdict, cause="inputs", words=message)


def _may_try_fp32(case: Case) -> bool:
    dtypes = {p.dtype for p in case.suspects.model.parameters() if p.is_floating_point()}
    autocasts = case.micro_batch.autocasts or _autocasts(case.suspects.model)
    # A model that computes in fp32 already cannot become healthy in fp32.
    if dtypes <= {torch.float32, torch.float64} and not autocasts:
        return False
    if case.suspects.lockstep and not room_for_fp32(case.suspects.model):
        # Running out of memory in a pass that ranks share would end the run.
        case.evidence["fp32"] = "not tried: a pass in fp32 may not fit into memory"
        return False
    return True


def _autocasts(model: nn.Module) -> bool:
    """True if Accelerate wraps the model's forward, as it does to compute in half precision."""
    return "_original_forward" in model.__dict__


def _evidence(outcome: Outcome, trace: Trace) -> dict[str, object]:
    return {
        # JSON has no NaN or infinity.
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
