"""Sampler of one rank's positions in a run; it can start at any step."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import Dataset, Sampler

from dit_lora.data.loading.order import Order


class OrderedDataset(Dataset):
    """Interface of a dataset with the sample at each position of a run."""

    order: Order


@dataclass(kw_only=True, eq=False)
class PositionSampler(Sampler[list[int]]):
    """Yields the positions of each micro-batch of one rank, from the step after `start_step` on.

    Step s covers positions s*G .. s*G + G-1, where G = `samples_per_step` = accumulate * ranks * batch_size. They are
    divided among micro-steps and ranks in order, so the samples of a step do not depend on how it is split.
    """

    start_step: int
    steps: int
    batch_size: int
    accumulate: int
    rank: int
    num_ranks: int

    @property
    def samples_per_step(self) -> int:
        """Number of samples in one optimizer step, over all ranks."""
        return self.accumulate * self.num_ranks * self.batch_size

    def __len__(self) -> int:
        return (self.steps - self.start_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start_step, self.steps):
            for micro in range(self.accumulate):
                # Micro-steps come first, then ranks: each rank has a contiguous slice of every micro-step.
                start = step * self.samples_per_step + (micro * self.num_ranks + self.rank) * self.batch_size
                yield list(range(start, start + self.batch_size))
