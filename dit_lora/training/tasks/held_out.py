"""The loss on what is never trained on, for every task."""

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
    """A sample to measure on, by its draw of noise and timestep."""

    entry: AnyEntry
    draw: int
    weight: int = 1


def mean_loss(setup: AnySetup, clips: TrainingSet, draws: Sequence[HeldOut]) -> float | None:
    """Return the first value of `measured_loss`."""
    return measured_loss(setup, clips, draws)[0]


def measured_loss(
    setup: AnySetup, clips: TrainingSet, draws: Sequence[HeldOut]
) -> tuple[float | None, bool]:
    """Return the weighted mean loss over these draws, which training never makes; None without draws. Collective.

    The second value is true if no sample was left out.

    Ranks share the draws; of a sharded model, which needs all of them, each runs all. Samples that are bad or cannot
    be read are left out, and said; training stops at them.
    """
    if not draws:
        return None, True
    accelerator, model = setup.session.accelerator, setup.transformer
    seed = fold(setup.recipe.train.seed, "held_out")
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # of losses, of weights
    faults: dict[str, str] = {}
    together, rank = needs_all_ranks(model), accelerator.process_index
    # A rank that had fewer draws would leave the others waiting inside a forward pass.
    own_share = draws if together else draws[rank :: accelerator.num_processes]

    def measure() -> None:
        for one in own_share:
            sample, wrong = _sample_of(clips, one)
            # Where all ranks run it together, it is left out if it is bad on any.
            is_bad = any(gather_object([bool(wrong)])) if together else bool(wrong)
            if is_bad or sample is None:
                faults.update(wrong)
                continue
            batch = sample.to(accelerator.device)
            streams = Streams(seed, batch.draws)
            losses = setup.checkpoint.losses(model, batch.tensors, streams).losses
            sums.add_(
                torch.stack([losses.double().sum() * one.weight, sums.new_tensor(one.weight)])
            )

    with evaluating(setup.model):
        if together:
            measure()
        else:
            # A rank that fails, for want of memory, is still asked for its sums.
            agreed(setup.session, measure)
    left_out = dict(gather_object(list(faults.items())))
    for sample_id, fault in left_out.items():
        setup.session.say(f"held-out loss leaves out {sample_id}: {fault}")
    total, weight = accelerator.reduce(sums, reduction="sum").tolist()
    return (total / weight if weight else None), not left_out


def _sample_of(clips: TrainingSet, one: HeldOut) -> tuple[Batch | None, dict[str, str]]:
    """Read a sample and describe its faults. None if it cannot be read from disk; training will meet that too."""
    try:
        sample = clips.sample(one.entry, one.draw)
    except UnreadableError as error:
        return None, {one.entry.id: str(error)}
    return sample, dict(sample.faults)
