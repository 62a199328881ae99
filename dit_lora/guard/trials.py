"""Experiments on a micro-batch that fails: what is changed is the cause only if it comes out so each time.

One lucky run convicts nobody. A switch is the cause if the micro-batch is healthy each time without it and fails each
time with it (A-B-A). A sample is the cause if it fails alone, with other draws and at another place in the run, while
another sample is healthy, each time, at the place where it fails.
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
"""Runs of the micro-batch as it was, before anything is changed."""
ROUNDS = 8
"""Times that a change that helps is undone and made again. A fault that strikes with probability p, whatever is
switched off, passes with p^11 (1 - p)^9, at most one in a million.
"""
_REDRAWS = 3  # with other noise and timesteps
_NO_STEP = 1_000_003  # steps ahead: a place in the run that no sample has been at


class UnsteadyError(Exception):
    """The same run came out healthy once and not healthy once: what is changed in between proves nothing."""


def convicts(
    case: Case, off: Callable[[], AbstractContextManager[None]], rounds: int = ROUNDS
) -> bool:
    """Return True if the micro-batch is healthy without something, and fails with it, each time; A-B-A.

    Raises `UnsteadyError` if it is so once and otherwise another time.
    """
    # Most switches are innocent, which one run shows; only one that helps is worth the rounds.
    with off():
        if not case.healthy():
            return False
    # A again: it must fail with the thing in place, or health without it was luck.
    for _ in range(rounds):
        if case.is_healthy(case.again()):
            raise UnsteadyError
        with off():
            if not case.healthy():
                raise UnsteadyError
    return True


def switch_at_fault(case: Case) -> Switch | None:
    """Return the first switch without which it is healthy. Where a step does not fit into memory, that is noted."""
    for switch in case.suspects.in_use():
        off = switch.off
        try:
            if case.suspects.attempt(lambda: convicts(case, off)):  # noqa: B023  run at once
                return switch
        except torch.OutOfMemoryError:
            if case.suspects.lockstep:
                raise  # other ranks may wait in the middle of a pass for this one
            case.evidence[switch.name] = "not tried: without it, a step does not fit into memory"
    return None


def finite_in_fp32(case: Case) -> bool:
    """Return True if fp32 weights and compute make it finite."""
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
    """Return the verdict where no switch helps: on samples, the draw, the place in the run, or nothing of these."""
    verdict = case.suspects.attempt(lambda: _blamed(case))
    if verdict is not None:
        return verdict
    words = (
        "nothing that was switched off makes it healthy, and its samples cannot be run one by one"
    )
    return case.found("unknown", words)


def _blamed(case: Case) -> Verdict:
    alone = _alone(case.micro_batch)
    # One by one: in a batch a healthy sample would share the blame.
    failing = [sample for sample in alone if not _steadily(case, sample, rounds=1)]
    if not failing:
        words = "it fails in company only: each of its samples is healthy alone"
        return case.found("step", words)
    # A failure is a sample's own only if another is healthy at the same place.
    control = _control(case, failing, [sample for sample in alone if sample not in failing])
    if control is None:
        return case.found("unknown", "nothing that was switched off makes it healthy")
    case.evidence["control"] = control.ids[0]
    # Its own timestep may be one at which every sample fails.
    for witness in (control, *_redraws(control)):
        if _steadily(case, _moved(witness, failing[0])):
            return _against_control(case, failing, witness)
    return _control_fails(case, control)


def _alone(batch: MicroBatch) -> list[MicroBatch]:
    return [batch.single(index) for index in range(len(batch.ids))]


def _steadily(case: Case, batch: MicroBatch, rounds: int = ROUNDS) -> bool:
    """Return True if a micro-batch is healthy, which it must be each time; raises `UnsteadyError` if runs differ."""
    first = case.healthy(batch)
    # One healthy run acquits nobody; a failure is there to be seen, and asked for once more.
    if any(case.healthy(batch) is not first for _ in range(rounds if first else 1)):
        raise UnsteadyError
    return first


def _control(
    case: Case, failing: Sequence[MicroBatch], others: Sequence[MicroBatch]
) -> MicroBatch | None:
    """Return another sample: of the same micro-batch, of the last healthy step, or any from the data."""
    bad = {candidate.ids[0] for candidate in failing}
    last = _alone(case.control) if case.control is not None else []
    for candidate in [*others, *last]:
        if candidate.ids[0] not in bad:
            return candidate
    # Any of the data's, where all samples at hand are suspects themselves.
    return case.suspects.another(case.micro_batch, bad)


def _moved(batch: MicroBatch, place: MicroBatch, *, draws: bool = False) -> MicroBatch:
    """Return the micro-batch at another's place, where that can be done: dropout masks go by the place."""
    return batch if batch.at is None else batch.at(place, draws)


