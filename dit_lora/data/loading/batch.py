"""A micro-batch: tensors of several samples, their names and draws, and what is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dit_lora.numerics.streams import Drawn, fold

LOSS_WEIGHT = "loss_weight"
"""Name of a batch's tensor, fp32 (B,), that its losses are multiplied by; only data with weights has it."""
PRESERVE = "preserve."
"""Start of the names of a batch's tensors of its captions without the trigger (`train.preserve`)."""
PRESERVE_WEIGHT = "preserve_weight"
"""Name of the factor, fp32 (B,), of the loss on them; only data with such captions has it."""
ON_HOST = frozenset({"prompt_attention_mask", "prompt_mask", "prompt_embeds_mask"})
"""Names of tensors that stay on the host: masks of captions (Sana's, Latte's and Krea 2's), whose values decide shapes and backends.
To look at one on a device, the host would wait in every micro-step."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Each tensor is (B, ...); `draws` seed what is drawn for each sample."""

    ids: tuple[str, ...]
    draws: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    faults: Mapping[str, str] = field(default_factory=dict)
    """Problems that were met while the sample was read, by sample id."""
    ahead: Drawn | None = None
    """The draws of its step, where they were made as the batch was read."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, all but what is `ON_HOST`."""
        moved = {
            name: t if name.removeprefix(PRESERVE) in ON_HOST else t.to(device, non_blocking=True)
            for name, t in self.tensors.items()
        }
        return self._with(moved, lambda draws: draws.to(device, non_blocking=True))

    def single(self, index: int) -> "Batch":
        """Return one of the samples as a batch of one."""
        sample = self.ids[index]
        faults = {sample: self.faults[sample]} if sample in self.faults else {}
        tensors = {name: tensor[index : index + 1] for name, tensor in self.tensors.items()}
        ahead = None if self.ahead is None else self.ahead.single(index)
        return Batch((sample,), (self.draws[index],), tensors, faults, ahead)

    def pin_memory(self) -> "Batch":
        """Copy the tensors to pinned memory; the DataLoader calls this by its name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self._with(pinned, torch.Tensor.pin_memory)

    def _with(
        self,
        tensors: Mapping[str, torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> "Batch":
        """Return the batch with these tensors, and with a change to what was drawn ahead."""
        ahead = None if self.ahead is None else self.ahead.each(change)
        return replace(self, tensors=tensors, ahead=ahead)


def draw_number(sample_id: str, epoch: int, copy: int = 0) -> int:
    """Return the seed of a sample's draws in an epoch.

    It does not depend on the sample's position, so leaving other samples out changes nothing.
    """
    draw = fold(epoch, "draws", sample_id)
    return fold(draw, "copies", copy) if copy else draw


def collate(samples: Sequence[Batch]) -> Batch:
    """Join batches of one to a batch, of which nothing is drawn ahead."""
    return Batch(
        ids=tuple(sample.ids[0] for sample in samples),
        draws=tuple(sample.draws[0] for sample in samples),
        tensors={
            name: torch.cat([sample.tensors[name] for sample in samples])
            for name in samples[0].tensors
        },
        faults={sample: fault for batch in samples for sample, fault in batch.faults.items()},
    )
