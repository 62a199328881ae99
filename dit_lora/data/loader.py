"""Batches of cached clips, in an order that is a function of the seed and the position alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from dit_lora.data.batch import LOSS_WEIGHT, Batch, draw_number
from dit_lora.data.cache import Spec, TensorCache
from dit_lora.data.order import Order
from dit_lora.data.quarantine import Quarantine
from dit_lora.data.reading import Reading, build_loader
from dit_lora.data.sampler import OrderedDataset
from dit_lora.data_config import VideoShape
from dit_lora.numerics.streams import generator


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample's place in the caches: a clip, or one window of it."""

    id: str
    video_key: str
    text_key: str
    mirror_key: str | None = None
    """Of its mirror image, where `data.flip` asks for one."""
    shape: VideoShape | None = None
    """Its bucket; None where all samples have one shape."""
    times: float = 1.0
    """How often it comes in an epoch."""
    loss_weight: float = 1.0
    """What its loss is multiplied by."""

    def video_key_of(self, draw: int) -> str:
        """The sample's, or its mirror image's in half of the draws."""
        if self.mirror_key is None:
            return self.video_key
        mirrored = torch.rand((), generator=generator(0, "flip", draw)) < 0.5
        return self.mirror_key if mirrored else self.video_key


class Encodings(Protocol):
    """Encoded clips, or captions, by key: a `TensorCache`, or what encodes when it is asked."""

    def first_spec(self, keys: Sequence[str]) -> Spec: ...

    def read(self, key: str, spec: Spec) -> tuple[dict[str, torch.Tensor], str | None]:
        """The tensors and what is wrong with them; NaN of shape `spec` where there are none."""


@dataclass(frozen=True)
class EncodedClips:
    """The encoded training set; `empty_text_key` is the caption that dropout puts in place."""

    entries: tuple[Entry, ...]
    empty_text_key: str
    videos: Encodings
    texts: Encodings

    def order(self, *, seed: int, quarantine: Quarantine, group: int = 1) -> Order:
        """Which entry is at each position of a run whose steps take `group` samples."""
        return Order(
            [entry.id for entry in self.entries],
            seed=seed,
            quarantine=quarantine,
            group=group,
            buckets=[entry.shape for entry in self.entries],
            times=[entry.times for entry in self.entries],
        )

    @cached_property
    def video_specs(self) -> dict[VideoShape | None, Spec]:
        """Shapes and dtypes of each bucket's clips, from its first entry that can be read; the largest first."""
        keys: dict[VideoShape | None, list[str]] = {}
        for entry in self.entries:
            keys.setdefault(entry.shape, []).append(entry.video_key)
        shapes = sorted(keys, key=lambda shape: shape.volume if shape else 0, reverse=True)
        return {shape: self.videos.first_spec(keys[shape]) for shape in shapes}

    @cached_property
    def text_spec(self) -> Spec:
        """Shapes and dtypes of captions: one for all, from the first entry that can be read."""
        return self.texts.first_spec(
            [self.empty_text_key, *(entry.text_key for entry in self.entries)]
        )

    @property
    def largest(self) -> tuple[VideoShape | None, Spec]:
        """The largest shape, and the tensors of a sample of it."""
        shape, spec = next(iter(self.video_specs.items()))
        return shape, {**spec, **self.text_spec}

    @cached_property
    def has_loss_weights(self) -> bool:
        return any(entry.loss_weight != 1 for entry in self.entries)

    @cached_property
    def empty_text(self) -> tuple[dict[str, torch.Tensor], str | None]:
        """What dropout puts in place, and its fault. Read once: gone bad later, it would be the fault of every sample."""
        tensors, fault = self.texts.read(self.empty_text_key, self.text_spec)
        return {name: tensor.clone() for name, tensor in tensors.items()}, fault  # off the file

    def read(self, entry: Entry, text_key: str, draw: int) -> "Batch":
        """One sample as a batch of one; what is wrong with it is in `faults`."""
        spec = self.video_specs[entry.shape]
        video, video_fault = self.videos.read(entry.video_key_of(draw), spec)
        is_empty = text_key == self.empty_text_key
        text, text_fault = (
            self.empty_text if is_empty else self.texts.read(text_key, self.text_spec)
        )
        faults = [fault for fault in (video_fault, text_fault) if fault]
        tensors = {**video, **text}
        if self.has_loss_weights:
            tensors[LOSS_WEIGHT] = torch.tensor(entry.loss_weight)
        return Batch(
            ids=(entry.id,),
            draws=(draw,),
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            faults={entry.id: "; ".join(faults)} if faults else {},
        )

    def one_of_each_kind(self) -> Sequence[Entry]:
        """None: every sample uses the whole model."""
        return ()

    def known(self) -> dict[str, torch.Tensor]:
        """Nothing: what encoders give does not decide a forward's shapes."""
        return {}

    def sample(self, entry: Entry, draw: int) -> "Batch":
        """One sample with its own caption, as a batch of one; what is wrong with it is in `faults`."""
        return self.read(entry, entry.text_key, draw)

    def dataset(self, how: Reading) -> "ClipDataset":
        return ClipDataset(
            self,
            seed=how.seed,
            caption_dropout=how.caption_dropout,
            quarantine=how.quarantine,
            group=how.sampler.group,
        )

    def loader(self, how: Reading) -> Iterable["Batch"]:
        """The micro-batches of the sampler's positions, in its order."""
        return build_loader(
            self.dataset(how),
            how.sampler,
            workers=how.workers,
            pin_memory=how.pin_memory,
            prefetch=how.prefetch,
        )

    def token_problems(self, model: nn.Module) -> None:
        """Return None: text reaches the model as embeddings."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Set aside what is bad of these samples on disk, if anything is there."""
        return []


