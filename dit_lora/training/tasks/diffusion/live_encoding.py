"""Encodes samples on the fly instead of using a cache: `data.precompute: false`.

Worker processes decode; the training process encodes, one sample at a time as for a cache, so a batch is bitwise equal
to one read from a cache. Memory holds the encoders and the embeddings of recent captions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.utils.data import DataLoader, Dataset

from dit_lora.config.data import VideoShape
from dit_lora.data.cache.cache import MAX_ABS, Spec
from dit_lora.data.cache.fill import Job
from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.encoded import ClipDataset, EncodedClips, Pick, Picker
from dit_lora.data.loading.reading import Reading, build_loader
from dit_lora.data.media.video import ClipError
from dit_lora.families.base import Encoders, Tensors, TextEncoder, VideoEncoder
from dit_lora.families.vae_memory import VaeMemory
from dit_lora.numerics.finite import describe_all
from dit_lora.training.session.session import Session
from dit_lora.training.tasks.diffusion.cache_entries import DecodedSample, Encoding
from dit_lora.training.tasks.diffusion.cache_plan import Plan, PlannedSample
from dit_lora.training.tasks.diffusion.long_captions import quiet_about_length
from dit_lora.training.tasks.diffusion.sample_references import BucketedSample

# Cached embeddings; 1.8 MiB each for T5-XXL and 226 tokens.
_CAPTIONS = 256

Read = tuple[Tensors, str | None]
"""Tensors, and what is wrong with them or None, as returned by `TensorCache.read`."""


def live_clips(
    session: Session,
    checkpoint: Encoders,
    plan: Plan,
    wanted: Sequence[PlannedSample],
) -> "LiveClips":
    """Build the training set with its encoders loaded. Entries have the same keys as in a cache."""
    samples = {planned.video.key: (planned.sample, False) for planned in wanted}
    samples |= {planned.mirror.key: (planned.sample, True) for planned in wanted if planned.mirror}
    dtype_and_device = session.precision.dtype, session.accelerator.device
    memory = VaeMemory.of(session.recipe.data)
    texts = (plan.empty, *plan.shown_texts, *(job for planned in wanted for job in planned.texts))
    return LiveClips(
        tuple(planned.entry for planned in wanted),
        plan.empty.key,
        LiveVideos(
            Decoder(plan.encoding, samples),
            checkpoint.load_video_encoder(*dtype_and_device, memory),
        ),
        LiveTexts({job.key: job for job in texts}, checkpoint.load_text_encoder(*dtype_and_device)),
    )


class LiveTexts:
    """Captions that are encoded when they are read."""

    def __init__(self, jobs: Mapping[str, Job], encode: TextEncoder) -> None:
        self._jobs = jobs
        self._encode = encode
        # Evicts the least recently used.
        self._read = lru_cache(_CAPTIONS)(self._encoded)

    def first_spec(self, keys: Sequence[str]) -> Spec:
        return _spec(self.read(keys[0], {})[0])

    def read(self, key: str, spec: Spec) -> Read:
        tensors, fault = self._read(key)
        # Without tensors it could not be encoded at all; bad values keep theirs.
        return tensors or _placeholder(spec), fault

    def _encoded(self, key: str) -> Read:
        job = self._jobs[key]
        try:
            with quiet_about_length():
                tensors = {name: tensor.cpu() for name, tensor in job.make(self._encode).items()}
        except ClipError as error:
            return {}, f"{job.sample}: {error}"
        bad = describe_all(tensors, MAX_ABS)
        return tensors, f"{job.sample}: {bad}" if bad else None


@dataclass(frozen=True)
class Decoder:
    """Decodes samples in worker processes, without an encoder."""

    encoding: Encoding
    samples: dict[str, tuple[BucketedSample, bool]]
    """Samples by key, each with True if it is mirrored."""

    def __call__(self, key: str) -> DecodedSample | str:
        """Decode a sample; returns the reason as a string if that fails."""
        sample, mirrored = self.samples[key]
        try:
            return self.encoding.decode(sample, mirrored=mirrored)
        except ClipError as error:
            return str(error)


class LiveVideos:
    """Samples that are encoded when they are read, and decoded too unless a worker process has done so."""

    def __init__(self, decoder: Decoder, encode: VideoEncoder) -> None:
        self.decoder = decoder
        self._encode = encode
        self.decoded: dict[str, DecodedSample | str] = {}
        """Decoded samples by key, each taken by the next `read` of it."""

    def first_spec(self, keys: Sequence[str]) -> Spec:
        shape = self.decoder.samples[keys[0]][0].shape
        # Shapes are needed before any file is decoded: a black clip has them too.
        black = DecodedSample(
            _black(shape),
            references=tuple(_black(reference) for reference in shape.references),
            mask=torch.ones(shape.height, shape.width) if self.decoder.encoding.has_masks else None,
            sound=self.decoder.encoding.silence(shape),
        )
        return _spec(black.encoded(self._encode, shape))

    def read(self, key: str, spec: Spec) -> Read:
        # Decoded here if no worker has done it, as for single samples.
        pixels = self.decoded.pop(key, None) or self.decoder(key)
        if isinstance(pixels, str):
            return _placeholder(spec), pixels
        encoded = pixels.encoded(self._encode, self.decoder.samples[key][0].shape)
        tensors = {name: tensor.detach().cpu() for name, tensor in encoded.items()}
        return tensors, describe_all(tensors, MAX_ABS)


@dataclass(frozen=True)
class LiveClips(EncodedClips):
    """A training set without a cache."""

    videos: LiveVideos
    texts: LiveTexts

    def loader(self, how: Reading) -> "LiveLoader":
        """The micro-batches at the sampler's positions, in order, encoded on the fly."""
        # It chooses the samples and their random seeds; its own reading is not used.
        dataset = ClipDataset(self, how)
        decoded = build_loader(
            dataset,
            # Samples are encoded one by one, and pixels do not give the latents' shapes: the step draws the noise.
            replace(how, pin_memory=False, draws=None),
            source=_DecodedDataset(dataset.pick, self.videos.decoder),
            collate_fn=list,
        )
        return LiveLoader(self, decoded, how.pin_memory)


