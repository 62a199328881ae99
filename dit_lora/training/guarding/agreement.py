"""Checks a run's state before it is kept, beyond being finite: replicas are equal, averages are averages.

Both are looked at when a checkpoint or a snapshot is due, and in no other step.
"""

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from dit_lora.guard.gate import PoisonedStateError
from dit_lora.guard.verdict import Verdict
from dit_lora.numerics.digest import digest
from dit_lora.numerics.parameters import trainable_state
from dit_lora.training.run import Run

Tensors = Mapping[str, torch.Tensor]
_FURTHER = 2.0
"""A rank counts as moved away if a tensor of it is so many times as far from the snapshot as the others' are."""


def require_agreement(run: Run, step: int) -> None:
    """Raise `PoisonedStateError` on every rank if ranks differ in what all have, or an average is none. Collective."""
    _require_ranks_agree(run, step)
    _require_sound_averages(run, step)


def _require_ranks_agree(run: Run, step: int) -> None:
    """Raise if the bits of replicated state differ between ranks.

    Every rank takes the same steps with the same gradients: where bits differ, it is the memory of one. No averaged
    gradient shows it, and each rank's loss is its own samples'.
    """
    accelerator = run.setup.session.accelerator
    if accelerator.num_processes == 1:
        return
    # Averages of shards are left out, as `alike` leaves out shards: no rank has another's part.
    averages = run.ema.tensors() if run.ema else {}
    state = run.setup.engine.alike() | {
        n: t for n, t in averages.items() if not isinstance(t, DTensor)
    }
    snapshots = run.recovery.snapshots
    held = snapshots.read(snapshots.steps[-1]) if snapshots.steps else {}
    verdict = differing_rank(accelerator, state, held, step)
    if verdict is not None:
        raise PoisonedStateError(f"step {step}: {verdict.words}", "ranks_differ", verdict)


def differing_rank(
    accelerator: Accelerator, state: Tensors, held: Tensors, step: int
) -> Verdict | None:
    """Return a verdict on the rank whose tensors differ, equal on all ranks; None if no bit differs. Collective.

    It is the rank that most others contradict. Of two ranks, it is the one further from `held`, the state they shared.
    """
    # One number a rank: tensors by name are only compared once these differ.
    own_digest = torch.tensor([digest(state.values())], device=accelerator.device)
    everyones = accelerator.gather(own_digest)
    if (everyones == everyones[0]).all():
        return None
    # Only now by name: a healthy look sends one number.
    digests = gather_object([{name: digest([tensor]) for name, tensor in state.items()}])
    names = [n for n in state if len({one.get(n) for one in digests}) > 1]
    at_fault = _contradicted(digests, names)
    moves: list[dict[str, float]] = gather_object(
        [{name: _moved(state[name], held.get(name)) for name in names}]
    )
    if not at_fault:
        at_fault = _furthest(moves, names)
    hosts = gather_object([socket.gethostname()])
    evidence = {
        "ranks": at_fault or list(range(len(hosts))),
        "hosts": [hosts[rank] for rank in at_fault] or hosts,
        "differs": names[:20],
        "differing_tensors": len(names),
        "from_the_snapshot": [max(one.values(), default=0.0) for one in moves],
    }
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    if at_fault:
        who = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in at_fault)
        words = f"{names[0]}{more} of {who} is not what the other ranks have: that rank's memory"
    else:
        who = ", ".join(f"rank {rank} ({host})" for rank, host in enumerate(hosts))
        words = (
            f"{names[0]}{more} differs between {who}, none of which stands out: the memory of one"
        )
    only_moments = all(_is_moment(name) for name in names)
    return Verdict(
        "optimizer" if only_moments else "weights",
        words,
        step=step,
        rank=at_fault[0] if at_fault else 0,
        module=_module(names[0]),
        evidence=evidence,
    )


def _contradicted(digests: Sequence[Mapping[str, int]], names: Sequence[str]) -> list[int]:
    """Return the ranks that have other bits than most; none without a majority."""
    at_fault = set()
    for name in names:
        values = [one.get(name) for one in digests]
        value, count = Counter(values).most_common(1)[0]
        # A majority, so that of two ranks none is outvoted.
        if 2 * count > len(values):
            at_fault |= {rank for rank, own in enumerate(values) if own != value}
    return sorted(at_fault)


def _furthest(moves: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[int]:
    """Return the rank that alone has moved a tensor much further than the others have."""
    moved_away = set()
    for name in names:
        far = sorted((one.get(name, 0.0), rank) for rank, one in enumerate(moves))
        # All ranks have moved since the snapshot by training; memory moves one of them much further.
        if far[-1][0] > _FURTHER * far[-2][0]:
            moved_away.add(far[-1][1])
    return sorted(moved_away) if len(moved_away) == 1 else []


def _moved(tensor: torch.Tensor, held: torch.Tensor | None) -> float:
    """Return the largest change of an element since the snapshot, or the largest value where that does not have it."""
    values = tensor.detach().double()
    if held is not None and held.shape == values.shape:
        values = values - held.to(values.device).double()
    peak = values.abs().max().item() if values.numel() else 0.0
    return math.inf if math.isnan(peak) else peak


def note_averages(run: Run) -> None:
    """Take the run's state at its start as sound."""
    if run.ema is not None:
        run.ema.bounds.note(trainable_state(run.setup.transformer), _named(run.ema.tensors()))


def _require_sound_averages(run: Run, step: int) -> None:
    """Raise if an average is beyond all that its weight has been: a mean of it cannot be."""
    if run.ema is None:
        return
    weights, averages = trainable_state(run.setup.transformer), _named(run.ema.tensors())
    beyond = run.ema.bounds.beyond(weights, averages)
    rank, host = run.setup.session.accelerator.process_index, socket.gethostname()
    reports: list[Any] = gather_object([(rank, host, beyond)] if beyond else [])
    if not reports:
        # Only once all ranks agree that they are sound: a bad value would widen its own bound.
        run.ema.bounds.note(weights, averages)
        return
    rank, host, beyond = reports[0]
    name, (peak, bound) = next(iter(beyond.items()))
    more = f" (and {len(beyond) - 1} more)" if len(beyond) > 1 else ""
    words = (
        f"the moving average ema/{name}{more} reaches {peak:.3g} on rank {rank} ({host}), and its weight was never "
        f"beyond {bound:.3g}: it changed in memory"
    )
    evidence = {"beyond": {name: list(pair) for name, pair in [*beyond.items()][:20]}}
    verdict = Verdict("weights", words, step, rank, module=_module(name), evidence=evidence)
    raise PoisonedStateError(f"step {step}: {words}", "diverged_averages", verdict)


def _named(averages: Tensors) -> dict[str, torch.Tensor]:
    """Return the averages by their weights' names."""
    return {name.removeprefix("ema/"): tensor for name, tensor in averages.items()}


def _is_moment(name: str) -> bool:
    return "/" in name and not name.startswith("ema/")


def _module(name: str) -> str:
    """Return the weight's name in `ema/<weight>` or `<group>/<weight>/<moment>`."""
    parts = name.split("/")
    return (parts[-2] if _is_moment(name) and len(parts) > 1 else parts[-1]).rpartition(".")[0]
