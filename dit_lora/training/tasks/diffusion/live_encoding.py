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
from dit_lora.data.cache.fill import CacheJob
from dit_lora.data.loading.batch import Batch, DataReadingSettings, build_loader, collate
from dit_lora.data.loading.encoded import ClipDataset, EncodedClips, PickedSample, SamplePicker
from dit_lora.data.media.video import ClipError
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Encoders, Tensors, TextEncoder, VideoEncoder
from dit_lora.families.latents import VaeMemory
from dit_lora.numerics.finite import describe_bad_tensors
from dit_lora.training.session.session import Session
from dit_lora.training.tasks.diffusion.cache_plan import CacheEntryEncoder, CachePlan, DecodedSample, PlannedSample
from dit_lora.training.tasks.diffusion.long_captions import report_cut_captions, suppress_length_warnings
from dit_lora.training.tasks.diffusion.samples import BucketedSample

# Cached embeddings; 1.8 MiB each for T5-XXL and 226 tokens.
_MAX_CACHED_CAPTIONS = 256

ReadResult = tuple[Tensors, str | None]
"""Tensors, and what is wrong with them or None, as returned by `TensorCache.read`."""


def build_on_the_fly_training_set(
    session: Session, encoders: Encoders, plan: CachePlan, planned_samples: Sequence[PlannedSample]
) -> "OnTheFlyTrainingSet":
    """Build the training set with its encoders loaded. Entries have the same keys as in a cache.

    Raises `DitLoraError` if samples are generated with another text encoder, which would stay in memory too.
    """
    if not plan.shares_text_encoder:
        raise DitLoraError(
            "validation.model has another text encoder than model.path, which data.precompute: false would keep "
            "in memory beside it; set data.precompute to true"
        )
    report_cut_captions(session, encoders, [planned.sample.clip for planned in plan.planned_samples])
    samples = {planned.video.key: (planned.sample, False) for planned in planned_samples}
    samples |= {planned.mirror.key: (planned.sample, True) for planned in planned_samples if planned.mirror}
    dtype_and_device = session.precision.dtype, session.accelerator.device
    memory = VaeMemory.from_config(session.recipe.data)
    texts = (plan.empty, *plan.prompt_jobs, *(job for planned in planned_samples for job in planned.texts))
    return OnTheFlyTrainingSet(
        tuple(planned.entry for planned in planned_samples),
        plan.empty.key,
        OnTheFlyVideoEncoder(
            WorkerDecoder(plan.encoding, samples), encoders.load_video_encoder(*dtype_and_device, memory)
        ),
        OnTheFlyTextEncoder({job.key: job for job in texts}, encoders.load_text_encoder(*dtype_and_device)),
        session.recipe.train.effective_guided_scale,
    )


class OnTheFlyTextEncoder:
    """Text embeddings of a training set without a cache: captions are encoded when they are read."""

    def __init__(self, jobs: Mapping[str, CacheJob], encoder: TextEncoder) -> None:
        self._jobs = jobs
        self._encoder = encoder
        # Evicts the least recently used.
        self._read_cached = lru_cache(_MAX_CACHED_CAPTIONS)(self._encode_caption)

    def read_first_entry_spec(self, keys: Sequence[str]) -> Spec:
        return _describe_tensors(self.read(keys[0], {})[0])

    def read(self, key: str, spec: Spec) -> ReadResult:
        tensors, fault = self._read_cached(key)
        # Without tensors it could not be encoded at all; bad values keep theirs.
        return tensors or _make_nan_sample(spec), fault

    def _encode_caption(self, key: str) -> ReadResult:
        job = self._jobs[key]
        try:
            with suppress_length_warnings():
                tensors = {name: tensor.cpu() for name, tensor in job.encode(self._encoder).items()}
        except ClipError as error:
            return {}, f"{job.sample}: {error}"
        bad = describe_bad_tensors(tensors, MAX_ABS)
        return tensors, f"{job.sample}: {bad}" if bad else None


@dataclass(frozen=True)
class WorkerDecoder:
    """Decodes samples in the DataLoader's worker processes, which have no VAE; the main process encodes them."""

    encoding: CacheEntryEncoder
    samples: dict[str, tuple[BucketedSample, bool]]
    """Samples by key, each with True if it is mirrored."""

    def __call__(self, key: str) -> DecodedSample | str:
        """Decode a sample; returns the reason as a string if that fails."""
        sample, mirrored = self.samples[key]
        try:
            return self.encoding.decode_sample(sample, mirrored=mirrored)
        except ClipError as error:
            return str(error)


