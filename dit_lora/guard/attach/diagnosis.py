"""Find the causes of a tripped step in a loop that is not ours, over every model that is trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.call_recorder import CapturedCall
from dit_lora.guard.attach.gather_calls import RankCalls
from dit_lora.guard.attach.sample_ids import identifies
from dit_lora.guard.attach.watched_models import Watched
from dit_lora.guard.diagnose import diagnose
from dit_lora.guard.episode import Found
from dit_lora.guard.replay import MicroBatch, run
from dit_lora.guard.state import bad_state, run_away
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.finite import is_finite

Diagnose = Callable[[CapturedCall], Found[CapturedCall]]


def state_verdict(watched: Watched, kind: str, step: int, rank: int) -> Verdict | None:
    """Return what is wrong with any model's weights or any moment, or None."""
    nothing = nothing_run(step, rank)
    verdict = bad_state(nothing, watched.together)
    if verdict is None and kind == "diverged_weights":
        return run_away(nothing, watched.together)
    return verdict


def call_verdicts(
    of_rank: RankCalls, watched: Watched, kind: str, step: int
) -> list[Found[CapturedCall]]:
    """Return one verdict a micro-batch, on the call that what is wrong comes from. Collective in lockstep."""
    calls, controls, rank = of_rank.calls, of_rank.controls, of_rank.rank

    def verdict(call: CapturedCall) -> Found[CapturedCall]:
        suspects, control = watched.suspects[id(call.owner)], controls.get(id(call.owner))

        def batch(captured: CapturedCall, of_step: int) -> MicroBatch:
            number = call.micro_step
            return captured.micro_batch(
                suspects.model, step=of_step, micro_step=number, rank=rank, place=call
            )

        healthy = batch(_renamed(control), step - 1) if control is not None else None
        failed = batch(call, step)
        model_verdict = diagnose(failed, suspects, kind=kind, control=healthy)
        if model_verdict.cause == "precision":
            model_verdict = _whose(model_verdict, failed, healthy, suspects.model)
        return Found(_of_model(model_verdict, watched.prefixes[id(call.owner)]), call)

    micro_batches = [list(group) for _, group in groupby(calls, lambda call: call.micro_step)]
    return [_of_micro_batch(group, verdict) for group in micro_batches]


def of_the_loops_loss(
    found: Sequence[Found[CapturedCall]], calls: Sequence[CapturedCall]
) -> list[Found[CapturedCall]]:
    """Return what was found of a loss that is not finite, where nothing that the models gave, or had come back, was bad:
    then it is the loop's own arithmetic, which no replay of a model repeats, and not chance.
    """
    gradients = (call.output_gradient for call in calls)
    is_sound = all(call.output_is_finite for call in calls) and all(
        is_finite(one) for one in gradients if one is not None
    )
    if not calls or not is_sound:
        return list(found)
    words = (
        "the loss is not finite, though what the model gave and what came back to it are: the loop's own arithmetic makes "
        "it so, outside of the model"
    )
    return [
        replace(
            one,
            verdict=replace(
                one.verdict,
                cause="unknown",
                words=words,
                evidence={**one.verdict.evidence, "of_the_loop": True},
            ),
        )
        if one.verdict.cause == "transient"
        else one
        for one in found
    ]


def _whose(
    verdict: Verdict, failed: MicroBatch, healthy: MicroBatch | None, model: nn.Module
) -> Verdict:
    """Return the verdict with the samples whose values leave the range: they do so alone, and another does not."""

    def fails(one: MicroBatch) -> bool:
        return not run(one, model).is_healthy(needs_gradient=False)

    alone = [failed.single(row) for row in range(len(failed.ids))]
    failing = [one for one in alone if fails(one)]
    is_of_all = len(failing) == len(alone) and (healthy is None or fails(healthy.single(0)))
    if is_of_all:
        return verdict
    return replace(verdict, sample_ids=tuple(one.ids[0] for one in failing))


def _renamed(call: CapturedCall) -> CapturedCall:
    """Mark numbered samples as an earlier step's: a number in one batch is not the sample of that number in another."""
    ids = (sample if identifies(sample) else f"{sample} of an earlier step" for sample in call.ids)
    return replace(call, ids=tuple(ids))


def _of_model(verdict: Verdict, prefix: str) -> Verdict:
    """Return the verdict with the name of the model, where there are several."""
    # Chance is no one model's.
    if not prefix or verdict.cause == "transient":
        return verdict
    words = f"{prefix.removesuffix('.')}: {verdict.words}"
    module = None if verdict.module is None else prefix + verdict.module
    return replace(verdict, words=words, module=module)


def _of_micro_batch(calls: Sequence[CapturedCall], verdict: Diagnose) -> Found[CapturedCall]:
    """Return the verdict on the call to blame: what one model gives is what the next is given, and in the backward
    the other way round.
    """
    # The first bad output is where a forward went wrong; without one, the last call is the first of the backward.
    bad_output = next((c for c in calls if c.output is not None and not c.output_is_finite), None)
    if bad_output is not None:
        return verdict(bad_output)
    answer = verdict(calls[-1])
    # The backward goes from the last model to the first: a healthy one passes the question on.
    for call in reversed(calls[:-1]):
        if answer.verdict.cause != "transient":
            break
        answer = verdict(call)
    return answer


def nothing_run(step: int, rank: int) -> MicroBatch:
    """Return a stand-in for a step between whose bounds only the state is in question."""

    def refused(*_: Any) -> Any:
        raise DitLoraError("there is nothing to replay")

    return MicroBatch((), step, 0, rank, {}, forward=refused, single=refused)


def unseen(step: int, rank: int) -> Verdict:
    words = "the model was not called between two optimizer steps, so there is nothing to replay"
    return Verdict("unknown", words, step, rank)
