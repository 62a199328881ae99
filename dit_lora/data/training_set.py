"""What a run trains on, whatever it is made of: entries in an order, samples, and micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dit_lora.data.batch import Batch
from dit_lora.data.bucket_report import BucketReport
from dit_lora.data.cache import Spec
from dit_lora.data.order import Order
from dit_lora.data.quarantine import Quarantine
from dit_lora.data.reading import Reading


class AnyEntry(Protocol):
    """One sample of a training set."""

    @property
    def id(self) -> str: ...

    @property
    def shape(self) -> Any:
        """What it shares with the samples that it may be in a batch with; its `volume` is what memory grows with."""


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

    def token_problems(self, model: nn.Module) -> list[str] | None:
        """Name each token of a sample that the model has no embedding of; None of samples without the model's tokens."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Set aside what is bad of these samples on disk, if anything is there."""


@dataclass(frozen=True)
class Prepared:
    """The training set, ready to be read, and digests of what makes a run this run."""

    clips: TrainingSet
    data_digest: str
    transformer_digest: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Samples that are left out, by `data.rejects: skip`, and why."""
    report: BucketReport | None = None
    """Which samples are in which bucket; None where there are no buckets."""
