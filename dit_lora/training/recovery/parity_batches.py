"""Builds the micro-batches on which a run's kernels are compared: the largest samples and every kind of sample."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.ranks import broadcast_object, gather_object
from dit_lora.training.recovery.diagnosis_context import make_replayable
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.replayable_batch import BatchPosition, replace_sample_seeds
from dit_lora.training.task import AnySetup

MIN_SAMPLES = 2
"""Minimum number of samples: a kernel that uses the first sample's tables for all is right for one sample."""


def ensure_min_samples(batch: Batch, candidates: Sequence[Batch] = ()) -> Batch:
    """Extend a batch to `MIN_SAMPLES` samples: with one of `candidates` of equal shapes, or with itself reseeded."""
    if len(batch.ids) >= MIN_SAMPLES:
        return batch
    # Shapes without the batch dimension: samples of equal shapes can be joined.
    shapes = {name: tensor.shape[1:] for name, tensor in batch.tensors.items()}
    fitting = [
        candidate.select_sample(0)
        for candidate in candidates
        if candidate.ids[0] != batch.ids[0]
        and {name: tensor.shape[1:] for name, tensor in candidate.tensors.items()} == shapes
    ]
    # The same sample with another random seed has other noise and another timestep.
    return collate([batch, *fitting[:1], replace_sample_seeds(batch, 0)][:MIN_SAMPLES])


def make_micro_batch(setup: AnySetup, batch: Batch) -> MicroBatch:
    """A batch as a micro-batch for kernel comparisons, which belongs to no training step."""
    # In a collective forward all ranks need the same dropout, whose seed depends on the rank.
    rank = 0 if setup.engine.collective_forward else setup.session.accelerator.process_index
    position = BatchPosition(setup.recipe.train.seed, 0, 0, rank)
    setup.transformer.train()
    return make_replayable(setup, batch, position)


def read_good_samples(setup: AnySetup, entries: Sequence[Any], count: int) -> list[Batch]:
    """Read `count` good samples of the entries, each with its own random seed; entries repeat if there are too few."""
    good: list[tuple[Any, Batch]] = []
    for entry in entries:
        if len(good) == count:
            break
        sample = setup.data.training_set.read_sample(entry, len(good))
        if not sample.faults:
            good.append((entry, sample))
    samples = [sample for _, sample in good]
    while good and len(samples) < count:
        entry, _ = good[len(samples) % len(good)]
        # The sample's number is its random seed: a repeated entry gets other noise.
        samples.append(setup.data.training_set.read_sample(entry, len(samples)))
    return samples


def select_usable_entries(setup: AnySetup, quarantine: Quarantine) -> list[Any]:
    """The data set entries that the quarantine does not exclude."""
    left_out = {record.sample_id for record in quarantine.records}
    return [entry for entry in setup.data.training_set.entries if entry.id not in left_out]


def build_compared_batches(setup: AnySetup, quarantine: Quarantine) -> list[Batch]:
    """Batches to compare kernels on: from the largest bucket, from the fullest bucket, and of each kind of sample."""
    trained_on, size = select_usable_entries(setup, quarantine), max(MIN_SAMPLES, setup.recipe.train.batch_size)
    counts = Counter(entry.shape for entry in trained_on)
    if not counts:
        return []
    # The largest bucket finds errors of size, the fullest one errors in the most common case.
    largest = max(counts, key=lambda shape: shape.volume)
    fullest = max(counts, key=lambda shape: (counts[shape], shape.volume))
    groups = [[e for e in trained_on if e.shape == shape] for shape in (largest, fullest)]
    # The largest bucket may also be the fullest one.
    if groups[0] == groups[1]:
        groups.pop()
    groups += [[entry] for entry in setup.data.training_set.select_example_entries()]
    batches = [read_good_samples(setup, entries, size) for entries in groups]
    return [collate(samples) for samples in batches if samples]


def build_micro_batches(setup: AnySetup, quarantine: Quarantine) -> list[MicroBatch]:
    """Micro-batches to compare kernels on: equally many on all ranks, the same ones for collective forwards."""
    batches = build_compared_batches(setup, quarantine)
    if setup.engine.collective_forward:
        batches = broadcast_object(batches)
    # Each comparison gathers: a rank with more batches would wait for the others forever.
    count = min(gather_object([len(batches)]))
    return [make_micro_batch(setup, batch) for batch in batches[:count]]


def disable_for_run(recovery: RunRecovery, fallback: Fallback) -> None:
    """Turn a kernel or another fallback off for the rest of the run, and for runs that resume it."""
    fallback.disable()
    recovery.state.switched_off.append(fallback.name)
