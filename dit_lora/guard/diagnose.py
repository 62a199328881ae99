"""Find the cause of a failed step: `diagnose` checks facts, replays the micro-batch, and runs experiments.

1. Facts need no replay: bad values or labels of the samples, then bad weights, optimizer state and averages
   (guard/state_checks.py).
2. The unchanged micro-batch runs again three times (guard/replay.py). If the runs differ, or none fails, the cause is
   `transient`. Otherwise a probed run (guard/probe.py) finds the first module and op with a bad value.
3. Each experiment changes one thing: a component off (attention backend, torch.compile or kernel, guard/fallbacks.py),
   fp32, each sample by itself, other noise and timesteps, another position in the run.

A single lucky run proves nothing. A component is the cause if the micro-batch is healthy each time without it and
fails each time with it (A-B-A). A sample is the cause if it fails by itself, with other noise and at another position
in the run, while another sample is healthy, each time, at the position where it fails.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from dit_lora.errors import format_remaining_count
from dit_lora.guard.diagnosis import Diagnosis, DiagnosisContext, PendingDiagnosis
from dit_lora.guard.fallbacks import Fallback, convert_to_fp32
from dit_lora.guard.probe import OpTrace
from dit_lora.guard.replay import MicroBatch, RankTrace, ReplayOutcome, trace_micro_batch
from dit_lora.guard.state_checks import (
    compute_weight_peak,
    diagnose_diverged_weights,
    find_bad_state,
    find_grown_weights,
    is_unusable_magnitude,
)
from dit_lora.numerics.dtensors import has_collective_forward, is_sharded
from dit_lora.numerics.finite import describe_bad_values
from dit_lora.numerics.labels import find_label_problem
from dit_lora.numerics.memory import has_memory_for_fp32
from dit_lora.numerics.objectives import IGNORE_INDEX

NUM_REPLAYS = 3
"""Number of runs of the unchanged micro-batch, before any experiment."""
NUM_ROUNDS = 8
"""Times that a change that helps is undone and made again. A fault that strikes with probability p, whatever is
switched off, passes with p^11 (1 - p)^9, at most one in a million.
"""
_MIN_RUNS_FOR_RATE = 8  # minimum number of runs for a reported failure rate
_NUM_REDRAWS = 3  # with other noise and timesteps
_UNUSED_STEP_OFFSET = 1_000_003  # steps ahead: a position in the run that no sample has been at


class InconsistentReplayError(Exception):
    """Raised if the same replay was healthy once and failed once, so that changes between replays prove nothing."""


def diagnose(
    micro_batch: MicroBatch, context: DiagnosisContext, *, kind: str, control: MicroBatch | None = None
) -> Diagnosis:
    """Find the cause of a failed step of this kind, as far as this rank's micro-batch shows it.

    `control` was healthy in the previous step, for comparison at the place where this micro-batch fails.
    """
    pending = PendingDiagnosis(micro_batch, context, kind, control)
    # Facts that can be read from data and state come first; they need no replay.
    diagnosis = _find_bad_data(pending) or find_bad_state(pending.micro_batch, context)
    if diagnosis is not None:
        return diagnosis
    # A pass of a sharded model would wait for ranks that are not diagnosing.
    if has_collective_forward(context.model) and not context.collective_forward:
        # A loss belongs to a sample; a gradient is summed over all samples and names none.
        ids = micro_batch.ids if kind in ("non_finite_loss", "bad_data") else ()
        message = "not replayed: the model is sharded, and one rank cannot run it alone"
        return pending.build_final_diagnosis("unknown", message, sample_ids=ids)
    try:
        return _diagnose_by_replay(pending)
    except InconsistentReplayError:
        # A failure rate over two or three runs would be meaningless.
        while pending.num_runs < _MIN_RUNS_FOR_RATE:
            pending.rerun_micro_batch()
        pending.evidence["replays"] = {"failed": pending.num_failed, "of": pending.num_runs}
        pending.rank = -1  # the failure is not tied to the module at which one run began to fail
        runs = f"{pending.num_failed} of {pending.num_runs} runs with equal inputs"
        return pending.build_final_diagnosis(
            "transient", f"it fails in {runs}: faulty hardware or memory, or a race condition"
        )
    except torch.OutOfMemoryError:
        if context.collective_forward:
            raise  # other ranks may wait in the middle of a pass for this one
        message = "no cause found: a replay does not fit into memory next to the loop's own tensors"
        return pending.build_final_diagnosis("unknown", message, sample_ids=micro_batch.ids)


def _diagnose_by_replay(pending: PendingDiagnosis) -> Diagnosis:
    """Diagnose a failed micro-batch with replays.

    Raises `InconsistentReplayError` if it fails only in some of them.
    """
    context, outcome = pending.context, pending.rerun_micro_batch()
    # The same inputs must fail each time: a random failure proves no cause.
    for _ in range(NUM_REPLAYS - 1):
        repeat = pending.rerun_micro_batch()
        if pending.is_healthy(repeat) != pending.is_healthy(outcome):
            raise InconsistentReplayError
    if not pending.num_failed:
        trained = [p.detach() for p in context.model.parameters() if p.requires_grad]
        peak = compute_weight_peak(trained, all_ranks=context.collective_forward)
        # Diverged weights may still be finite, and so may be the losses computed with them.
        if is_unusable_magnitude(peak, context.start_peak):
            return diagnose_diverged_weights(pending.micro_batch, context)
        pending.evidence["replays"] = {"failed": 0, "of": pending.num_runs}
        return pending.build_final_diagnosis("transient", "finite when it was replayed, so the data is not the cause")
    if (label_diagnosis := _find_unlabelled_samples(pending, outcome)) is not None:
        return label_diagnosis
    # With sequence parallelism, ranks hold different tokens of a micro-batch; with only sharded weights, the same.
    ranks_share_inputs = context.collective_forward and is_sharded(context.model)
    # Ranks that compute the same must fail together. One that fails where others succeed is the cause.
    if outcome.failed_ranks and ranks_share_inputs:
        return _diagnose_failing_ranks(pending, outcome.failed_ranks, lambda: pending.rerun_micro_batch().failed_ranks)
    pending.evidence["replays"] = {"failed": pending.num_failed, "of": pending.num_runs}
    # A probed run finds the first bad value. It changes nothing, so it comes before the experiments.
    traced_run = _probe_failure(pending)
    pending.rank = traced_run.rank
    pending.evidence |= _collect_evidence(outcome, traced_run.trace)
    # The loss fails on all ranks or on none, but only some ranks compute the first bad value themselves.
    if traced_run.failing_ranks and ranks_share_inputs:
        diagnosis = _diagnose_failing_ranks(
            pending, traced_run.failing_ranks, lambda: _probe_failure(pending).failing_ranks
        )
    else:
        diagnosis = _run_experiments(pending)
    return _add_fault_location(diagnosis, traced_run.trace, outcome, pending.micro_batch)


def _diagnose_failing_ranks(
    pending: PendingDiagnosis, failing_ranks: tuple[int, ...], find_failing_ranks: Callable[[], tuple[int, ...]]
) -> Diagnosis:
    """Diagnosis of ranks that fail each time in a computation that succeeds on other ranks with the same inputs."""
    if any(find_failing_ranks() != failing_ranks for _ in range(NUM_ROUNDS)):
        raise InconsistentReplayError
    pending.rank = failing_ranks[0]
    ranks = ", ".join(map(str, failing_ranks))
    message = f"it fails only on rank {ranks}: other ranks run the same micro-batch and are healthy"
    pending.evidence["replays"] = {"failed": pending.num_failed, "of": pending.num_runs}
    return pending.build_final_diagnosis("rank", message)


def _probe_failure(pending: PendingDiagnosis) -> RankTrace:
    """Probe the failing micro-batch; an empty trace if a probed run does not fit into memory."""
    try:
        return trace_micro_batch(pending.micro_batch, pending.context.model)
    except torch.OutOfMemoryError:
        if pending.context.collective_forward:
            raise
        pending.evidence["trace"] = "not taken: a probed run does not fit into memory"
        return RankTrace(OpTrace(), pending.rank)


def _find_bad_data(pending: PendingDiagnosis) -> Diagnosis | None:
    """Diagnosis of samples that are not finite, out of range or without labels; None if there are none."""
    batch = pending.micro_batch
    faults = dict(batch.faults)
    for index, sample in enumerate(batch.ids):
        # Batch tensors are (B, ...); the row with this index is the sample's.
        rows = {name: tensor[index] for name, tensor in batch.tensors.items() if tensor.ndim}
        described = (_describe_row(name, row, pending.context.max_magnitude) for name, row in rows.items())
        descriptions = [description for description in described if description]
        # Errors found while reading say more: they name the entry and its file.
        if descriptions and sample not in faults:
            faults[sample] = "; ".join(descriptions)
    if faults:
        return pending.build_final_diagnosis("data", _format_faults(faults), sample_ids=tuple(faults))
    # A mean over the tokens of all samples is NaN only if none has a label. For losses per sample see
    # `_find_unlabelled_samples`.
    labels = _find_label_faults(batch)
    if labels and len(labels) == len(batch.ids):
        return pending.build_final_diagnosis("labels", _format_faults(labels), sample_ids=tuple(labels))
    return None


def _find_label_faults(batch: MicroBatch) -> dict[str, str]:
    """Problems with labels, by sample; empty if the micro-batch has no labels."""
    rows = zip(batch.ids, batch.tensors.get("labels", ()), strict=False)
    faults = {sample: find_label_problem(row, ignore_index=IGNORE_INDEX) for sample, row in rows}
    return {sample: fault for sample, fault in faults.items() if fault}


def _find_unlabelled_samples(pending: PendingDiagnosis, outcome: ReplayOutcome) -> Diagnosis | None:
    """Diagnosis naming the samples without a label, if losses are per sample and only theirs are NaN; else None."""
    batch = pending.micro_batch
    labels = _find_label_faults(batch)
    # Only NaN differs from itself.
    bad = {sample for sample, loss in zip(batch.ids, outcome.losses, strict=False) if loss != loss}
    if not labels or len(outcome.losses) != len(batch.ids) or bad != labels.keys():
        return None
    return pending.build_final_diagnosis("labels", _format_faults(labels), sample_ids=tuple(labels))


def _format_faults(faults: Mapping[str, str]) -> str:
    if len(faults) == 1:
        return next(iter(faults.values()))
    return "; ".join(f"{sample}: {fault}" for sample, fault in faults.items())


def _describe_row(name: str, row: torch.Tensor, limit: float | None) -> str | None:
    description = describe_bad_values(name, row, limit)
    if description is None or row.ndim != 2 or "embed" not in name:
        return description
    # Text embeddings have one row per token.
    # (tokens, width) -> (tokens,): True for tokens with any value that is not finite.
    bad = ~torch.isfinite(row).all(dim=-1)
    tokens = bad.nonzero().flatten().tolist()
    if not tokens:
        return description
    return f"{description}, at token {tokens[0]} of {len(row)}{format_remaining_count(tokens)}"


def _run_experiments(pending: PendingDiagnosis) -> Diagnosis:
    """Replay the micro-batch with one thing changed at a time until it is healthy every time, and diagnose it."""
    if (growth := find_grown_weights(pending)) is not None:  # then an overflow is not caused by a kernel
        return growth
    # Components that can be switched off come next, each tested by itself.
    fallback = find_faulty_component(pending)
    if fallback is not None:
        message = f"finite with {fallback.name} switched off ({fallback.replacement} in its place)"
        return pending.build_final_diagnosis(fallback.cause, message, switch=fallback.name)
    if pending.kind != "zero_gradient" and _should_try_fp32(pending) and is_healthy_in_fp32(pending):
        return pending.build_final_diagnosis("precision", "finite in fp32: the values exceed the range of the dtype")
    return isolate_sample(pending)


def _add_fault_location(
    diagnosis: Diagnosis, trace: OpTrace, outcome: ReplayOutcome, micro_batch: MicroBatch
) -> Diagnosis:
    """Add to a diagnosis the first bad module and op, the timesteps, and the samples with bad inputs."""
    timesteps = outcome.timesteps
    if diagnosis.sample_ids:
        # Report the timesteps of the failing samples only.
        rows = [micro_batch.ids.index(sample) for sample in diagnosis.sample_ids]
        timesteps = tuple(outcome.timesteps[row] for row in rows)
    # A bad value that the forward hid may still be the one that makes the backward fail.
    hidden = None if trace.bad_inputs else next(iter(trace.hidden_origins), None)
    origin = trace.first_bad_op or hidden
    ids = diagnosis.sample_ids
    is_unexplained = diagnosis.cause == "unknown" and not diagnosis.evidence.get("every_sample")
    if is_unexplained and not outcome.has_zero_gradient:
        # No sample is proven to be the cause, so this time the whole micro-batch is skipped.
        ids = micro_batch.ids
    diagnosis = replace(diagnosis, sample_ids=ids, timesteps=timesteps)
    if origin is None:
        return _add_bad_inputs(diagnosis, trace)
    position = f" at {origin.module}" if origin.module else " outside the model, in the loss"
    message = f"{diagnosis.message}; first {origin.kind} in the {origin.direction}: {origin.op}{position}"
    return replace(
        diagnosis, message=message, module=origin.module, op=origin.op, direction=origin.direction, dtype=origin.dtype
    )


def _add_bad_inputs(diagnosis: Diagnosis, trace: OpTrace) -> Diagnosis:
    """Add to a diagnosis that the model received bad values although the samples are good, so no op is the cause."""
    if not trace.bad_inputs or diagnosis.cause not in ("unknown", "data", "inputs"):
        return diagnosis
    # The samples were checked before, so these values were made between data and model.
    bad_inputs = "; ".join(trace.bad_inputs.values())
    message = f"the model received values that are not finite, although the cached values are finite: {bad_inputs}"
    cause = "inputs" if diagnosis.cause == "unknown" else diagnosis.cause
    return replace(diagnosis, cause=cause, message=f"{diagnosis.message}; {message}")


def _should_try_fp32(pending: PendingDiagnosis) -> bool:
    dtypes = {p.dtype for p in pending.context.model.parameters() if p.is_floating_point()}
    # Accelerate wraps a model's forward, under this name, to compute in half precision.
    autocasts = pending.micro_batch.uses_autocast or "_original_forward" in pending.context.model.__dict__
    # A model that computes in fp32 already cannot become healthy in fp32.
    if dtypes <= {torch.float32, torch.float64} and not autocasts:
        return False
    if pending.context.collective_forward and not has_memory_for_fp32(pending.context.model):
        # Running out of memory in a pass that ranks share would end the run.
        pending.evidence["fp32"] = "not tried: a pass in fp32 may not fit into memory"
        return False
    return True


def _collect_evidence(outcome: ReplayOutcome, trace: OpTrace) -> dict[str, object]:
    return {
        # JSON has no NaN or infinity.
        "losses": [loss if loss == loss and abs(loss) < 1e38 else str(loss) for loss in outcome.losses],
        "bad_gradients": list(outcome.bad_gradients[:10]),
        "hidden": [f"{o.kind} in {o.op} at {o.module}" for o in trace.hidden_origins[:10]],
        "trail": [
            f"{s.name} ({s.direction}, {s.dtype}) reaches {s.peak:.3g}, {s.headroom:.3g} times below the limit"
            for s in trace.trail
        ],
    }


def is_cause_of_failure(
    pending: PendingDiagnosis, disable_component: Callable[[], AbstractContextManager[None]], rounds: int = NUM_ROUNDS
) -> bool:
    """True if the micro-batch is healthy each time without a component, and fails each time with it (A-B-A).

    Raises:
        InconsistentReplayError: If runs that should agree do not.
    """
    # Most switches are not the cause, which one run shows; only a switch that helps needs all rounds.
    with disable_component():
        if not pending.run_and_check_health():
            return False
    # Test A again: if the run does not fail with the component on, its success without it was chance.
    for _ in range(rounds):
        if pending.rerun_and_check_health():
            raise InconsistentReplayError
        with disable_component():
            if not pending.run_and_check_health():
                raise InconsistentReplayError
    return True


def find_faulty_component(pending: PendingDiagnosis) -> Fallback | None:
    """Find the first component without which the failed micro-batch is healthy, or None.

    A component that cannot be tested for lack of memory is recorded.
    """
    for fallback in pending.context.list_enabled_fallbacks():
        experiment = partial(is_cause_of_failure, pending, fallback.disable_temporarily)
        try:
            if pending.context.run_experiment(experiment):
                return fallback
        except torch.OutOfMemoryError:
            if pending.context.collective_forward:
                raise  # other ranks may wait in the middle of a pass for this one
            pending.evidence[fallback.name] = "not tried: without it, a step does not fit into memory"
    return None


def is_healthy_in_fp32(pending: PendingDiagnosis) -> bool:
    """True if the micro-batch is healthy with fp32 weights and computation."""
    use_fp32 = partial(convert_to_fp32, pending.context.model)
    experiment = partial(is_cause_of_failure, pending, use_fp32, rounds=NUM_ROUNDS // 2)
    try:
        return bool(pending.context.run_experiment(experiment))
    except torch.OutOfMemoryError:
        if pending.context.collective_forward:
            raise
        pending.evidence["fp32"] = "not tried: a second copy of the weights does not fit"
        return False


def isolate_sample(pending: PendingDiagnosis) -> Diagnosis:
    """Diagnose a micro-batch that fails without any of the optional components too.

    The cause is a sample, its noise, the position in the run, or unknown.
    """
    diagnosis = pending.context.run_experiment(partial(_isolate_sample, pending))
    if diagnosis is not None:
        return diagnosis
    message = "switching components off does not make it healthy, and its samples cannot be run one by one"
    return pending.build_final_diagnosis("unknown", message)


def _isolate_sample(pending: PendingDiagnosis) -> Diagnosis:
    singles = _split_samples(pending.micro_batch)
    # Run samples one at a time: in a batch, healthy samples could not be told from failing ones.
    failing = [sample for sample in singles if not _is_consistently_healthy(pending, sample, rounds=1)]
    if not failing:
        message = "it fails only as a batch: each of its samples is healthy by itself"
        return pending.build_final_diagnosis("step", message)
    # A sample is the cause only if another is healthy at the same position in the run.
    control = _find_control_sample(pending, failing, [sample for sample in singles if sample not in failing])
    if control is None:
        return pending.build_final_diagnosis("unknown", "switching components off does not make it healthy")
    pending.evidence["control"] = control.ids[0]
    # The control's timestep may be one at which every sample fails, so try other timesteps too.
    for healthy_candidate in (control, *_iter_redrawn_batches(control)):
        if _is_consistently_healthy(pending, healthy_candidate.move_to_run_position(failing[0])):
            return _compare_with_control_sample(pending, failing, healthy_candidate)
    # A sample that is healthy elsewhere fails here too, so no sample is at fault. If it is healthy at an unused
    # position, this position is the cause and not the model.
    if _is_consistently_healthy(pending, _move_to_unused_step(control)):
        message = "any sample fails at this position in the run, also one that is healthy at another"
        return pending.build_final_diagnosis("step", message)
    pending.evidence["every_sample"] = True
    message = (
        "every sample fails now, also those that were healthy one step earlier, whichever component is switched off"
    )
    return pending.build_final_diagnosis("unknown", message)


def _split_samples(batch: MicroBatch) -> list[MicroBatch]:
    return [batch.select_sample(index) for index in range(len(batch.ids))]


def _is_consistently_healthy(pending: PendingDiagnosis, batch: MicroBatch, rounds: int = NUM_ROUNDS) -> bool:
    """True if a micro-batch is healthy in every run. Raises `InconsistentReplayError` if runs differ."""
    is_healthy = pending.run_and_check_health(batch)
    # A single healthy run proves little, so repeat it often; a failure is repeated only once.
    if any(pending.run_and_check_health(batch) is not is_healthy for _ in range(rounds if is_healthy else 1)):
        raise InconsistentReplayError
    return is_healthy


def _find_control_sample(
    pending: PendingDiagnosis, failing: Sequence[MicroBatch], healthy_samples: Sequence[MicroBatch]
) -> MicroBatch | None:
    """Find another sample to compare a failing one with: from the micro-batch, the last healthy step, or the dataset.

    None if there is none.
    """
    # The earlier micro-batch may contain a failing sample again.
    bad = {candidate.ids[0] for candidate in failing}
    # Samples of the last healthy step, tried after those of this micro-batch.
    earlier_samples = _split_samples(pending.control) if pending.control is not None else []
    for candidate in [*healthy_samples, *earlier_samples]:
        if candidate.ids[0] not in bad:
            return candidate
    # All available samples failed themselves, so take any other sample of the dataset.
    return pending.context.find_other_sample(pending.micro_batch, bad)


def _compare_with_control_sample(
    pending: PendingDiagnosis, failing: Sequence[MicroBatch], control: MicroBatch
) -> Diagnosis:
    if not failing[0].can_redraw:
        message = (
            "it fails whichever component is switched off, and other samples are healthy; other noise was not tried, "
            "because this loop cannot draw it again"
        )
        return pending.build_final_diagnosis("inputs", message, sample_ids=_get_sample_ids(failing))
    # Samples that are healthy with other noise and timesteps.
    noise_dependent = [sample for sample in failing if _is_healthy_with_new_noise(pending, sample, control)]
    # The other samples: some are healthy at another position in the run, and some fail at every position.
    remaining = [sample for sample in failing if sample not in noise_dependent]
    position_dependent = [sample for sample in remaining if pending.run_and_check_health(_move_to_unused_step(sample))]
    always_failing = [sample for sample in remaining if sample not in position_dependent]
    if always_failing:
        message = "it fails whichever component is switched off, and other samples are healthy"
        return pending.build_final_diagnosis("data", message, sample_ids=_get_sample_ids(always_failing))
    if position_dependent:
        message = (
            "it fails only at this position in the run: it is healthy at another, and other samples are healthy here"
        )
        return pending.build_final_diagnosis("step", message, sample_ids=_get_sample_ids(position_dependent))
    return _diagnose_random_inputs(pending, noise_dependent, control)


def _diagnose_random_inputs(
    pending: PendingDiagnosis, failing: Sequence[MicroBatch], control: MicroBatch
) -> Diagnosis:
    """Diagnosis of samples that fail only with their own noise and timesteps."""
    # Give a healthy sample each failing one's noise and timesteps.
    controls = (control.move_to_run_position(sample, copies_seeds=True) for sample in failing)
    if all(_is_consistently_healthy(pending, moved) for moved in controls):
        pending.evidence["control_with_the_same_draws"] = "healthy"
        message = "it fails only with this noise and timestep, whichever component is switched off"
    else:
        pending.evidence["control_with_the_same_draws"] = "fails"
        message = "any sample fails with this noise and timestep: another one was tried"
    return pending.build_final_diagnosis("inputs", message, sample_ids=_get_sample_ids(failing))


def _is_healthy_with_new_noise(pending: PendingDiagnosis, sample: MicroBatch, control: MicroBatch) -> bool:
    """True if a failing sample is healthy with other noise and timesteps: new draws, or those of a healthy sample.

    All new draws may lie in a range of timesteps at which every sample fails; those of the healthy
    sample do not.
    """
    # One healthy run is enough: the sample can be computed.
    if any(pending.run_and_check_health(redrawn) for redrawn in _iter_redrawn_batches(sample)):
        return True
    moved_control = control.move_to_run_position(sample)
    return _is_consistently_healthy(pending, sample.move_to_run_position(moved_control, copies_seeds=True))


def _iter_redrawn_batches(sample: MicroBatch) -> Iterator[MicroBatch]:
    if sample.can_redraw:
        yield from map(sample.redraw_noise, range(_NUM_REDRAWS))


def _move_to_unused_step(sample: MicroBatch) -> MicroBatch:
    """Move the sample to an unused position in the run, which changes its dropout masks; unchanged if impossible."""
    return sample.move_to_run_position(replace(sample, step=sample.step + _UNUSED_STEP_OFFSET))


def _get_sample_ids(batches: Collection[MicroBatch]) -> tuple[str, ...]:
    return tuple(batch.ids[0] for batch in batches)