class _DecodedDataset(Dataset):
    """The samples that a `ClipDataset` would read, decoded by a worker process but not encoded."""

    def __init__(self, pick: Picker, decoder: Decoder) -> None:
        self.pick = pick
        self.decoder = decoder

    def __getitem__(self, position: int) -> tuple[Pick, DecodedSample | str]:
        pick = self.pick(position)
        return pick, self.decoder(pick.entry.video_key_of(pick.draw))


@dataclass(frozen=True)
class LiveLoader:
    """The micro-batches of a training set without a cache, encoded on the fly."""

    clips: LiveClips
    decoded: DataLoader
    pin_memory: bool

    def __len__(self) -> int:
        return len(self.decoded)

    def __iter__(self) -> Iterator[Batch]:
        for samples in self.decoded:
            batch = collate([self._encode(pick, pixels) for pick, pixels in samples])
            yield batch.pin_memory() if self.pin_memory else batch

    def _encode(self, pick: Pick, pixels: DecodedSample | str) -> Batch:
        # `LiveVideos.read` takes it out again, by the same key.
        self.clips.videos.decoded[pick.entry.video_key_of(pick.draw)] = pixels
        return self.clips.read(*pick)


def _placeholder(spec: Spec) -> Tensors:
    """NaN tensors for a bad sample, so that its batch can be collated; the guard excludes the sample by name."""
    return {
        name: torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)
        for name, (shape, dtype) in spec.items()
    }


def _black(shape: VideoShape) -> torch.Tensor:
    return torch.zeros(shape.frames, 3, shape.height, shape.width, dtype=torch.uint8)


def _spec(tensors: Mapping[str, torch.Tensor]) -> Spec:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
