"""The validation loss of every task, on fixed samples with fixed noise and timesteps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate.utils import gather_object

from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.training_set import AnyEntry, TrainingSet
from dit_lora.data.storage import UnreadableError
from dit_lora.numerics.dtensors import needs_all_ranks
from dit_lora.numerics.streams import Streams, fold
from dit_lora.training.execution.modes import evaluating
from dit_lora.training.session.session import agreed
from dit_lora.training.task import AnySetup


class HeldOut(NamedTuple):
    """A sample to measure, with the number that determines its noise and timestep, and its weight in the mean."""

    entry: AnyEntry
    draw: int
    weight: int = 1


def mean_loss(setup: AnySetup, clips: TrainingSet, draws: Sequence[HeldOut]) -> float | None:
    """The loss of `measured_loss`, without its second result."""
    return measured_loss(setup, clips, draws)[0]


def measured_loss(
    setup: AnySetup, clips: TrainingSet, draws: Sequence[HeldOut]
) -> tuple[float | None, bool]:
    """Weighted mean loss over `draws`; its noise is never used in training. None if `draws` is empty. Collective.

    The second result is True if no sample was left out. Ranks share the draws; all ranks of a sharded model run each
    draw together. Bad and unreadable samples are left out with a message; training stops at them.
    """
    if not draws:
        return None, True
    accelerator, model = setup.session.accelerator, setup.transformer
    seed = fold(setup.recipe.train.seed, "held_out")
    # Sum of losses, sum of weights.
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    faults: dict[str, str] = {}
    is_collective, rank = needs_all_ranks(model), accelerator.process_index
    # In a collective forward all ranks need the same draws, or they would wait for each other.
    local_samples = draws if is_collective else draws[rank :: accelerator.num_processes]

    def measure() -> None:
        for held_out in local_samples:
            sample, sample_faults = _sample_of(clips, held_out)
            # In a collective forward, leave the sample out if it is bad on any rank.
            is_bad = (
                any(gather_object([bool(sample_faults)])) if is_collective else bool(sample_faults)
            )
            if is_bad or sample is None:
                faults.update(sample_faults)
                continue
            batch = sample.to(accelerator.device)
            streams = Streams(seed, batch.draws)
            losses = setup.checkpoint.losses(model, batch.tensors, streams).losses
            sums.add_(
                torch.stack(
                    [losses.double().sum() * held_out.weight, sums.new_tensor(held_out.weight)]
                )
            )

    with evaluating(setup.model):
        if is_collective:
            measure()
        else:
            # A rank that runs out of memory must still take part in the sums below.
            agreed(setup.session, measure)
    left_out = dict(gather_object(list(faults.items())))
    for sample_id, fault in left_out.items():
        setup.session.say(f"held-out loss leaves out {sample_id}: {fault}")
    # Over all ranks; in a collective forward each rank counts every draw, which cancels out.
    total, weight = accelerator.reduce(sums, reduction="sum").tolist()
    return (total / weight if weight else None), not left_out


def _sample_of(clips: TrainingSet, one: HeldOut) -> tuple[Batch | None, dict[str, str]]:
    """Read a sample and describe its faults. None if it cannot be read from disk; training will fail on it too."""
    try:
        sample = clips.sample(one.entry, one.draw)
    except UnreadableError as error:
        return None, {one.entry.id: str(error)}
    return sample, dict(sample.faults)
