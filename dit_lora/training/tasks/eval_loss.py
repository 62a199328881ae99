"""Measures the eval loss of every task, on fixed samples with fixed noise and timesteps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.training_set import TrainingEntry, TrainingSet
from dit_lora.data.storage import UnreadableError
from dit_lora.numerics.dtensors import has_collective_forward
from dit_lora.numerics.eval_mode import use_eval_mode
from dit_lora.numerics.ranks import gather_object, is_true_on_any_rank
from dit_lora.numerics.streams import RandomStreams, derive_seed
from dit_lora.training.replayable_batch import compute_data_losses
from dit_lora.training.session.session import run_with_shared_errors
from dit_lora.training.task import AnySetup


class EvalSample(NamedTuple):
    """A sample for the eval loss: the number that determines its noise and timestep, and its weight in the mean."""

    entry: TrainingEntry
    sample_seed: int
    weight: int = 1


def measure_eval_loss(
    setup: AnySetup, training_set: TrainingSet, eval_samples: Sequence[EvalSample]
) -> tuple[float | None, bool]:
    """Eval loss: weighted mean loss over `eval_samples` with noise that training never uses; None if empty.

    Collective.

    The second result is True if no sample was left out. Ranks share the draws; all ranks of a sharded model run each
    draw together. Bad and unreadable samples are left out with a message. Quarantined samples are read too: only
    training leaves them out.
    """
    if not eval_samples:
        return None, True
    accelerator, model = setup.accelerator, setup.transformer
    seed = derive_seed(setup.recipe.train.seed, "held_out")
    # Sum of losses, sum of weights.
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    faults: dict[str, str] = {}
    is_collective, rank = has_collective_forward(model), accelerator.process_index
    # In a collective forward all ranks need the same draws, or they would wait for each other.
    local_samples = eval_samples if is_collective else eval_samples[rank :: accelerator.num_processes]

    def add_local_losses() -> None:
        for eval_sample in local_samples:
            sample: Batch | None = None
            try:
                sample = training_set.read_sample(eval_sample.entry, eval_sample.sample_seed)
                sample_faults = dict(sample.faults)
            # Not an error here: if it cannot be read later either, training ends at it.
            except UnreadableError as error:
                sample_faults = {eval_sample.entry.id: str(error)}
            # In a collective forward, leave the sample out if it is bad on any rank.
            is_bad = is_true_on_any_rank(bool(sample_faults)) if is_collective else bool(sample_faults)
            if is_bad or sample is None:
                faults.update(sample_faults)
                continue
            batch = sample.to(accelerator.device)
            streams = RandomStreams(seed, batch.sample_seeds)
            # With a guided target as in training, or a better adapter would have a larger loss.
            losses = compute_data_losses(setup.checkpoint, model, batch.tensors, streams).losses
            sums.add_(torch.stack([losses.double().sum() * eval_sample.weight, sums.new_tensor(eval_sample.weight)]))

    with use_eval_mode(setup.model):
        if is_collective:
            add_local_losses()
        else:
            # A rank that runs out of memory must still take part in the sums below.
            run_with_shared_errors(setup.session, add_local_losses)
    left_out = dict(gather_object(list(faults.items())))
    for sample_id, fault in left_out.items():
        setup.session.say(f"eval loss: skipped {sample_id}: {fault}")
    # Over all ranks; in a collective forward each rank counts every draw, which cancels out.
    total, weight = accelerator.reduce(sums, reduction="sum").tolist()
    return (total / weight if weight else None), not left_out
