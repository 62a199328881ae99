"""A micro-batch: tensors of several samples, their names and draws, and what is wrong with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dit_lora.numerics.streams import fold

LOSS_WEIGHT = "loss_weight"
"""The tensor of a batch, fp32 (B,), that its losses are multiplied by; there only where the data has weights."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Each tensor is (B, ...); `draws` seed what is drawn for each sample."""

    ids: tuple[str, ...]
    draws: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    faults: Mapping[str, str] = field(default_factory=dict)
    """What reading the cache found wrong, by sample id."""

    def to(self, device: torch.device) -> "Batch":
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return Batch(self.ids, self.draws, moved, self.faults)

    def single(self, index: int) -> "Batch":
        """One of its samples as a batch of one."""
        sample = self.ids[index]
        faults = {sample: self.faults[sample]} if sample in self.faults else {}
        tensors = {name: tensor[index : index + 1] for name, tensor in self.tensors.items()}
        return Batch((sample,), (self.draws[index],), tensors, faults)

    def pin_memory(self) -> "Batch":
        """The DataLoader calls this when it pins."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return Batch(self.ids, self.draws, pinned, self.faults)


def draw_number(sample_id: str, epoch: int, copy: int = 0) -> int:
    """What seeds a sample's draws in an epoch: not where it comes, so leaving others out changes nothing."""
    draw = fold(epoch, "draws", sample_id)
    return fold(draw, "copies", copy) if copy else draw


def collate(samples: Sequence[Batch]) -> Batch:
    """Batches of one, side by side."""
    return Batch(
        ids=tuple(sample.ids[0] for sample in samples),
        draws=tuple(sample.draws[0] for sample in samples),
        tensors={
            name: torch.cat([sample.tensors[name] for sample in samples])
            for name in samples[0].tensors
        },
        faults={sample: fault for one in samples for sample, fault in one.faults.items()},
    )
