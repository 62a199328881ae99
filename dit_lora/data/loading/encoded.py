"""Loads batches of encoded clips, in an order that depends only on the seed and the position."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.data.cache.cache import Spec, TensorCache
from dit_lora.data.loading.batch import (
    EMPTY_PREFIX,
    GUIDED_SCALE,
    LOSS_WEIGHT,
    PRESERVE_PREFIX,
    PRESERVE_WEIGHT,
    Batch,
    DataReadingSettings,
    OrderedDataset,
    build_loader,
    make_sample_seed,
)
from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.numerics.streams import derive_seed, make_generator


@dataclass(frozen=True, slots=True)
class SampleCacheKeys:
    """Cache keys of one training sample: a clip, or one window of it."""

    id: str
    video_key: str
    text_key: str
    mirror_key: str | None = None
    """Key of the mirrored clip's entry; None without `data.flip`."""
    shape: VideoShape | None = None
    """The entry's bucket; None if all samples have the same shape."""
    times_per_epoch: float = 1.0
    """Number of times that the entry is used in an epoch."""
    loss_weight: float = 1.0
    """Factor by which the sample's loss is multiplied."""
    empty_text_key: str | None = None
    """Key of the caption used by caption dropout, if this sample has a different one than the others."""
    preserve_text_keys: tuple[str, ...] = ()
    """Keys of the captions without the trigger word (`train.preserve`)."""
    preserve_weight: float = 0.0
    """Weight of the loss on that caption; 0 for a sample whose caption has no trigger word."""

    def choose_preserve_text_key(self, sample_seed: int) -> str | None:
        """Choose the cache key of a caption without the trigger word by `sample_seed`.

        None if the sample has no such caption.
        """
        keys = self.preserve_text_keys
        return keys[derive_seed(sample_seed, "preserve") % len(keys)] if keys else None

    def choose_video_key(self, sample_seed: int) -> str:
        """Choose the cache key of a clip or, for half of the seeds, of its mirrored version."""
        if self.mirror_key is None:
            return self.video_key
        # The choice depends only on the sample's draw, so a resumed run makes the same one.
        mirrored = torch.rand((), generator=make_generator(0, "flip", sample_seed)) < 0.5
        return self.mirror_key if mirrored else self.video_key


class EncodingSource(Protocol):
    """Interface for encoded clips or captions by key: a `TensorCache`, or an encoder that computes each on request."""

    def read_first_entry_spec(self, keys: Sequence[str]) -> Spec: ...

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """Read an encoded clip or caption; returns its tensors, and a message about a fault or None.

        Missing tensors are NaN with the shapes of `spec`.
        """


def build_preserve_spec(text_spec: Spec) -> Spec:
    """Shapes and dtypes of a caption without the trigger word, and of the weight of its loss."""
    tensors = {f"{PRESERVE_PREFIX}{name}": tensor_spec for name, tensor_spec in text_spec.items()}
    return {**tensors, PRESERVE_WEIGHT: (torch.Size([]), torch.float32)}


def build_guided_spec(text_spec: Spec) -> Spec:
    """Shapes and dtypes of a sample's empty caption and of the guidance of its target."""
    tensors = {f"{EMPTY_PREFIX}{name}": tensor_spec for name, tensor_spec in text_spec.items()}
    return {**tensors, GUIDED_SCALE: (torch.Size([]), torch.float32)}


