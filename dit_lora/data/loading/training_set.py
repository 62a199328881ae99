"""Interface of the data that a run trains on: entries in an order, samples, and micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dit_lora.data.buckets.report import BucketReport
from dit_lora.data.cache.cache import Spec
from dit_lora.data.loading.batch import Batch, DataReadingSettings
from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine


class TrainingEntry(Protocol):
    """Interface of one sample of a training set, before it is read."""

    @property
    def id(self) -> str: ...

    @property
    def shape(self) -> Any:
        """Shape that all samples of one batch share; its `volume` tells which needs more memory."""


class TrainingSet(Protocol):
    """Interface of the samples that a run trains on."""

    @property
    def entries(self) -> Sequence[TrainingEntry]: ...

    @property
    def largest_shape(self) -> tuple[Any, Spec]:
        """Shape with the largest volume in the training set, and the shapes and dtypes of such a sample's tensors."""

    def select_example_entries(self) -> Sequence[TrainingEntry]:
        """One sample of each kind, if samples use different parts of the model, such as a vision encoder."""

    def integer_inputs(self) -> dict[str, torch.Tensor]:
        """Integer inputs of a sample of the largest shape that decide shapes in a forward pass, such as token ids."""

    def build_order(self, *, seed: int, quarantine: Quarantine, samples_per_step: int = 1) -> SampleOrder:
        """Order in which a run, whose steps take `samples_per_step` samples, reads the entries."""

    def read_sample(self, entry: Any, sample_seed: int) -> Batch:
        """Read one sample, with nothing dropped, as a batch of one; `faults` has a message if something is wrong."""

    def make_loader(self, reading: DataReadingSettings) -> Iterable[Batch]:
        """Create the DataLoader of the micro-batches at the sampler's positions, in order."""

    def find_token_problems(self, model: nn.Module) -> list[str] | None:
        """Messages about tokens of the samples that have no embedding in the model.

        None if samples have no token ids.
        """

    def mark_bad_entries(self, samples: Sequence[str]) -> list[Path]:
        """Mark the bad cache entries of these samples; returns the paths of the marks, none without a cache."""


@dataclass(frozen=True)
class TrainingData:
    """The training set of a run, with digests that let a resumed run recognize its data, model and adapters."""

    training_set: TrainingSet
    data_digest: str
    transformer_digest: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Samples that `data.rejects: skip` leaves out, with the reasons."""
    bucket_report: BucketReport | None = None
    """Report on the buckets; None if there are none."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """Names and digests of the LoRA files that training starts from, as stored in the result's metadata."""
    validation_set: TrainingSet | None = None
    """The samples of `validation.data`, which are never trained on; None without it, and for chat models."""
    validation_digest: str = ""
    """Digest of the samples of `validation.data` or `validation.conversations`; empty without them."""
