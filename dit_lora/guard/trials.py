"""Experiments on a micro-batch that fails: a change is the cause only if it has the same effect every time.

A single lucky run proves nothing. A switch is the cause if the micro-batch is healthy each time without it and fails
each time with it (A-B-A). A sample is the cause if it fails when run individually, with other noise and at another
position in the run, while another sample is healthy, each time, at the position where it fails.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.suspects import Case
from dit_lora.guard.switches import Switch, in_fp32
from dit_lora.guard.verdict import Verdict

REPLAYS = 3
"""Number of runs of the unchanged micro-batch, before any experiment."""
ROUNDS = 8
"""Times that a change that helps is undone and made again. A fault that strikes with probability p, whatever is
switched off, passes with p^11 (1 - p)^9, at most one in a million.
"""
_REDRAWS = 3  # with other noise and timesteps
_NO_STEP = 1_000_003  # steps ahead: a position in the run that no sample has been at


class UnsteadyError(Exception):
    """The same run was healthy once and failed once, so changes between runs prove nothing."""


def convicts(
    case: Case, off: Callable[[], AbstractContextManager[None]], rounds: int = ROUNDS
) -> bool:
    """True if the micro-batch is healthy each time without a component, and fails each time with it (A-B-A).

    Raises:
        UnsteadyError: If runs that should agree do not.
    """
    # Most switches are not the cause, which one run shows; only a switch that helps needs all rounds.
    with off():
        if not case.healthy():
            return False
    # Test A again: if the run does not fail with the component on, its success without it was chance.
    for _ in range(rounds):
        if case.is_healthy(case.again()):
            raise UnsteadyError
        with off():
            if not case.healthy():
                raise UnsteadyError
    return True


def switch_at_fault(case: Case) -> Switch | None:
    """The first switch without which the micro-batch is healthy, or None. Out-of-memory errors are recorded."""
    for fallback in case.suspects.in_use():
        disable_component = fallback.off
        try:
            if case.suspects.attempt(lambda: convicts(case, disable_component)):  # noqa: B023  run at once
                return fallback
        except torch.OutOfMemoryError:
            if case.suspects.lockstep:
                raise  # other ranks may wait in the middle of a pass for this one
            case.evidence[fallback.name] = "not tried: without it, a step does not fit into memory"
    return None


def finite_in_fp32(case: Case) -> bool:
    """True if the micro-batch is healthy with fp32 weights and computation."""
    model = case.suspects.model
    try:
        is_cause = case.suspects.attempt(
            lambda: convicts(case, lambda: in_fp32(model), rounds=ROUNDS // 2)
        )
        return bool(is_cause)
    except torch.OutOfMemoryError:
        if case.suspects.lockstep:
            raise
        case.evidence["fp32"] = "not tried: a second copy of the weights does not fit"
        return False


def blamed(case: Case) -> Verdict:
    """The verdict if no switch helps: on samples, noise, the position in the run, or unknown."""
    diagnosis = case.suspects.attempt(lambda: _blamed(case))
    if diagnosis is not None:
        return diagnosis
    message = (
        "nothing that was switched off makes it healthy, and its samples cannot be run one by one"
    )
    return case.found("unknown", message)


def _blamed(case: Case) -> Verdict:
    singles = _alone(case.micro_batch)
    # Run samples one at a time: in a batch, healthy samples could not be told from failing ones.
    failing = [sample for sample in singles if not _steadily(case, sample, rounds=1)]
    if not failing:
        message = "it fails in company only: each of its samples is healthy alone"
        return case.found("step", message)
    # A sample is the cause only if another is healthy at the same position in the run.
    control = _control(case, failing, [sample for sample in singles if sample not in failing])
    if control is None:
        return case.found("unknown", "nothing that was switched off makes it healthy")
    case.evidence["control"] = control.ids[0]
    # The control's timestep may be one at which every sample fails, so try other timesteps too.
    for healthy_candidate in (control, *_redraws(control)):
        if _steadily(case, _moved(healthy_candidate, failing[0])):
            return _against_control(case, failing, healthy_candidate)
    return _control_fails(case, control)


def _alone(batch: MicroBatch) -> list[MicroBatch]:
    return [batch.single(index) for index in range(len(batch.ids))]


def _steadily(case: Case, batch: MicroBatch, rounds: int = ROUNDS) -> bool:
    """True if a micro-batch is healthy in every run. Raises `UnsteadyError` if runs differ."""
    is_healthy = case.healthy(batch)
    # A single healthy run proves little, so repeat it often; a failure is repeated only once.
    if any(case.healthy(batch) is not is_healthy for _ in range(rounds if is_healthy else 1)):
        raise UnsteadyError
    return is_healthy


def _control(
    case: Case, failing: Sequence[MicroBatch], others: Sequence[MicroBatch]
) -> MicroBatch | None:
    """Another sample, from the same micro-batch, the last healthy step, or the dataset; None if there is none."""
    # The earlier micro-batch may contain a failing sample again.
    bad = {candidate.ids[0] for candidate in failing}
    # Samples of the last healthy step, tried after those of this micro-batch.
    earlier_samples = _alone(case.control) if case.control is not None else []
    for candidate in [*others, *earlier_samples]:
        if candidate.ids[0] not in bad:
            return candidate
    # All available samples failed themselves, so take any other sample of the dataset.
    return case.suspects.another(case.micro_batch, bad)


def _moved(batch: MicroBatch, place: MicroBatch, *, draws: bool = False) -> MicroBatch:
    """The micro-batch at another one's position in the run, if possible: dropout masks depend on the position."""
    return batch if batch.at is None else batch.at(place, draws)