@dataclass(frozen=True)
class EncodedClips:
    """A training set of encoded clips and captions.

    `empty_text_key` is the key of the caption used by caption dropout.
    """

    entries: tuple[SampleCacheKeys, ...]
    empty_text_key: str
    videos: EncodingSource
    texts: EncodingSource
    guided_scale: float | None = None
    """Guidance of the target (`train.target: guided`): samples then have the empty caption too."""

    def build_order(self, *, seed: int, quarantine: Quarantine, samples_per_step: int = 1) -> SampleOrder:
        """Order in which a run, whose steps take `samples_per_step` samples, reads the entries."""
        return SampleOrder(
            [entry.id for entry in self.entries],
            seed=seed,
            quarantine=quarantine,
            samples_per_step=samples_per_step,
            buckets=[entry.shape for entry in self.entries],
            times_per_epoch=[entry.times_per_epoch for entry in self.entries],
        )

    @cached_property
    def video_specs(self) -> dict[VideoShape | None, Spec]:
        """Shapes and dtypes of each bucket's clips, from its first readable entry; the largest bucket first."""
        keys: dict[VideoShape | None, list[str]] = {}
        for entry in self.entries:
            keys.setdefault(entry.shape, []).append(entry.video_key)
        # The largest bucket first: its peak memory decides whether the run fits.
        shapes = sorted(keys, key=lambda shape: shape.volume if shape else 0, reverse=True)
        return {shape: self.videos.read_first_entry_spec(keys[shape]) for shape in shapes}

    @cached_property
    def text_spec(self) -> Spec:
        """Shapes and dtypes of captions, which are equal for all; from the first entry that can be read."""
        return self.texts.read_first_entry_spec([self.empty_text_key, *(entry.text_key for entry in self.entries)])

    @property
    def largest_shape(self) -> tuple[VideoShape | None, Spec]:
        """Largest shape of the training set's clips, and shapes and dtypes of such a sample's tensors."""
        shape, spec = next(iter(self.video_specs.items()))
        spec = {**spec, **self.text_spec}
        if self.has_preserve_captions:
            spec |= build_preserve_spec(self.text_spec)
        if self.guided_scale is not None:
            spec |= build_guided_spec(self.text_spec)
        return shape, spec

    @cached_property
    def has_preserve_captions(self) -> bool:
        """True if any sample of the training set also has captions without the trigger word."""
        return any(entry.preserve_text_keys for entry in self.entries)

    @cached_property
    def has_loss_weights(self) -> bool:
        """True if any sample of the training set has a loss weight other than 1."""
        return any(entry.loss_weight != 1 for entry in self.entries)

    @cached_property
    def empty_caption_tensors(self) -> tuple[dict[str, torch.Tensor], str | None]:
        """Tensors of the caption used by caption dropout, and a message about a fault or None.

        It is read only once: if it became bad later, every sample would get the fault.
        """
        tensors, fault = self.texts.read(self.empty_text_key, self.text_spec)
        # Copy: a view would keep its whole shard mapped during the whole run.
        return {name: tensor.clone() for name, tensor in tensors.items()}, fault

    def read(self, entry: SampleCacheKeys, text_key: str, sample_seed: int) -> "Batch":
        """Read one sample as a batch of one; its `faults` has a message if something is wrong."""
        spec = self.video_specs[entry.shape]
        video, video_fault = self.videos.read(entry.choose_video_key(sample_seed), spec)
        text, text_fault = self._read_caption_tensors(text_key)
        tensors, preserved_fault = {**video, **text}, None
        # The caption without the trigger word is a second text input of the same sample.
        if (preserved_key := entry.choose_preserve_text_key(sample_seed)) is not None:
            preserved, preserved_fault = self.texts.read(preserved_key, self.text_spec)
            tensors |= {f"{PRESERVE_PREFIX}{name}": tensor for name, tensor in preserved.items()}
            tensors[PRESERVE_WEIGHT] = torch.tensor(entry.preserve_weight)
        empty_fault = None
        if self.guided_scale is not None:
            empty_key = entry.empty_text_key or self.empty_text_key
            empty, empty_fault = self._read_caption_tensors(empty_key)
            tensors |= {f"{EMPTY_PREFIX}{name}": tensor for name, tensor in empty.items()}
            # Without a caption there is nothing to guide towards.
            tensors[GUIDED_SCALE] = torch.tensor(1.0 if text_key == empty_key else self.guided_scale)
        faults = [fault for fault in (video_fault, text_fault, preserved_fault, empty_fault) if fault]
        if self.has_loss_weights:
            tensors[LOSS_WEIGHT] = torch.tensor(entry.loss_weight)
        return Batch(
            ids=(entry.id,),
            sample_seeds=(sample_seed,),
            # Add the batch dimension: (...) becomes (1, ...).
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            faults={entry.id: "; ".join(faults)} if faults else {},
        )

    def _read_caption_tensors(self, key: str) -> tuple[dict[str, torch.Tensor], str | None]:
        """Tensors of a caption, and a message about a fault or None."""
        return self.empty_caption_tensors if key == self.empty_text_key else self.texts.read(key, self.text_spec)

    def select_example_entries(self) -> Sequence[SampleCacheKeys]:
        """Empty list of example entries, because every sample of a diffusion model uses the whole model."""
        # The interface is for chat models, in which a sample without pictures skips the vision encoder.
        return ()

    def integer_inputs(self) -> dict[str, torch.Tensor]:
        """Empty dict, because the shapes in a forward pass do not depend on encoded values."""
        return {}

    def read_sample(self, entry: SampleCacheKeys, sample_seed: int) -> "Batch":
        """Read one sample with its real caption, as a batch of one; `faults` has a message if something is wrong."""
        return self.read(entry, entry.text_key, sample_seed)

    def make_loader(self, reading: DataReadingSettings) -> Iterable["Batch"]:
        """Create the DataLoader of the micro-batches at the sampler's positions, in order."""
        return build_loader(ClipDataset(self, reading), reading)

    def find_token_problems(self, model: nn.Module) -> None:
        """None, because diffusion models receive text as embeddings, so that there are no token ids to check."""

    def mark_bad_entries(self, samples: Sequence[str]) -> list[Path]:
        """Empty list of marks, because nothing is stored on disk without a cache."""
        return []


