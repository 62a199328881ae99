"""Bisect a failure by experiments on its micro-batch: a change is the cause only if its effect is always the same.

A single lucky run proves nothing. A switch is the cause if the micro-batch is healthy each time without it and fails
each time with it (A-B-A). A sample is the cause if it fails when run individually, with other noise and at another
position in the run, while another sample is healthy, each time, at the position where it fails.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.diagnosis_context import PendingDiagnosis
from dit_lora.guard.fallbacks import Fallback, convert_to_fp32
from dit_lora.guard.replay import MicroBatch

NUM_REPLAYS = 3
"""Number of runs of the unchanged micro-batch, before any experiment."""
NUM_ROUNDS = 8
"""Times that a change that helps is undone and made again. A fault that strikes with probability p, whatever is
switched off, passes with p^11 (1 - p)^9, at most one in a million.
"""
_NUM_REDRAWS = 3  # with other noise and timesteps
_UNUSED_STEP_OFFSET = 1_000_003  # steps ahead: a position in the run that no sample has been at


class InconsistentReplayError(Exception):
    """Raised if the same replay was healthy once and failed once, so that changes between replays prove nothing."""


def is_cause_of_failure(
    pending: PendingDiagnosis, disable_component: Callable[[], AbstractContextManager[None]], rounds: int = NUM_ROUNDS
) -> bool:
    """True if the micro-batch is healthy each time without a component, and fails each time with it (A-B-A).

    Raises:
        InconsistentReplayError: If runs that should agree do not.
    """
    # Most switches are not the cause, which one run shows; only a switch that helps needs all rounds.
    with disable_component():
        if not pending.run_is_healthy():
            return False
    # Test A again: if the run does not fail with the component on, its success without it was chance.
    for _ in range(rounds):
        if pending.is_healthy(pending.rerun()):
            raise InconsistentReplayError
        with disable_component():
            if not pending.run_is_healthy():
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
    message = "nothing that was switched off makes it healthy, and its samples cannot be run one by one"
    return pending.conclude("unknown", message)


def _isolate_sample(pending: PendingDiagnosis) -> Diagnosis:
    singles = _split_samples(pending.micro_batch)
    # Run samples one at a time: in a batch, healthy samples could not be told from failing ones.
    failing = [sample for sample in singles if not _is_consistently_healthy(pending, sample, rounds=1)]
    if not failing:
        message = "it fails in company only: each of its samples is healthy alone"
        return pending.conclude("step", message)
    # A sample is the cause only if another is healthy at the same position in the run.
    control = _find_control(pending, failing, [sample for sample in singles if sample not in failing])
    if control is None:
        return pending.conclude("unknown", "nothing that was switched off makes it healthy")
    pending.evidence["control"] = control.ids[0]
    # The control's timestep may be one at which every sample fails, so try other timesteps too.
    for healthy_candidate in (control, *_iter_redraws(control)):
        if _is_consistently_healthy(pending, healthy_candidate.move_to(failing[0])):
            return _compare_with_control(pending, failing, healthy_candidate)
    # A sample that is healthy elsewhere fails here too, so no sample is at fault. If it is healthy at an unused
    # position, this position is the cause and not the model.
    if _is_consistently_healthy(pending, _move_to_unused_step(control)):
        message = "whatever sample is at this place in the run: one that is healthy elsewhere fails here too"
        return pending.conclude("step", message)
    pending.evidence["every_sample"] = True
    message = "every sample fails now, those too that were healthy a step ago, whatever is switched off"
    return pending.conclude("unknown", message)


def _split_samples(batch: MicroBatch) -> list[MicroBatch]:
    return [batch.select_sample(index) for index in range(len(batch.ids))]


def _is_consistently_healthy(pending: PendingDiagnosis, batch: MicroBatch, rounds: int = NUM_ROUNDS) -> bool:
    """True if a micro-batch is healthy in every run. Raises `InconsistentReplayError` if runs differ."""
    is_healthy = pending.run_is_healthy(batch)
    # A single healthy run proves little, so repeat it often; a failure is repeated only once.
    if any(pending.run_is_healthy(batch) is not is_healthy for _ in range(rounds if is_healthy else 1)):
        raise InconsistentReplayError
    return is_healthy


def _find_control(
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


def _compare_with_control(pending: PendingDiagnosis, failing: Sequence[MicroBatch], control: MicroBatch) -> Diagnosis:
    if not failing[0].can_redraw:
        message = (
            "it fails whatever is switched off; other samples are healthy; whether it would with other noise "
            "is not known: this loop cannot draw it again"
        )
        return pending.conclude("inputs", message, sample_ids=_get_sample_ids(failing))
    # Samples that are healthy with other noise and timesteps.
    noise_dependent = [sample for sample in failing if _is_healthy_with_new_noise(pending, sample, control)]
    # Of the others, some are healthy at another position in the run, and the rest fails at any.
    remaining = [sample for sample in failing if sample not in noise_dependent]
    position_dependent = [sample for sample in remaining if pending.run_is_healthy(_move_to_unused_step(sample))]
    always_failing = [sample for sample in remaining if sample not in position_dependent]
    if always_failing:
        message = "it fails whatever is switched off; other samples are healthy"
        return pending.conclude("data", message, sample_ids=_get_sample_ids(always_failing))
    if position_dependent:
        message = "only at this place in the run: it is healthy at another, and other samples are healthy here"
        return pending.conclude("step", message, sample_ids=_get_sample_ids(position_dependent))
    return _diagnose_random_inputs(pending, noise_dependent, control)


def _diagnose_random_inputs(
    pending: PendingDiagnosis, failing: Sequence[MicroBatch], control: MicroBatch
) -> Diagnosis:
    """Diagnosis of samples that fail only with their own noise and timesteps."""
    # Give a healthy sample each failing one's noise and timesteps.
    controls = (control.move_to(sample, copies_draws=True) for sample in failing)
    if all(_is_consistently_healthy(pending, moved) for moved in controls):
        pending.evidence["control_with_the_same_draws"] = "healthy"
        message = "only with this noise and timestep: finite with others, whatever is switched off"
    else:
        pending.evidence["control_with_the_same_draws"] = "fails"
        message = "with this noise and timestep, whatever the sample: another fails with the same ones"
    return pending.conclude("inputs", message, sample_ids=_get_sample_ids(failing))


def _is_healthy_with_new_noise(pending: PendingDiagnosis, sample: MicroBatch, control: MicroBatch) -> bool:
    """True if a failing sample is healthy with other noise and timesteps: new draws, or those of a healthy sample.

    All new draws may lie in a range of timesteps at which every sample fails; those of the healthy
    sample do not.
    """
    # One healthy run is enough: the sample can be computed.
    if any(pending.run_is_healthy(redrawn) for redrawn in _iter_redraws(sample)):
        return True
    moved_control = control.move_to(sample)
    return _is_consistently_healthy(pending, sample.move_to(moved_control, copies_draws=True))


def _iter_redraws(sample: MicroBatch) -> Iterator[MicroBatch]:
    if sample.can_redraw:
        yield from map(sample.redraw, range(_NUM_REDRAWS))


def _move_to_unused_step(sample: MicroBatch) -> MicroBatch:
    """Move the sample to an unused position in the run, which changes its dropout masks; unchanged if impossible."""
    return sample.move_to(replace(sample, step=sample.step + _UNUSED_STEP_OFFSET))


def _get_sample_ids(batches: Collection[MicroBatch]) -> tuple[str, ...]:
    return tuple(batch.ids[0] for batch in batches)
