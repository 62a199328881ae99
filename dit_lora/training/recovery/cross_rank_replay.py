"""Replays a failing micro-batch on every rank, to tell a bad micro-batch from a bad rank."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState

from dit_lora.guard.diagnosis import Cause, Diagnosis, DiagnosisContext
from dit_lora.guard.recovery import RankDiagnosis
from dit_lora.guard.replay import MicroBatch, replay_micro_batch
from dit_lora.numerics.ranks import gather_object

DiagnosedBatches = list[RankDiagnosis[MicroBatch]]
_NUM_FURTHER_RUNS = 8
"""Number of further runs on each rank once one rank was healthy: all runs of a rank must agree."""
IsHealthy = bool | None
"""True if a run was healthy; None if it did not fit into that rank's memory."""


def replay_on_other_ranks(
    local_diagnoses: DiagnosedBatches,
    diagnosis_context: DiagnosisContext,
    kind: str,
) -> DiagnosedBatches:
    """Replay one failed micro-batch of each rank on all ranks, and update the diagnoses. Collective.

    Micro-batches whose cause was read from facts, without a replay, are not replayed here either. A rank that fails
    where others are healthy is the cause, whatever its own replays said. If all ranks diagnose together, this is known
    already, and only the rank's host is added.
    """
    hosts = gather_object([platform.node()])
    if len(hosts) == 1:
        return local_diagnoses
    if diagnosis_context.collective_forward:
        return [replace(item, diagnosis=_add_host_name(item.diagnosis, hosts)) for item in local_diagnoses]
    # One micro-batch per rank is enough to test the rank.
    failed = [n for n, item in enumerate(local_diagnoses) if _is_cause_found_by_replay(item.diagnosis)][:1]
    tried = list(local_diagnoses)
    # Every rank takes part for each owner, in the same order: `share_micro_batch` and the runs are collective.
    for owner, has_failed in enumerate(gather_object([bool(failed)])):
        if not has_failed:
            continue
        is_mine = PartialState().process_index == owner
        index = failed[0] if is_mine else 0
        shared_batch = diagnosis_context.share_micro_batch(local_diagnoses[index].source if is_mine else None, owner)
        outcomes = _replay_on_all_ranks(shared_batch, diagnosis_context, kind)
        if not is_mine:
            continue
        conclusion = _add_host_name(_conclude_from_outcomes(local_diagnoses[index].diagnosis, outcomes), hosts)
        tried[index] = replace(local_diagnoses[index], diagnosis=conclusion)
        if conclusion.cause == "rank":
            # The rank's other micro-batches of the step failed there too, unless facts or chance explain them.
            for number, item in enumerate(tried):
                if _is_cause_found_by_replay(item.diagnosis):
                    shared = replace(conclusion, micro_step=item.diagnosis.micro_step)
                    tried[number] = replace(item, diagnosis=shared)
    return tried


def _is_cause_found_by_replay(diagnosis: Diagnosis) -> bool:
    return "replays" in diagnosis.evidence and diagnosis.cause != "transient"


def _replay_on_all_ranks(
    micro_batch: MicroBatch | None, diagnosis_context: DiagnosisContext, kind: str
) -> list[list[IsHealthy]]:
    """Replay on every rank; returns each rank's outcomes, only one per rank if none is healthy. Collective."""
    # Its owner provides it.
    assert micro_batch is not None

    def run_once() -> IsHealthy:
        try:
            replay = replay_micro_batch(micro_batch, diagnosis_context.model)
            return replay.is_healthy(needs_gradient=kind == "zero_gradient")
        # The other ranks wait for this rank's result.
        except torch.OutOfMemoryError:
            return None

    first_runs: list[IsHealthy] = gather_object([run_once()])
    # No rank is healthy: more runs could not tell ranks apart.
    if not any(first_runs):
        return [[outcome] for outcome in first_runs]
    more: list[list[IsHealthy]] = gather_object([[run_once() for _ in range(_NUM_FURTHER_RUNS)]])
    return [[one_rank, *other_runs] for one_rank, other_runs in zip(first_runs, more, strict=True)]


def _conclude_from_outcomes(diagnosis: Diagnosis, outcomes: Sequence[Sequence[IsHealthy]]) -> Diagnosis:
    """Diagnosis of a micro-batch after replays on all ranks.

    It is unchanged if the micro-batch fails on all ranks. Otherwise it names the ranks that always fail, or a
    transient fault. The cause is `unknown` if a rank could not run the micro-batch, and the diagnosis names samples.
    """
    # A rank that could not run it proves nothing, so no sample is quarantined.
    if any(healthy is None for rank_outcomes in outcomes for healthy in rank_outcomes):
        if not diagnosis.sample_ids:
            return diagnosis
        message = f"{diagnosis.message}; not confirmed on every rank, because a replay does not fit into memory there"
        return replace(diagnosis, cause="unknown", message=message)
    if any(len(set(rank_outcomes)) > 1 for rank_outcomes in outcomes):
        # A rank that disagrees with itself: the fault is not reproducible.
        runs = [healthy for rank_outcomes in outcomes for healthy in rank_outcomes]
        num_failed, num_runs = runs.count(False), len(runs)
        evidence = {**diagnosis.evidence, "replays": {"failed": num_failed, "of": num_runs}}
        message = f"it fails in {num_failed} of {num_runs} runs on {len(outcomes)} ranks: faulty hardware or memory"
        return _replace_cause(diagnosis, "transient", message, evidence)
    # From here on each rank's runs agree, so the first stands for all.
    failing = [rank for rank, (healthy, *_) in enumerate(outcomes) if not healthy]
    if not failing:
        message = f"healthy when replayed on all {len(outcomes)} ranks, so the data is not the cause"
        return _replace_cause(diagnosis, "transient", message, diagnosis.evidence)
    if len(failing) == len(outcomes):
        return diagnosis
    failing_text, times = ", ".join(map(str, failing)), len(outcomes[0])
    message = (
        f"it fails on rank {failing_text} in all {times} runs; other ranks run the same micro-batch and are healthy"
    )
    evidence = {**diagnosis.evidence, "ranks": {"failing": failing, "of": len(outcomes)}}
    return replace(_replace_cause(diagnosis, "rank", message, evidence), rank=failing[0])


def _replace_cause(diagnosis: Diagnosis, cause: Cause, message: str, evidence: Mapping[str, Any]) -> Diagnosis:
    """Copy of a diagnosis with another cause, without samples, faulty components and ops."""
    return Diagnosis(cause, message, diagnosis.step, diagnosis.rank, diagnosis.micro_step, evidence=evidence)


def _add_host_name(diagnosis: Diagnosis, hosts: Sequence[str]) -> Diagnosis:
    if diagnosis.cause != "rank":
        return diagnosis
    host = hosts[diagnosis.rank]
    message = f"{diagnosis.message} (rank {diagnosis.rank} is on {host})"
    return replace(diagnosis, message=message, evidence={**diagnosis.evidence, "host": host})