@dataclass(frozen=True)
class CachedClips(EncodedClips):
    """A training set of clips and captions that were encoded in advance and cached."""

    videos: TensorCache
    texts: TensorCache

    def mark_bad_entries(self, samples: Sequence[str]) -> list[Path]:
        """Mark the bad cache entries of these samples, so that the next start encodes them; returns the marks."""
        sample_ids = {*samples}
        bad = [entry for entry in self.entries if entry.id in sample_ids]
        keys = {
            key: self.video_specs[entry.shape] for entry in bad for key in (entry.video_key, entry.mirror_key) if key
        }
        videos = [(self.videos, key, spec) for key, spec in keys.items()]
        # Captions are shared between samples, so each key occurs once.
        text_keys = dict.fromkeys(
            key for entry in bad for key in (entry.text_key, entry.empty_text_key, *entry.preserve_text_keys) if key
        )
        texts = [(self.texts, key, self.text_spec) for key in text_keys]
        mark_paths = []
        for cache, key, spec in [*videos, *texts]:
            # The fault may be in the clip or in the caption, so mark only the entries that are bad now. They may have
            # been damaged after this process has verified them.
            cache.reverify_on_next_read(key)
            if cache.find_shard_path(key).exists() and cache.read(key, spec)[1]:
                mark_paths.append(cache.mark_bad(key))
        return mark_paths


class ClipDataset(OrderedDataset):
    """Map-style dataset with the sample at each position of a run, including whether its caption is dropped."""

    def __init__(self, clips: EncodedClips, reading: DataReadingSettings) -> None:
        self.clips = clips
        # Compute these before the workers start: an error in a worker process would not reach the user.
        _ = (clips.largest_shape, clips.empty_caption_tensors, clips.has_loss_weights, clips.has_preserve_captions)
        self.order = clips.build_order(
            seed=reading.seed, quarantine=reading.quarantine, samples_per_step=reading.sampler.samples_per_step
        )
        self.picker = SamplePicker(
            clips.entries, self.order, reading.seed, reading.caption_dropout, clips.empty_text_key
        )

    def __getitem__(self, position: int) -> Batch:
        return self.clips.read(*self.picker(position))


class PickedSample(NamedTuple):
    """Sample at one position of a run, with the caption to use and the seed of its random numbers."""

    entry: SampleCacheKeys
    text_key: str
    sample_seed: int


@dataclass(frozen=True)
class SamplePicker:
    """Chooses the sample at each position of a run, and whether its caption is dropped."""

    entries: tuple[SampleCacheKeys, ...]
    order: SampleOrder
    seed: int
    caption_dropout: float
    empty_text_key: str

    def __call__(self, position: int) -> PickedSample:
        epoch, copy, index = self.order.get_occurrence(position)
        entry = self.entries[index]
        draw = make_sample_seed(entry.id, epoch, copy)
        # Only the seed decides, so that every worker and a resumed run drop the same captions.
        share = torch.rand((), generator=make_generator(self.seed, "caption_dropout", draw))
        # An empty caption of the sample itself takes precedence.
        empty = entry.empty_text_key or self.empty_text_key
        text_key = empty if share < self.caption_dropout else entry.text_key
        return PickedSample(entry, text_key, draw)
