"""What a run trains on, whatever it is made of: entries in an order, samples, and micro-batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dit_lora.data.cache import Spec
from dit_lora.data.loader import Batch, PositionSampler
from dit_lora.data.order import Order
from dit_lora.data.quarantine import Quarantine


class AnyEntry(Protocol):
    """One sample of a training set."""

    @property
    def id(self) -> str: ...

    @property
    def shape(self) -> Any:
        """What it shares with the samples that it may be in a batch with; its `volume` is what memory grows with."""


@dataclass(frozen=True)
class Reading:
    """How a run reads its training set."""

    sampler: PositionSampler
    seed: int
    caption_dropout: float
    quarantine: Quarantine
    workers: int
    prefetch: int
    pin_memory: bool


class TrainingSet(Protocol):
    """What a run trains on."""

    @property
    def entries(self) -> Sequence[AnyEntry]: ...

    @property
    def largest(self) -> tuple[Any, Spec]:
        """The shape with the largest volume, and the tensors of a sample of it."""

    def one_of_each_kind(self) -> Sequence[AnyEntry]:
        """Where samples use different parts of the model, such as its vision encoder: one entry of each kind."""

    def known(self) -> dict[str, torch.Tensor]:
        """Integers of one sample of the largest shape on which a forward's shapes depend, such as token ids."""

    def order(self, *, seed: int, quarantine: Quarantine, group: int = 1) -> Order:
        """Which entry is at each position of a run whose steps take `group` samples."""

    def sample(self, entry: Any, draw: int) -> Batch:
        """One sample as a batch of one, whole: nothing of it is dropped; what is wrong with it is in `faults`."""

    def loader(self, how: Reading) -> Iterable[Batch]:
        """The micro-batches of the sampler's positions, in its order."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Set aside what is bad of these samples on disk, if anything is there."""