class OnTheFlyVideoEncoder:
    """Samples that are encoded when they are read, and decoded too unless a worker process has done so."""

    def __init__(self, decoder: WorkerDecoder, encoder: VideoEncoder) -> None:
        self.decoder = decoder
        self._encoder = encoder
        self.decoded_samples: dict[str, DecodedSample | str] = {}
        """Decoded samples by key, each taken by the next `read` of it."""

    def read_first_entry_spec(self, keys: Sequence[str]) -> Spec:
        shape = self.decoder.samples[keys[0]][0].shape
        # Shapes are needed before any file is decoded: a black clip has them too.
        black = DecodedSample(
            _make_black_video(shape),
            references=tuple(_make_black_video(reference) for reference in shape.references),
            mask=torch.ones(shape.height, shape.width) if self.decoder.encoding.has_masks else None,
            sound=self.decoder.encoding.make_silence(shape),
        )
        return _describe_tensors(black.encode_sample(self._encoder, shape))

    def read(self, key: str, spec: Spec) -> ReadResult:
        # Decoded here if no worker has done it, as for single samples.
        pixels = self.decoded_samples.pop(key, None) or self.decoder(key)
        if isinstance(pixels, str):
            return _make_nan_sample(spec), pixels
        encoded = pixels.encode_sample(self._encoder, self.decoder.samples[key][0].shape)
        tensors = {name: tensor.detach().cpu() for name, tensor in encoded.items()}
        return tensors, describe_bad_tensors(tensors, MAX_ABS)


@dataclass(frozen=True)
class OnTheFlyTrainingSet(EncodedClips):
    """Training set without a cache: samples are encoded when they are read."""

    videos: OnTheFlyVideoEncoder
    texts: OnTheFlyTextEncoder

    def make_loader(self, reading: DataReadingSettings) -> "OnTheFlyLoader":
        """The micro-batches at the sampler's positions, in order, encoded on the fly."""
        # It chooses the samples and their random seeds; its own reading is not used.
        dataset = ClipDataset(self, reading)
        decoded = build_loader(
            dataset,
            # Samples are encoded one by one, and pixels do not give the latents' shapes: the step draws the noise.
            replace(reading, pin_memory=False, get_draw_functions=None),
            worker_dataset=_DecodedDataset(dataset.picker, self.videos.decoder),
            collate_fn=list,
        )
        return OnTheFlyLoader(self, decoded, reading.pin_memory)


class _DecodedDataset(Dataset):
    """The samples that a `ClipDataset` would read, decoded by a worker process but not encoded."""

    def __init__(self, pick: SamplePicker, decoder: WorkerDecoder) -> None:
        self.pick = pick
        self.decoder = decoder

    def __getitem__(self, position: int) -> tuple[PickedSample, DecodedSample | str]:
        pick = self.pick(position)
        return pick, self.decoder(pick.entry.choose_video_key(pick.sample_seed))


@dataclass(frozen=True)
class OnTheFlyLoader:
    """The micro-batches of a training set without a cache, encoded on the fly."""

    clips: OnTheFlyTrainingSet
    decoded_loader: DataLoader
    pin_memory: bool

    def __len__(self) -> int:
        return len(self.decoded_loader)

    def __iter__(self) -> Iterator[Batch]:
        for samples in self.decoded_loader:
            encoded = []
            for pick, pixels in samples:
                # `OnTheFlyVideoEncoder.read` takes it out again, by the same key.
                self.clips.videos.decoded_samples[pick.entry.choose_video_key(pick.sample_seed)] = pixels
                encoded.append(self.clips.read(*pick))
            batch = collate(encoded)
            yield batch.pin_memory() if self.pin_memory else batch


def _make_nan_sample(spec: Spec) -> Tensors:
    """NaN tensors for a bad sample, so that its batch can be collated; the guard excludes the sample by name."""
    return {
        name: torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)
        for name, (shape, dtype) in spec.items()
    }


def _make_black_video(shape: VideoShape) -> torch.Tensor:
    return torch.zeros(shape.frames, 3, shape.height, shape.width, dtype=torch.uint8)


def _describe_tensors(tensors: Mapping[str, torch.Tensor]) -> Spec:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
