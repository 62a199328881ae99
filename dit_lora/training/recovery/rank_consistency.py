"""Checks before a state is saved that ranks agree bit for bit, and that moving averages are within bounds.

Both checks run only in steps with a checkpoint or a snapshot.
"""

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from dit_lora.errors import format_remaining_count
from dit_lora.guard.diagnosis import Diagnosis
from dit_lora.guard.finite_gate import BadStateError
from dit_lora.numerics.digest import compute_digest
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.run import Run

Tensors = Mapping[str, torch.Tensor]
_OUTLIER_FACTOR = 2.0
"""A rank stands out if one of its tensors is this many times as far from the snapshot as on any other rank."""


def require_ranks_agree(run: Run, step: int) -> None:
    """Raise `BadStateError` on all ranks if replicated state differs, or an average is out of bounds. Collective."""
    _require_ranks_agree(run, step)
    _require_sound_averages(run, step)


def _require_ranks_agree(run: Run, step: int) -> None:
    """Raise `BadStateError` if replicated state is not bitwise equal on all ranks.

    Every rank takes the same steps with the same gradients: a difference comes from one rank's memory. Averaged
    gradients do not show it, and each rank's loss is of its own samples.
    """
    accelerator = run.accelerator
    if accelerator.num_processes == 1:
        return
    # Averages of shards are left out, as `replicated_state` leaves out shards: no other rank has the same part.
    averages = run.ema.named_averages() if run.ema else {}
    state = run.engine.replicated_state() | {n: t for n, t in averages.items() if not isinstance(t, DTensor)}
    snapshots = run.recovery.snapshots
    snapshot = snapshots.read_snapshot(snapshots.steps[-1]) if snapshots.steps else {}
    diagnosis = diagnose_differing_rank(accelerator, state, snapshot, step)
    if diagnosis is not None:
        raise BadStateError(f"step {step}: {diagnosis.message}", "ranks_differ", diagnosis)


def diagnose_differing_rank(
    accelerator: Accelerator, state: Tensors, snapshot: Tensors, step: int
) -> Diagnosis | None:
    """Diagnose which rank's tensors differ, equal on all ranks; None if all are bitwise equal. Collective.

    It is the rank that the majority contradicts; of two, the one further from `snapshot`, a state they shared.
    """
    # One number per rank: tensors are compared by name only if these differ.
    local_digest = torch.tensor([compute_digest(state.values())], device=accelerator.device)
    digests_by_rank = accelerator.gather(local_digest)
    if (digests_by_rank == digests_by_rank[0]).all():
        return None
    # Digests by name only now: a healthy check sends one number.
    digests = gather_object([{name: compute_digest([tensor]) for name, tensor in state.items()}])
    names = [n for n in state if len({by_name.get(n) for by_name in digests}) > 1]
    at_fault = _find_minority_ranks(digests, names)
    moves: list[dict[str, float]] = gather_object(
        [{name: _measure_change(state[name], snapshot.get(name)) for name in names}]
    )
    if not at_fault:
        at_fault = _find_outlier_rank(moves, names)
    hosts = gather_object([socket.gethostname()])
    evidence = {
        "ranks": at_fault or list(range(len(hosts))),
        "hosts": [hosts[rank] for rank in at_fault] or hosts,
        "differs": names[:20],
        "differing_tensors": len(names),
        "from_the_snapshot": [max(by_name.values(), default=0.0) for by_name in moves],
    }
    more = format_remaining_count(names)
    if at_fault:
        ranks_text = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in at_fault)
        message = f"{names[0]}{more} on {ranks_text} differs from the other ranks: that rank's memory is faulty"
    else:
        ranks_text = ", ".join(f"rank {rank} ({host})" for rank, host in enumerate(hosts))
        message = f"{names[0]}{more} differs between {ranks_text}: the memory of one of them is faulty"
    # Weights are named as the cause unless only optimizer state differs.
    only_moments = all(_is_moment(name) for name in names)
    return Diagnosis(
        "optimizer" if only_moments else "weights",
        message,
        step=step,
        rank=at_fault[0] if at_fault else 0,
        module=_get_module_name(names[0]),
        evidence=evidence,
    )