def _control_fails(case: Case, control: MicroBatch) -> Verdict:
    """Return the verdict where a sample that was healthy elsewhere fails at this place too: no sample is at fault."""
    # Healthy where no sample has been: then it is this place, and not the model.
    if _steadily(case, _at_no_step(control)):
        words = "whatever sample is at this place in the run: one that is healthy elsewhere fails here too"
        return case.found("step", words)
    case.evidence["every_sample"] = True
    words = (
        "every sample fails now, those too that were healthy a step ago, whatever is switched off"
    )
    return case.found("unknown", words)


def _against_control(case: Case, failing: Sequence[MicroBatch], control: MicroBatch) -> Verdict:
    """Return the verdict on samples that fail where another is healthy."""
    if failing[0].at is None or failing[0].redrawn is None:
        words = (
            "it fails whatever is switched off; other samples are healthy; whether it would with other noise "
            "is not known: this loop cannot draw it again"
        )
        return case.found("inputs", words, sample_ids=_ids(failing))
    by_draw = [sample for sample in failing if _is_healthy_with_others(case, sample, control)]
    elsewhere = [
        sample for sample in failing if sample not in by_draw and case.healthy(_at_no_step(sample))
    ]
    always = [sample for sample in failing if sample not in by_draw and sample not in elsewhere]
    if always:
        words = "it fails whatever is switched off; other samples are healthy"
        return case.found("data", words, sample_ids=_ids(always))
    if elsewhere:
        words = "only at this place in the run: it is healthy at another, and other samples are healthy here"
        return case.found("step", words, sample_ids=_ids(elsewhere))
    return _drawn(case, by_draw, control)


def _drawn(case: Case, failing: Sequence[MicroBatch], control: MicroBatch) -> Verdict:
    """Return the verdict on samples that fail with their noise and timesteps alone, by whether another fails with
    the same.
    """
    if all(_steadily(case, _moved(control, sample, draws=True)) for sample in failing):
        case.evidence["control_with_the_same_draws"] = "healthy"
        words = "only with this noise and timestep: finite with others, whatever is switched off"
    else:
        case.evidence["control_with_the_same_draws"] = "fails"
        words = (
            "with this noise and timestep, whatever the sample: another fails with the same ones"
        )
    return case.found("inputs", words, sample_ids=_ids(failing))


def _is_healthy_with_others(case: Case, one: MicroBatch, control: MicroBatch) -> bool:
    """Return True if it is healthy with other noise and timesteps: drawn anew, or those at which the control is
    healthy.

    All that are drawn anew may lie in a range of timesteps at which every sample fails; the control's do not.
    """
    if any(case.healthy(redrawn) for redrawn in _redraws(one)):
        return True
    return _steadily(case, _moved(one, _moved(control, one), draws=True))


def _redraws(one: MicroBatch) -> Iterator[MicroBatch]:
    """Yield the micro-batch with other noise and timesteps, where that can be done."""
    if one.redrawn is not None:
        yield from map(one.redrawn, range(_REDRAWS))


def _at_no_step(one: MicroBatch) -> MicroBatch:
    """Return the micro-batch at a place in the run where nothing has been, or at its own where it cannot be moved."""
    return _moved(one, replace(one, step=one.step + _NO_STEP))


def _ids(batches: Collection[MicroBatch]) -> tuple[str, ...]:
    return tuple(one.ids[0] for one in batches)