def _control_fails(case: Case, control: MicroBatch) -> Verdict:
    """The verdict if a sample that was healthy elsewhere fails here too, so that no sample is at fault."""
    # If it is healthy at an unused position, this position is the cause and not the model.
    if _steadily(case, _at_no_step(control)):
        message = "whatever sample is at this place in the run: one that is healthy elsewhere fails here too"
        return case.found("step", message)
    case.evidence["every_sample"] = True
    message = (
        "every sample fails now, those too that were healthy a step ago, whatever is switched off"
    )
    return case.found("unknown", message)


def _against_control(case: Case, failing: Sequence[MicroBatch], control: MicroBatch) -> Verdict:
    """The verdict on samples that fail where another sample is healthy."""
    if failing[0].at is None or failing[0].redrawn is None:
        message = (
            "it fails whatever is switched off; other samples are healthy; whether it would with other noise "
            "is not known: this loop cannot draw it again"
        )
        return case.found("inputs", message, sample_ids=_ids(failing))
    # Samples that are healthy with other noise and timesteps.
    noise_dependent = [
        sample for sample in failing if _is_healthy_with_others(case, sample, control)
    ]
    # Of the others, samples that are healthy at another position in the run.
    position_dependent = [
        sample
        for sample in failing
        if sample not in noise_dependent and case.healthy(_at_no_step(sample))
    ]
    # The rest fails with any noise and at any position.
    always_failing = [
        sample
        for sample in failing
        if sample not in noise_dependent and sample not in position_dependent
    ]
    if always_failing:
        message = "it fails whatever is switched off; other samples are healthy"
        return case.found("data", message, sample_ids=_ids(always_failing))
    if position_dependent:
        message = "only at this place in the run: it is healthy at another, and other samples are healthy here"
        return case.found("step", message, sample_ids=_ids(position_dependent))
    return _drawn(case, noise_dependent, control)


def _drawn(case: Case, failing: Sequence[MicroBatch], control: MicroBatch) -> Verdict:
    """The verdict on samples that fail only with their own noise and timesteps.

    It depends on whether another sample fails with the same noise and timesteps.
    """
    # Give a healthy sample the failing one's noise and timesteps.
    if all(_steadily(case, _moved(control, sample, draws=True)) for sample in failing):
        case.evidence["control_with_the_same_draws"] = "healthy"
        message = "only with this noise and timestep: finite with others, whatever is switched off"
    else:
        case.evidence["control_with_the_same_draws"] = "fails"
        message = (
            "with this noise and timestep, whatever the sample: another fails with the same ones"
        )
    return case.found("inputs", message, sample_ids=_ids(failing))


def _is_healthy_with_others(case: Case, one: MicroBatch, control: MicroBatch) -> bool:
    """True if the sample is healthy with other noise and timesteps: new draws, or those of the healthy control.

    All new draws may lie in a range of timesteps at which every sample fails; the control's do not.
    """
    # One healthy run is enough: the sample can be computed.
    if any(case.healthy(redrawn) for redrawn in _redraws(one)):
        return True
    return _steadily(case, _moved(one, _moved(control, one), draws=True))


def _redraws(one: MicroBatch) -> Iterator[MicroBatch]:
    """Yield the micro-batch with other noise and timesteps, if it can be drawn again."""
    if one.redrawn is not None:
        yield from map(one.redrawn, range(_REDRAWS))


def _at_no_step(one: MicroBatch) -> MicroBatch:
    """The micro-batch at an unused position in the run, or unchanged if it cannot be moved."""
    return _moved(one, replace(one, step=one.step + _NO_STEP))


def _ids(batches: Collection[MicroBatch]) -> tuple[str, ...]:
    return tuple(batch.ids[0] for batch in batches)
