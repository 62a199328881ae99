"""Replays a failing micro-batch on every rank, to tell a bad micro-batch from a bad rank."""

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
"""Number of further runs on each rank once one rank was healthy: all runs of a rank must agree."""
Healthy = bool | None
"""True if a run was healthy; None if it did not fit into that rank's memory."""


def tried_elsewhere(own: Diagnosed, suspects: Suspects, kind: str, share: Share) -> Diagnosed:
    """Replay one suspect micro-batch of each rank on all ranks, and update the diagnoses. Collective.

    A rank that fails where others are healthy is the cause, whatever its own replays said. If all ranks diagnose
    together, this is known already, and only the rank's host is added.
    """
    hosts = gather_object([platform.node()])
    if len(hosts) == 1:
        return own
    if suspects.lockstep:
        return [(micro_batch, _on_host(diagnosis, hosts)) for micro_batch, diagnosis in own]
    # One micro-batch per rank is enough to test the rank.
    suspected = [index for index, (_, diagnosis) in enumerate(own) if _is_by_replays(diagnosis)][:1]
    tried = list(own)
    # Every rank takes part for each owner, in the same order: `share` and the runs are collective.
    for owner, has_suspect in enumerate(gather_object([bool(suspected)])):
        if not has_suspect:
            continue
        is_mine = PartialState().process_index == owner
        index = suspected[0] if is_mine else 0
        outcomes = _everywhere(share(own[index][0] if is_mine else None, owner), suspects, kind)
        if is_mine:
            micro_batch, diagnosis = own[index]
            tried[index] = micro_batch, _on_host(_compared(diagnosis, outcomes), hosts)
            if tried[index][1].cause == "rank":
                # The rank's other micro-batches of the step failed there too.
                tried = [
                    (micro_batch, _as_of(tried[index][1], diagnosis))
                    for micro_batch, diagnosis in tried
                ]
    return tried


def _as_of(diagnosed: Verdict, verdict: Verdict) -> Verdict:
    """The diagnosis of a rank, for another of its micro-batches, unless facts or chance explain that one."""
    return replace(diagnosed, micro_step=verdict.micro_step) if _is_by_replays(verdict) else verdict


def _is_by_replays(verdict: Verdict) -> bool:
    return "replays" in verdict.evidence and verdict.cause != "transient"


def _everywhere(one: MicroBatch | None, suspects: Suspects, kind: str) -> list[list[Healthy]]:
    """Replay on every rank; returns each rank's outcomes, only one per rank if none is healthy. Collective."""
    # Its owner provides it.
    assert one is not None

    def healthy() -> Healthy:
        try:
            return run(one, suspects.model).is_healthy(needs_gradient=kind == "zero_gradient")
        # The other ranks wait for this rank's result.
        except torch.OutOfMemoryError:
            return None

    first_runs: list[Healthy] = gather_object([healthy()])
    # No rank is healthy: more runs could not tell ranks apart.
    if not any(first_runs):
        return [[outcome] for outcome in first_runs]
    more: list[list[Healthy]] = gather_object([[healthy() for _ in range(_ROUNDS)]])
    return [[one_rank, *other_runs] for one_rank, other_runs in zip(first_runs, more, strict=True)]


def _compared(verdict: Verdict, outcomes: Sequence[Sequence[Healthy]]) -> Verdict:
    """The verdict if the micro-batch fails on all ranks; else one that names the ranks, or a transient fault."""
    # A rank that could not run it proves nothing.
    if any(healthy is None for rank_outcomes in outcomes for healthy in rank_outcomes):
        return _not_tried(verdict)
    if any(len(set(rank_outcomes)) > 1 for rank_outcomes in outcomes):
        # A rank that disagrees with itself: the fault is not reproducible.
        runs = [healthy for rank_outcomes in outcomes for healthy in rank_outcomes]
        evidence = {**verdict.evidence, "replays": {"failed": runs.count(False), "of": len(runs)}}
        failed, times = runs.count(False), len(runs)
        message = f"it fails in {failed} of {times} runs on equal bits, over {len(outcomes)} ranks: hardware or memory"
        return _without_blame(verdict, "transient", message, evidence)
    # From here on each rank's runs agree, so the first stands for all.
    failing = [rank for rank, (healthy, *_) in enumerate(outcomes) if not healthy]
    if not failing:
        message = (
            f"healthy on all {len(outcomes)} ranks when each ran it: it did not come from the data"
        )
        return _without_blame(verdict, "transient", message, verdict.evidence)
    if len(failing) == len(outcomes):
        return verdict
    failing_text, times = ", ".join(map(str, failing)), len(outcomes[0])
    message = (
        f"it fails on rank {failing_text} each of {times} times, and other ranks run the same micro-batch and "
        "are healthy"
    )
    evidence = {**verdict.evidence, "ranks": {"failing": failing, "of": len(outcomes)}}
    return replace(_without_blame(verdict, "rank", message, evidence), rank=failing[0])


def _not_tried(verdict: Verdict) -> Verdict:
    """A verdict that does not exclude a sample permanently, because it was not replayed on other ranks."""
    if not verdict.sample_ids:
        return verdict
    message = f"{verdict.words}; not run on every rank, where it does not fit into memory"
    return replace(verdict, cause="unknown", words=message)


def _without_blame(
    verdict: Verdict, cause: Cause, words: str, evidence: Mapping[str, Any]
) -> Verdict:
    """The verdict with another cause, without samples, switches and ops."""
    return Verdict(cause, words, verdict.step, verdict.rank, verdict.micro_step, evidence=evidence)


def _on_host(verdict: Verdict, hosts: Sequence[str]) -> Verdict:
    if verdict.cause != "rank":
        return verdict
    host = hosts[verdict.rank]
    evidence = {**verdict.evidence, "host": host}
    return replace(
        verdict, words=f"{verdict.words} (rank {verdict.rank} is on {host})", evidence=evidence
    )
