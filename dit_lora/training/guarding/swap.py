"""Runs a failing micro-batch on every rank, to tell a bad micro-batch from a bad rank."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from dit_lora.guard.replay import MicroBatch, run
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.verdict import Cause, Verdict

Share = Callable[[MicroBatch | None, int], MicroBatch | None]
Diagnosed = list[tuple[MicroBatch, Verdict]]
_ROUNDS = 8
"""Number of runs on each rank, once one of them was healthy: all must come out the same on a rank."""
Healthy = bool | None
"""True if a run was healthy; None where it did not fit into that rank's memory."""


def tried_elsewhere(own: Diagnosed, suspects: Suspects, kind: str, share: Share) -> Diagnosed:
    """Return the verdicts after trying on all ranks one micro-batch of each rank that replays had blamed.

    A rank that fails at what others run and are healthy at is the cause, whatever the experiments on it said. Where
    all diagnose together that has been seen; the rank's host is added. Collective.
    """
    hosts = gather_object([platform.node()])
    if len(hosts) == 1:
        return own
    if suspects.lockstep:
        return [(one, _on_host(verdict, hosts)) for one, verdict in own]
    # One micro-batch of a rank is enough to tell whether it is the rank.
    suspected = [index for index, (_, verdict) in enumerate(own) if _is_by_replays(verdict)][:1]
    tried = list(own)
    # Every rank takes part for each owner in turn, in the same order: `share` and the runs are collective.
    for owner, there in enumerate(gather_object([bool(suspected)])):
        if not there:
            continue
        is_mine = PartialState().process_index == owner
        index = suspected[0] if is_mine else 0
        outcomes = _everywhere(share(own[index][0] if is_mine else None, owner), suspects, kind)
        if is_mine:
            one, verdict = own[index]
            tried[index] = one, _on_host(_compared(verdict, outcomes), hosts)
            if tried[index][1].cause == "rank":
                # The rank's other micro-batches of the step failed on it too.
                tried = [(one, _as_of(tried[index][1], verdict)) for one, verdict in tried]
    return tried


def _as_of(diagnosed: Verdict, verdict: Verdict) -> Verdict:
    """Return the verdict on a rank for another of its micro-batches, unless facts or chance explain that one."""
    return replace(diagnosed, micro_step=verdict.micro_step) if _is_by_replays(verdict) else verdict


def _is_by_replays(verdict: Verdict) -> bool:
    return "replays" in verdict.evidence and verdict.cause != "transient"


def _everywhere(one: MicroBatch | None, suspects: Suspects, kind: str) -> list[list[Healthy]]:
    """Return for each rank how each of its runs came out; one run where no rank is healthy. Collective."""
    assert one is not None  # its owner has brought it

    def healthy() -> Healthy:
        try:
            return run(one, suspects.model).is_healthy(needs_gradient=kind == "zero_gradient")
        except torch.OutOfMemoryError:  # the other ranks wait for this one's word
            return None

    first: list[Healthy] = gather_object([healthy()])
    # No rank is healthy: more runs would tell no rank from another.
    if not any(first):
        return [[outcome] for outcome in first]
    more: list[list[Healthy]] = gather_object([[healthy() for _ in range(_ROUNDS)]])
    return [[one_rank, *others] for one_rank, others in zip(first, more, strict=True)]


def _compared(verdict: Verdict, outcomes: Sequence[Sequence[Healthy]]) -> Verdict:
    """Return the verdict where it fails everywhere, else one on the ranks, or on chance."""
    # A rank that could not run it has neither confirmed nor denied.
    if any(healthy is None for of_rank in outcomes for healthy in of_rank):
        return _not_tried(verdict)
    if any(len(set(of_rank)) > 1 for of_rank in outcomes):
        runs = [healthy for of_rank in outcomes for healthy in of_rank]
        evidence = {**verdict.evidence, "replays": {"failed": runs.count(False), "of": len(runs)}}
        failed, times = runs.count(False), len(runs)
        words = f"it fails in {failed} of {times} runs on equal bits, over {len(outcomes)} ranks: hardware or memory"
        return _without_blame(verdict, "transient", words, evidence)
    failing = [rank for rank, (healthy, *_) in enumerate(outcomes) if not healthy]
    if not failing:
        words = (
            f"healthy on all {len(outcomes)} ranks when each ran it: it did not come from the data"
        )
        return _without_blame(verdict, "transient", words, verdict.evidence)
    if len(failing) == len(outcomes):
        return verdict
    on, times = ", ".join(map(str, failing)), len(outcomes[0])
    words = f"it fails on rank {on} each of {times} times, and other ranks run the same micro-batch and are healthy"
    evidence = {**verdict.evidence, "ranks": {"failing": failing, "of": len(outcomes)}}
    return replace(_without_blame(verdict, "rank", words, evidence), rank=failing[0])


def _not_tried(verdict: Verdict) -> Verdict:
    """Return a verdict that leaves no sample out for good, for it has not failed on other ranks."""
    if not verdict.sample_ids:
        return verdict
    words = f"{verdict.words}; not run on every rank, where it does not fit into memory"
    return replace(verdict, cause="unknown", words=words)


def _without_blame(
    verdict: Verdict, cause: Cause, words: str, evidence: Mapping[str, Any]
) -> Verdict:
    """Return the verdict with another cause: no sample, switch or op is at fault."""
    return Verdict(cause, words, verdict.step, verdict.rank, verdict.micro_step, evidence=evidence)


def _on_host(verdict: Verdict, hosts: Sequence[str]) -> Verdict:
    if verdict.cause != "rank":
        return verdict
    host = hosts[verdict.rank]
    evidence = {**verdict.evidence, "host": host}
    return replace(
        verdict, words=f"{verdict.words} (rank {verdict.rank} is on {host})", evidence=evidence
    )