@dataclass(frozen=True)
class CachedClips(EncodedClips):
    """A training set that was encoded before."""

    videos: TensorCache
    texts: TensorCache

    def token_problems(self, model: nn.Module) -> None:
        """Return None: text reaches the model as embeddings."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Mark what is bad of these samples' entries, so that the next start builds them anew."""
        wanted = {*samples}
        bad = [entry for entry in self.entries if entry.id in wanted]
        keys = {
            key: self.video_specs[entry.shape]
            for entry in bad
            for key in (entry.video_key, entry.mirror_key)
            if key
        }
        videos = [(self.videos, key, spec) for key, spec in keys.items()]
        texts = [(self.texts, key, self.text_spec) for key in {e.text_key: None for e in bad}]
        aside = []
        for cache, key, spec in [*videos, *texts]:
            if cache.path(key).exists() and cache.read(key, spec)[1]:
                aside.append(cache.set_aside(key))
        return aside


class ClipDataset(OrderedDataset):
    """Reads the sample at each position of a run: which clip, and whether its caption is dropped.

    `group` is the number of samples of one optimizer step, which share a bucket.
    """

    def __init__(
        self,
        clips: EncodedClips,
        *,
        seed: int,
        caption_dropout: float,
        quarantine: Quarantine,
        group: int = 1,
    ) -> None:
        self.clips = clips
        self.seed = seed
        # Read now: in a worker process an error would have no one to tell.
        _ = clips.largest, clips.empty_text, clips.has_loss_weights
        self.order = clips.order(seed=seed, quarantine=quarantine, group=group)
        self.pick = Picker(clips.entries, self.order, seed, caption_dropout, clips.empty_text_key)

    def clip_at(self, position: int) -> tuple[int, Entry]:
        """Epoch and clip. Every epoch is a permutation of its own; a batch may span two epochs."""
        epoch, index = self.order.at(position)
        return epoch, self.clips.entries[index]

    def __getitem__(self, position: int) -> Batch:
        picked = self.pick(position)
        return self.clips.read(picked.entry, picked.text_key, picked.draw)


@dataclass(frozen=True)
class Pick:
    """What a run takes at one position."""

    entry: Entry
    text_key: str
    draw: int


@dataclass(frozen=True)
class Picker:
    """Which sample comes at each position of a run, and whether its caption is dropped."""

    entries: tuple[Entry, ...]
    order: Order
    seed: int
    caption_dropout: float
    empty_text_key: str

    def __call__(self, position: int) -> Pick:
        epoch, copy, index = self.order.draw_at(position)
        entry = self.entries[index]
        draw = draw_number(entry.id, epoch, copy)
        share = torch.rand((), generator=generator(self.seed, "caption_dropout", draw))
        text_key = self.empty_text_key if share < self.caption_dropout else entry.text_key
        return Pick(entry, text_key, draw)