def _find_minority_ranks(digests: Sequence[Mapping[str, int]], names: Sequence[str]) -> list[int]:
    """Ranks whose tensors differ bitwise from those of the majority; empty without a majority."""
    at_fault = set()
    for name in names:
        values = [by_name.get(name) for by_name in digests]
        value, count = Counter(values).most_common(1)[0]
        # A strict majority: two ranks cannot outvote each other.
        if 2 * count > len(values):
            at_fault |= {rank for rank, rank_value in enumerate(values) if rank_value != value}
    return sorted(at_fault)


def _find_outlier_rank(changes: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[int]:
    """The only rank whose tensor changed far more than on the others; empty if there is none or more than one."""
    moved_away = set()
    for name in names:
        far = sorted((by_name.get(name, 0.0), rank) for rank, by_name in enumerate(changes))
        # Training moves all ranks away from the snapshot; a memory fault moves one of them much further.
        if far[-1][0] > _OUTLIER_FACTOR * far[-2][0]:
            moved_away.add(far[-1][1])
    return sorted(moved_away) if len(moved_away) == 1 else []


def _measure_change(tensor: torch.Tensor, snapshot_value: torch.Tensor | None) -> float:
    """Largest change of an element of a tensor since the snapshot.

    If the snapshot lacks the tensor, it is the largest magnitude.
    """
    values = tensor.detach().double()
    if snapshot_value is not None and snapshot_value.shape == values.shape:
        values = values - snapshot_value.to(values.device).double()
    peak = values.abs().max().item() if values.numel() else 0.0
    # NaN cannot be ordered: it counts as infinitely far.
    return math.inf if math.isnan(peak) else peak


def record_sound_averages(run: Run) -> None:
    """Widen the bounds on the moving averages by the run's state at its start, which is taken as sound."""
    if run.ema is not None:
        weights = get_trainable_parameters(run.transformer)
        run.ema.bounds.widen_magnitude_bounds(weights, _strip_ema_prefix(run.ema.named_averages()))


def _require_sound_averages(run: Run, step: int) -> None:
    """Raise `BadStateError` if a moving average exceeds every magnitude its weight has had.

    No mean of past weights can.
    """
    if run.ema is None:
        return
    weights, averages = get_trainable_parameters(run.transformer), _strip_ema_prefix(run.ema.named_averages())
    exceeding = run.ema.bounds.find_averages_out_of_bounds(weights, averages)
    rank, host = run.accelerator.process_index, socket.gethostname()
    # Only ranks with a bad average report; the first of them is named.
    reports: list[Any] = gather_object([(rank, host, exceeding)] if exceeding else [])
    if not reports:
        # Only after all ranks agree that they are sound: a bad value would widen its own bound.
        run.ema.bounds.widen_magnitude_bounds(weights, averages)
        return
    rank, host, exceeding = reports[0]
    name, (peak, bound) = next(iter(exceeding.items()))
    more = format_remaining_count(exceeding)
    message = (
        f"the moving average ema/{name}{more} reaches {peak:.3g} on rank {rank} ({host}), and its weight never "
        f"exceeded {bound:.3g}: it was altered in memory"
    )
    evidence = {"beyond": {name: list(pair) for name, pair in [*exceeding.items()][:20]}}
    diagnosis = Diagnosis("weights", message, step, rank, module=_get_module_name(name), evidence=evidence)
    raise BadStateError(f"step {step}: {message}", "diverged_averages", diagnosis)


def _strip_ema_prefix(averages: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix("ema/"): tensor for name, tensor in averages.items()}


def _is_moment(name: str) -> bool:
    return "/" in name and not name.startswith("ema/")


def _get_module_name(name: str) -> str:
    """Name of the module that has the weight in `ema/<weight>` or `<group>/<weight>/<moment>`."""
    parts = name.split("/")
    return (parts[-2] if _is_moment(name) and len(parts) > 1 else parts[-1]).rpartition(".")[0]
