"""Batches of cached clips, in an order that is a function of the seed and the position alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dit_lora.data.cache import Spec, TensorCache
from dit_lora.data.quarantine import Order, Quarantine
from dit_lora.numerics.streams import fold, generator


@dataclass(frozen=True)
class Entry:
    """A clip's place in the caches."""

    id: str
    video_key: str
    text_key: str
    mirror_key: str | None = None
    """Of its mirror image, where `data.flip` asks for one."""


@dataclass(frozen=True)
class CachedClips:
    """The encoded training set; `empty_text_key` is the caption that dropout puts in place."""

    entries: tuple[Entry, ...]
    empty_text_key: str
    videos: TensorCache
    texts: TensorCache

    @cached_property
    def specs(self) -> tuple[Spec, Spec]:
        """Shapes and dtypes of clips and captions: one for all, from the first entries that can be read."""
        video = self.videos.first_spec([entry.video_key for entry in self.entries])
        text = self.texts.first_spec(
            [self.empty_text_key, *(entry.text_key for entry in self.entries)]
        )
        return video, text

    @cached_property
    def empty_text(self) -> tuple[dict[str, torch.Tensor], str | None]:
        """What dropout puts in place, and its fault. Read once: gone bad later, it would be the fault of every sample."""
        tensors, fault = self.texts.read(self.empty_text_key, self.specs[1])
        return {name: tensor.clone() for name, tensor in tensors.items()}, fault  # off the file

    def read(self, entry: Entry, text_key: str, draw: int) -> "Batch":
        """One sample as a batch of one; what is wrong with it is in `faults`."""
        video_spec, text_spec = self.specs
        tensors, video_fault = self.videos.read(self._video_key(entry, draw), video_spec)
        is_empty = text_key == self.empty_text_key
        embeddings, text_fault = (
            self.empty_text if is_empty else self.texts.read(text_key, text_spec)
        )
        faults = [fault for fault in (video_fault, text_fault) if fault]
        return Batch(
            ids=(entry.id,),
            draws=(draw,),
            tensors={name: tensor[None] for name, tensor in (tensors | embeddings).items()},
            faults={entry.id: "; ".join(faults)} if faults else {},
        )

    def _video_key(self, entry: Entry, draw: int) -> str:
        """The sample's, or its mirror image's in half of the draws."""
        if entry.mirror_key is None:
            return entry.video_key
        mirrored = torch.rand((), generator=generator(0, "flip", draw)) < 0.5
        return entry.mirror_key if mirrored else entry.video_key

    def set_aside_bad(self, samples: Sequence[str]) -> list[Path]:
        """Rename what is bad of these samples' entries, so that the next start builds them anew."""
        video_spec, text_spec = self.specs
        bad = [entry for entry in self.entries if entry.id in samples]
        keys = [key for entry in bad for key in (entry.video_key, entry.mirror_key) if key]
        videos = [(self.videos, key, video_spec) for key in keys]
        texts = [(self.texts, key, text_spec) for key in {entry.text_key: None for entry in bad}]
        aside = []
        for cache, key, spec in [*videos, *texts]:
            if cache.path(key).exists() and cache.read(key, spec)[1]:
                aside.append(cache.set_aside(key))
        return aside


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


class ClipDataset(Dataset):
    """Reads the sample at each position of a run: which clip, and whether its caption is dropped."""

    def __init__(
        self, clips: CachedClips, *, seed: int, caption_dropout: float, quarantine: Quarantine
    ) -> None:
        self.clips = clips
        self.seed = seed
        self.caption_dropout = caption_dropout
        _ = clips.empty_text  # read now: in a worker process an error would have no one to tell
        self.order = Order([e.id for e in clips.entries], seed=seed, quarantine=quarantine)

    def clip_at(self, position: int) -> tuple[int, Entry]:
        """Epoch and clip. Every epoch is a permutation of its own; a batch may span two epochs."""
        epoch, index = self.order.at(position)
        return epoch, self.clips.entries[index]

    def __getitem__(self, position: int) -> Batch:
        epoch, entry = self.clip_at(position)
        draw = draw_number(entry.id, epoch)
        share = torch.rand((), generator=generator(self.seed, "caption_dropout", draw))
        text_key = self.clips.empty_text_key if share < self.caption_dropout else entry.text_key
        return self.clips.read(entry, text_key, draw)


def draw_number(sample_id: str, epoch: int) -> int:
    """What seeds a sample's draws in an epoch: not where it comes, so leaving others out changes nothing."""
    return fold(epoch, "draws", sample_id)


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


class PositionSampler(Sampler[list[int]]):
    """The positions of each micro-batch of one rank, from the step after `start_step` on.

    Step s covers positions s*G .. s*G + G-1, where G = accumulate * ranks * batch_size. Micro-steps and
    ranks share them out in order, so the samples of a step do not depend on how it is split.
    """

    def __init__(
        self,
        *,
        start_step: int,
        steps: int,
        batch_size: int,
        accumulate: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.steps = range(start_step, steps)
        self.batch_size, self.accumulate, self.rank, self.ranks = (
            batch_size,
            accumulate,
            rank,
            ranks,
        )

    def __len__(self) -> int:
        return len(self.steps) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        per_step = self.accumulate * self.ranks * self.batch_size
        for step in self.steps:
            for micro in range(self.accumulate):
                first = step * per_step + (micro * self.ranks + self.rank) * self.batch_size
                yield list(range(first, first + self.batch_size))


def build_loader(
    dataset: ClipDataset, sampler: PositionSampler, *, workers: int, pin_memory: bool
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        # A fixed generator: a loader that draws its base seed from the global one would disturb it.
        generator=generator(dataset.seed, "workers"),
    )
