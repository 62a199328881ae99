"""What a diagnosis may ask of a run: its optimizer state, its snapshots and its other samples."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.storage import UnreadableError
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.state_checks import compute_decay_share
from dit_lora.numerics.finite import describe_bad_tensors
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.numerics.streams import derive_seed
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.replayable_batch import BatchPosition, ReplayableBatch, WeightedLoss, serialize_micro_batch
from dit_lora.training.task import AnySetup

# Number of samples to try as a control.
_MAX_CANDIDATES = 4


@dataclass(frozen=True, kw_only=True)
class RunDiagnosisContext(DiagnosisContext):
    """What a diagnosis of a failed step can use: the model of a run, with the run's state and data."""

    setup: AnySetup
    ema: TrainedEMA | None
    snapshots: Snapshots
    quarantine: Quarantine

    def collect_optimizer_state(self) -> Mapping[str, torch.Tensor]:
        averages = self.ema.named_averages() if self.ema else {}
        return self.setup.engine.local_optimizer_state() | averages

    def compute_snapshot_peaks(self) -> Mapping[str, float]:
        return self.snapshots.compute_largest_magnitudes()

    def compute_decay_share(self) -> float:
        return compute_decay_share(self.setup.optimizer.param_groups)

    def find_other_sample(self, micro_batch: MicroBatch, excluded_ids: Collection[str]) -> MicroBatch | None:
        """Find a good sample from the same bucket, read from the cache, to compare a failed micro-batch with.

        A step of that size fits into memory. The sample takes the position of `micro_batch` in the run.
        """
        training_set = self.setup.data.training_set
        entries = {entry.id: entry for entry in training_set.entries}
        excluded = {entry.sample_id for entry in self.quarantine.records} | {*excluded_ids}
        # Without a bucket no candidate matches, and there is no control.
        bucket = entries[micro_batch.ids[0]].shape if micro_batch.ids[0] in entries else None
        seed = self.setup.recipe.train.seed
        position = BatchPosition(seed, micro_batch.step, micro_batch.micro_step, micro_batch.rank)
        candidates = [record for record in entries.values() if record.id not in excluded and record.shape == bucket]
        for entry in candidates[:_MAX_CANDIDATES]:
            try:
                batch = training_set.read_sample(entry, derive_seed(position.seed, "control", entry.id))
            # Try another one: the other ranks wait for this rank.
            except UnreadableError:
                continue
            # A bad control would hide the fault of the sample that it is compared with.
            if not batch.faults and not describe_bad_tensors(batch.tensors, MAX_ABS):
                return make_replayable(self.setup, batch, position)
        return None

    def share_micro_batch(self, local_batch: MicroBatch | None, owner: int) -> MicroBatch | None:
        seed = self.setup.recipe.train.seed
        packed = serialize_micro_batch(local_batch, seed) if local_batch is not None else None
        parts = broadcast_object(packed, owner)
        if local_batch is not None or parts is None:
            return local_batch
        batch, position = parts
        return make_replayable(self.setup, batch, position)


def make_replayable(setup: AnySetup, batch: Batch, position: BatchPosition) -> ReplayableBatch:
    """Move a batch to the device, and wrap it as a micro-batch at this position of the run."""
    on_device = batch.to(setup.session.accelerator.device)
    return ReplayableBatch.from_batch(WeightedLoss(setup.checkpoint), setup.transformer, on_device, position)
