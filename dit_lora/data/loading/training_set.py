"""Interface of what a run trains on, whatever it is made of: entries in an order, samples, and micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dit_lora.data.buckets.report import BucketReport
from dit_lora.data.cache.cache import Spec
from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.order import Order
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.loading.reading import Reading


class AnyEntry(Protocol):
    """One sample of a training set."""

    @property
    def id(self) -> str: ...

    @property
    def shape(self) -> Any:
        """The key that samples of one batch share; memory grows with its `volume`."""


class TrainingSet(Protocol):
    """The samples that a run trains on."""

    @property
    def entries(self) -> Sequence[AnyEntry]: ...

    @property
    def largest(self) -> tuple[Any, Spec]:
        """The shape with the largest volume, and the tensors of a sample of that shape."""

    def one_of_each_kind(self) -> Sequence[AnyEntry]:
        """Return one entry of each kind, where samples use different parts of the model, such as a vision encoder."""

    def known(self) -> dict[str, torch.Tensor]:
        """Return integers of one sample of the largest shape on which a forward's shapes depend, such as token ids."""

    def order(self, *, seed: int, quarantine: Quarantine, group: int = 1) -> Order:
        """Return the order in which a run, whose steps take `group` samples, reads the entries."""

    def sample(self, entry: Any, draw: int) -> Batch:
        """Return one sample, nothing of it dropped, as a batch of one; `faults` says what is wrong with it."""

    def loader(self, how: Reading) -> Iterable[Batch]:
        """Return the micro-batches of the sampler's positions, in its order."""

    def token_problems(self, model: nn.Module) -> list[str] | None:
        """Name each token of a sample that the model has no embedding of; return None if samples hold no token ids."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Set aside what is bad of these samples on disk; return the paths of the marks, none without a cache."""


@dataclass(frozen=True)
class Prepared:
    """The training set, ready to be read, and the digests by which a resumed run knows its data, model and adapters."""

    clips: TrainingSet
    data_digest: str
    transformer_digest: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Samples that `data.rejects: skip` leaves out, each with the reason."""
    report: BucketReport | None = None
    """Report of which samples are in which bucket; None where there are no buckets."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """Names and digests of the LoRA files that training starts from, as the result's header has them."""
