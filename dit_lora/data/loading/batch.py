"""A micro-batch: tensors of several samples, their ids and random seeds, and faults met while reading them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dit_lora.numerics.streams import RandomInputs, derive_seed

LOSS_WEIGHT = "loss_weight"
"""Name of the tensor with each sample's loss weight, fp32 (B,); only present if the data has weights."""
PRESERVE_PREFIX = "preserve."
"""Prefix of the names of tensors of captions without the trigger word (`train.preserve`)."""
PRESERVE_WEIGHT = "preserve_weight"
"""Name of the tensor with the weight of the loss on those captions, fp32 (B,); only present with such captions."""
HOST_TENSORS = frozenset({"prompt_attention_mask", "prompt_mask", "prompt_embeds_mask"})
"""Names of tensors that stay on the host: caption masks, for example of Sana, Latte and Qwen-Image.

Their values decide shapes and attention backends; on a device, the host would have to wait in every micro-step.
"""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Each tensor is (B, ...); `sample_seeds` are the seeds of each sample's random numbers."""

    ids: tuple[str, ...]
    sample_seeds: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    faults: Mapping[str, str] = field(default_factory=dict)
    """Problems that were found while reading the samples, by sample id."""
    random_inputs: RandomInputs | None = None
    """Random inputs of its step, if they were drawn while the batch was read; None if the step draws them."""

    def to(self, device: torch.device) -> "Batch":
        """Move a batch to a device, except for the tensors in `HOST_TENSORS`."""
        # The masks of captions without the trigger word stay on the host too, hence the prefix is removed.
        moved = {
            name: t if name.removeprefix(PRESERVE_PREFIX) in HOST_TENSORS else t.to(device, non_blocking=True)
            for name, t in self.tensors.items()
        }
        return self._replace_tensors(moved, lambda draws: draws.to(device, non_blocking=True))

    def select_sample(self, index: int) -> "Batch":
        """Extract one sample of a batch, as a batch of one."""
        sample = self.ids[index]
        faults = {sample: self.faults[sample]} if sample in self.faults else {}
        # Slices keep the batch dimension: (B, ...) becomes (1, ...).
        tensors = {name: tensor[index : index + 1] for name, tensor in self.tensors.items()}
        ahead = None if self.random_inputs is None else self.random_inputs.select_sample(index)
        return Batch((sample,), (self.sample_seeds[index],), tensors, faults, ahead)

    def pin_memory(self) -> "Batch":
        """Copy the batch's tensors to pinned memory. The DataLoader calls this method by its name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self._replace_tensors(pinned, torch.Tensor.pin_memory)

    def _replace_tensors(
        self, tensors: Mapping[str, torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> "Batch":
        """Copy the batch with these tensors, and with `convert` applied to its pre-drawn random inputs."""
        ahead = None if self.random_inputs is None else self.random_inputs.map_tensors(convert)
        return replace(self, tensors=tensors, random_inputs=ahead)


def make_sample_seed(sample_id: str, epoch: int, copy: int = 0) -> int:
    """Seed of a sample's random numbers in an epoch.

    It does not depend on the sample's position, so leaving out other samples does not change it.
    """
    draw = derive_seed(epoch, "draws", sample_id)
    # The first copy keeps the seed that it has in data without repeats.
    return derive_seed(draw, "copies", copy) if copy else draw


def collate(samples: Sequence[Batch]) -> Batch:
    """Join batches of one sample each to one batch; pre-drawn random inputs are dropped."""
    return Batch(
        ids=tuple(sample.ids[0] for sample in samples),
        sample_seeds=tuple(sample.sample_seeds[0] for sample in samples),
        # (1, ...) of each sample to (B, ...).
        tensors={name: torch.cat([sample.tensors[name] for sample in samples]) for name in samples[0].tensors},
        faults={sample: fault for batch in samples for sample, fault in batch.faults.items()},
    )
