"""Makes the micro-batches that compare a run's fused kernels: its own samples, the largest and one of each kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.switches import Switch
from dit_lora.numerics.streams import fold
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.micro_batch import Place, replayable, sample_losses
from dit_lora.training.task import AnySetup

ROWS = 2
"""The fewest samples of a comparison: a kernel that gives every sample the first one's tables is right for one."""


def several_rows(batch: Batch, others: Sequence[Batch] = ()) -> Batch:
    """Return the batch with at least `ROWS` samples: adds one of `others` of equal shapes, or its own drawn again."""
    if len(batch.ids) >= ROWS:
        return batch
    shapes = {name: tensor.shape[1:] for name, tensor in batch.tensors.items()}
    fitting = [
        one.single(0)
        for one in others
        if one.ids[0] != batch.ids[0]
        and {name: tensor.shape[1:] for name, tensor in one.tensors.items()} == shapes
    ]
    again = replace(batch, draws=tuple(fold(draw, "redrawn", 0) for draw in batch.draws))
    return collate([batch, *fitting[:1], again][:ROWS])


def micro_batch_of(setup: AnySetup, batch: Batch) -> MicroBatch:
    """Return the batch as a comparison runs it, which is at no step."""
    on_device = batch.to(setup.session.accelerator.device)
    rank = 0 if setup.engine.lockstep else setup.session.accelerator.process_index
    place = Place(setup.recipe.train.seed, 0, 0, rank)
    return replayable(sample_losses(setup.checkpoint), setup.transformer.train(), on_device, place)


def samples_of(setup: AnySetup, entries: Sequence[Any], count: int) -> list[Batch]:
    """Return this many good samples of the entries, each with its own draw; entries repeat if there are too few."""
    good: list[tuple[Any, Batch]] = []
    for entry in entries:
        if len(good) == count:
            break
        sample = setup.data.clips.sample(entry, len(good))
        if not sample.faults:
            good.append((entry, sample))
    samples = [sample for _, sample in good]
    while good and len(samples) < count:
        entry, _ = good[len(samples) % len(good)]
        samples.append(setup.data.clips.sample(entry, len(samples)))
    return samples


def kept_entries(setup: AnySetup, quarantine: Quarantine) -> list[Any]:
    """Return the entries that the run does not leave out."""
    left_out = {one.sample_id for one in quarantine.records}
    return [entry for entry in setup.data.clips.entries if entry.id not in left_out]


def compared_batches(setup: AnySetup, quarantine: Quarantine) -> list[Batch]:
    """Return several samples of the largest bucket, of the one with the most, and of each kind of sample."""
    trained_on, size = kept_entries(setup, quarantine), max(ROWS, setup.recipe.train.batch_size)
    counts = Counter(entry.shape for entry in trained_on)
    if not counts:
        return []
    largest = max(counts, key=lambda shape: shape.volume)
    kinds = [[entry] for entry in setup.data.clips.one_of_each_kind()]
    fullest = max(counts, key=lambda shape: (counts[shape], shape.volume))
    groups = [[e for e in trained_on if e.shape == shape] for shape in (largest, fullest)]
    if groups[0] == groups[1]:
        groups.pop()
    batches = [samples_of(setup, entries, size) for entries in groups]
    batches += [samples_of(setup, entries, size) for entries in kinds]
    return [collate(samples) for samples in batches if samples]


def make_batches(setup: AnySetup, quarantine: Quarantine) -> list[MicroBatch]:
    """Take equally many of `compared_batches` on every rank, and in lockstep the same ones."""
    choices = [compared_batches(setup, quarantine)]
    if setup.engine.lockstep:
        broadcast_object_list(choices)
    # Each comparison gathers: a rank with more batches would wait for the others for ever.
    count = min(gather_object([len(choices[0])]))
    return [micro_batch_of(setup, batch) for batch in choices[0][:count]]


def turn_off(recovery: RunRecovery, switch: Switch) -> None:
    """Turn a switch off for the rest of the run, and for those that resume it."""
    switch.turn_off()
    recovery.state.switched_off.append(switch.name)
