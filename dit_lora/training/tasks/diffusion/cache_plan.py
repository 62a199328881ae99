"""Plans a recipe's cache before anything is encoded: an encoding job and a cache key for each sample and caption.

A key is the digest of all that the entry's tensors depend on; a job decodes the sample and encodes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.judge import collect_frame_findings
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.runner import audit_from_stored_measurements
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import CacheJob
from dit_lora.data.loading.encoded import SampleCacheKeys
from dit_lora.data.media.clip_sound import SOUND_VERSION, read_sound
from dit_lora.data.media.media import Media, MediaFile
from dit_lora.data.media.references import read_mask, read_reference
from dit_lora.data.media.sound import Sound, SoundFormat
from dit_lora.data.media.video import DECODE_VERSION, ClipError, read_frames
from dit_lora.data.sources.clips import Clip
from dit_lora.data.storage import read_with_retry
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo, Encoders, Tensors, TextEncoder, VideoEncoder
from dit_lora.families.latents import LOSS_MASK, VaeMemory, downscale_mask
from dit_lora.families.references import EditTextEncoder, ReferenceEncoder, ReferenceSpec
from dit_lora.families.sound import SoundEncoder
from dit_lora.training.tasks.diffusion.samples import BucketedSample, RecipeSamples, find_samples, make_progress_bar


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample: the input of the VAE encoder."""

    video: torch.Tensor
    """Frames, uint8 (F, 3, H, W)."""
    image: torch.Tensor | None = None
    """The sample's separate first image, uint8 (3, H, W); None if it has none."""
    references: tuple[torch.Tensor, ...] = ()
    """Frames of each reference, uint8 (frames, 3, height, width), at its own size."""
    mask: torch.Tensor | None = None
    """Weight of each pixel in the loss, float32 (H, W) from 0 to 1; None if the data has no masks."""
    sound: Sound | None = None
    """The sound of its frames; None if sound is not trained."""

    def encode_sample(self, encoder: VideoEncoder, shape: VideoShape) -> Tensors:
        """Encode a decoded sample to the tensors to cache.

        `shape` is the sample's, including its references' shapes.
        """
        tensors = encoder(self.video, self.image)
        if self.references:
            assert isinstance(encoder, ReferenceEncoder)
            tensors |= encoder.encode_references(self.references, shape)
        if self.sound is not None:
            assert isinstance(encoder, SoundEncoder)
            tensors |= encoder.encode_sound(self.sound.waveform, self.sound.rate)
        if self.mask is not None:
            tensors[LOSS_MASK] = downscale_mask(self.mask, tensors["latent_mean"])
        return tensors


@dataclass(frozen=True)
class ReferenceMedia:
    """A sample's reference pictures or clips, which some text encoders read together with its caption."""

    media: tuple[Media, ...]
    shape: VideoShape
    """The sample's shape, including its references' shapes."""
    start: float = 0.0

    @classmethod
    def from_bucketed_sample(cls, sample: BucketedSample) -> "ReferenceMedia":
        return cls(sample.clip.references, sample.shape, sample.start)


@dataclass(frozen=True)
class CacheEntryEncoder:
    """Creates a recipe's cache entries."""

    recipe: Recipe
    digests: Digests
    text_cache_key: Mapping[str, Any]
    latent_cache_key: Mapping[str, Any]
    supported_references: ReferenceSpec | None = None
    """The references that the checkpoint supports; None if it supports none."""
    has_masks: bool = field(default=False)
    """True if any source has masks: then every sample gets one, of ones if it has none of its own."""
    sound: SoundFormat | None = None
    """Format of the sound encoded with each clip; None if sound is not trained."""

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, encoders: Encoders, dtype: torch.dtype, digests: Digests
    ) -> "CacheEntryEncoder":
        def replace_paths_by_digests(facts: Mapping[str, Any]) -> dict[str, Any]:
            # A folder is replaced by the digest of its content: a moved checkpoint keeps its cache.
            components = {n: digests.hash_component(v) if isinstance(v, Path) else v for n, v in facts.items()}
            # The same files encode to other bits in another dtype.
            return components | {"dtype": str(dtype)}

        video_facts = {**encoders.latent_cache_key(), **VaeMemory.from_config(recipe.data).cache_key()}
        text_key = replace_paths_by_digests(encoders.text_cache_key())
        latent_key = replace_paths_by_digests(video_facts)
        has_masks = any(source.has_masks for source in recipe.data.all_sources)
        return cls(
            recipe, digests, text_key, latent_key, encoders.info.reference_spec, has_masks, encoders.sound_format
        )

    @property
    def has_references_in_text(self) -> bool:
        """True if captions are encoded together with their samples' references."""
        return self.supported_references is not None and self.supported_references.is_encoded_with_caption

    def make_text_job(self, caption: str, reference_media: ReferenceMedia | None = None) -> CacheJob:
        """The job that encodes a caption, with the references `reference_media` if the text encoder reads them.

        Raises `OSError` if a reference cannot be read.
        """
        facts = {**self.text_cache_key, "caption": caption}
        if reference_media is not None and self.has_references_in_text:
            # By content, so that renamed or moved references keep their entry.
            facts["references"] = [self.digests.hash_pixels(reference) for reference in reference_media.media]
            facts["start"], facts["shape"] = reference_media.start, str(reference_media.shape)

            def encode_caption_with_references(encoder: EditTextEncoder) -> Tensors:
                references = self._decode_references(reference_media)
                tensors = encoder.encode_with_references(caption, references, reference_media.shape)
                return {name: tensor[0] for name, tensor in tensors.items()}

            return CacheJob(f"caption {caption!r}", make_entry_key(facts), facts, encode_caption_with_references)

        def encode_one_caption(encoder: TextEncoder) -> Tensors:
            # One caption at a time: in a batch the last bits of the result would depend on its neighbours.
            return {name: tensor[0] for name, tensor in encoder([caption]).items()}

        return CacheJob(f"caption {caption!r}", make_entry_key(facts), facts, encode_one_caption)

    def _decode_references(self, reference_media: ReferenceMedia) -> tuple[torch.Tensor, ...]:
        assert self.supported_references is not None
        # Clips are read in the sample's shape, pictures at their own size.
        clip = reference_media.shape if self.supported_references.is_clip else None
        fps, start = self.recipe.data.fps, reference_media.start
        return tuple(read_reference(reference, clip, fps, start) for reference in reference_media.media)

    def make_video_job(self, sample: BucketedSample, *, mirrored: bool = False) -> CacheJob:
        """The job that encodes a sample. Raises `OSError` if its file cannot be read."""
        # Everything that changes the latents is in the key: no entry is ever stale, only unused.
        facts = {
            **self.latent_cache_key,
            **asdict(sample.shape),
            "fps": self.recipe.data.fps,
            "decode": DECODE_VERSION,
            "media": self.digests.hash_pixels(sample.clip.media),
        }
        # Omit unused options: keys from before the option existed must still match, so that old caches stay valid.
        if sample.start:
            facts["start"] = sample.start
        if sample.clip.image:
            facts["image"] = self.digests.hash_pixels(sample.clip.image)
        if sample.clip.references:
            facts["reference_files"] = [self.digests.hash_pixels(reference) for reference in sample.clip.references]
        else:
            del facts["references"]
        if self.has_masks:
            mask = sample.clip.mask
            facts["mask"] = [self.digests.hash_media(mask.media), mask.alpha] if mask else None
        if self.sound is not None:
            facts["sound"] = {"decode": SOUND_VERSION, **asdict(self.sound)}
        if mirrored:
            facts["mirrored"] = True

        def encode_sample_video(encoder: VideoEncoder) -> Tensors:
            return self.decode_sample(sample, mirrored=mirrored).encode_sample(encoder, sample.shape)

        return CacheJob(sample.id, make_entry_key(facts), facts, encode_sample_video)

    def decode_sample(self, sample: BucketedSample, *, mirrored: bool = False) -> DecodedSample:
        """Decode the sample's frames, image, references, mask and sound. Raises `ClipError` if it is unusable."""
        size = {"height": sample.shape.height, "width": sample.shape.width}
        video = read_frames(
            sample.clip.media, frames=sample.shape.frames, fps=self.recipe.data.fps, start=sample.start, **size
        )
        # Check decoded frames before encoding: a black clip would be cached as good.
        for finding in collect_frame_findings(video):
            if finding.verdict == "reject":
                raise ClipError(f"{sample.clip.media.name}: {finding.code}: {finding.message}")
        image_file = sample.clip.image
        # (1, 3, H, W) to (3, H, W).
        image = read_frames(image_file, frames=1, fps=None, **size)[0] if image_file else None
        references = (
            self._decode_references(ReferenceMedia.from_bucketed_sample(sample)) if sample.clip.references else ()
        )
        mask_file, mask = sample.clip.mask, None
        if self.has_masks and mask_file is not None:
            mask = read_mask(mask_file.media, alpha=mask_file.alpha, **size)
        elif self.has_masks:
            # Other samples have masks, and all samples of a batch need the same tensors.
            mask = torch.ones(sample.shape.height, sample.shape.width)
        if mirrored:
            video, references = video.flip(-1), tuple(reference.flip(-1) for reference in references)
            mask = None if mask is None else mask.flip(-1)
        sound, fps = None, self.recipe.data.fps
        if self.sound is not None:
            # Recipes with data.sound have data.fps.
            assert fps is not None
            frames = sample.shape.frames
            waveform = read_sound(sample.clip.media, self.sound, frames=frames, fps=fps, start=sample.start)
            sound = Sound(waveform, self.sound.rate)
        return DecodedSample(video, image, references, mask, sound)

    def make_silence(self, shape: VideoShape) -> Sound | None:
        """Silent audio as long as a sample of this shape; None if no sound is trained."""
        if self.sound is None or self.recipe.data.fps is None:
            return None
        samples = self.sound.count_samples(shape.frames, self.recipe.data.fps)
        # (channels, samples)
        return Sound(torch.zeros(self.sound.channels, samples), self.sound.rate)


AUDIT_FILE = "audit.jsonl"
"""The file in the cache folder with the results of `dit-lora audit`."""


@dataclass(frozen=True)
class PlannedSample:
    """One sample and the encoding jobs for its cache entries."""

    sample: BucketedSample
    video: CacheJob
    mirror: CacheJob | None
    text: CacheJob
    empty: CacheJob | None = None
    """The empty caption with the sample's references, if captions are encoded with them and an empty one is needed."""
    preserve: tuple[CacheJob, ...] = ()
    """The captions without the trigger, for `train.preserve`."""
    preserve_weight: float = 0.0
    """Factor of the preservation loss; 0 if the caption has no trigger."""

    @property
    def videos(self) -> tuple[CacheJob, ...]:
        return (self.video, self.mirror) if self.mirror else (self.video,)

    @property
    def entry(self) -> SampleCacheKeys:
        """What training keeps of the sample: its cache keys, its bucket and its weights."""
        sample = self.sample
        return SampleCacheKeys(
            id=sample.id,
            video_key=self.video.key,
            text_key=self.text.key,
            mirror_key=self.mirror.key if self.mirror else None,
            shape=sample.shape,
            times_per_epoch=sample.clip.times_per_epoch,
            loss_weight=sample.clip.loss_weight,
            empty_text_key=self.empty.key if self.empty else None,
            preserve_text_keys=tuple(job.key for job in self.preserve),
            preserve_weight=self.preserve_weight,
        )

    @property
    def texts(self) -> tuple[CacheJob, ...]:
        return (self.text, *([self.empty] if self.empty else []), *self.preserve)


class ValidationPrompt(NamedTuple):
    """Encoding jobs of a validation prompt and its negative prompt."""

    text: CacheJob
    negative: CacheJob
    """The empty prompt, for guidance."""


@dataclass(frozen=True)
class CachePlan:
    """A recipe's samples with their cache entries."""

    encoding: CacheEntryEncoder
    samples: RecipeSamples
    planned_samples: tuple[PlannedSample, ...]
    rejected: dict[str, str]
    """Samples that are known to be unusable without decoding, each with the reason."""
    empty: CacheJob
    """The empty caption for caption dropout; with the first sample's references if the text encoder reads them."""
    validation_prompts: tuple[ValidationPrompt, ...]
    """The validation prompts, encoded for the checkpoint that samples are generated with."""
    transformer_digest: str
    shares_text_encoder: bool = True
    """True if prompts use the same text encoder as captions."""

    @property
    def keys(self) -> tuple[set[str], set[str]]:
        """Cache keys of all clips and of all captions that the recipe uses."""
        videos = {job.key for planned in self.planned_samples for job in planned.videos}
        of_samples = (job for planned in self.planned_samples for job in planned.texts)
        return videos, {job.key for job in (self.empty, *self.prompt_jobs, *of_samples)}

    @property
    def prompt_jobs(self) -> tuple[CacheJob, ...]:
        """Encoding jobs of the validation prompts and their empty prompts."""
        return tuple(job for prompt in self.validation_prompts for job in prompt)


def make_cache_plan(
    recipe: Recipe,
    encoders: Encoders,
    dtype: torch.dtype,
    *,
    samples_per_step: int,
    quiet: bool,
    sampling_encoders: Encoders | None = None,
) -> CachePlan:
    """Read a recipe's sources, and files that have not been read before. Their digests are saved unless `quiet`.

    `sampling_encoders` are those of the checkpoint that samples are generated with, if it differs.
    """
    digests = Digests(recipe.cache_dir / "digests.json")
    encoding = CacheEntryEncoder.from_recipe(recipe, encoders, dtype, digests)
    transformer = compute_transformer_digest(encoders.info, recipe, digests)
    samples = find_samples(recipe, encoders.info, samples_per_step=samples_per_step, quiet=quiet)
    of_samples = (
        CacheEntryEncoder.from_recipe(recipe, sampling_encoders, dtype, digests) if sampling_encoders else encoding
    )
    # Prompts are encoded for the checkpoint that generates the samples, captions for the trained one.
    prompts = tuple(_plan_prompts(recipe, of_samples))
    rejected = dict(samples.rejected)
    planned: list[PlannedSample] = []
    for sample in make_progress_bar("reading files", "clip", quiet)(samples.usable):
        # Wait for a missing file: without it the sample would be missing for the whole run.
        folder = Path(sample.clip.media.location).parent
        planned.append(read_with_retry(partial(_plan_sample, encoding, sample), folder))
    preserve = recipe.train.preserve
    if preserve is not None and planned and not any(planned_sample.preserve_weight for planned_sample in planned):
        raise DitLoraError(
            f"train.preserve: none of {len(planned)} captions contains the trigger {preserve.trigger!r}; the "
            f"first is {planned[0].sample.clip.caption!r}. Set the trigger to words in the captions"
        )
    if not quiet:
        digests.save()
    # By content, not by name: a file that was repaired since is audited again.
    at_fault = find_rejected_files(recipe, samples.clips, digests, recipe.data, samples.shapes)
    # An audit rejects files; one file may be cut into several samples.
    windows: dict[str, list[str]] = {}
    for sample in samples.usable:
        windows.setdefault(sample.clip.id, []).append(sample.id)
    for file, reason in at_fault.items():
        rejected |= dict.fromkeys(windows.get(file, [file]), reason)
    first_references = ReferenceMedia.from_bucketed_sample(planned[0].sample) if planned else None
    # An equal text encoder gives equal keys, whichever checkpoint contains it.
    is_own = of_samples.make_text_job("").key == encoding.make_text_job("").key
    empty = encoding.make_text_job("", first_references)
    return CachePlan(encoding, samples, tuple(planned), rejected, empty, prompts, transformer, is_own)


def _plan_sample(encoding: CacheEntryEncoder, sample: BucketedSample) -> PlannedSample:
    """A sample with its encoding jobs. Raises `OSError` if one of its files cannot be read."""
    video = encoding.make_video_job(sample)
    mirror = encoding.make_video_job(sample, mirrored=True) if encoding.recipe.data.flip else None
    references = ReferenceMedia.from_bucketed_sample(sample)
    text, empty = encoding.make_text_job(sample.clip.caption, references), None
    # Otherwise all samples share the empty caption.
    needs_empty = encoding.recipe.data.caption_dropout > 0 or encoding.recipe.train.target == "guided"
    if encoding.has_references_in_text and needs_empty:
        empty = encoding.make_text_job("", references)
    return PlannedSample(sample, video, mirror, text, empty, *_plan_preserved_captions(encoding, sample))


def _plan_preserved_captions(
    encoding: CacheEntryEncoder, sample: BucketedSample
) -> tuple[tuple[CacheJob, ...], float]:
    """Encoding jobs of a sample's captions without the trigger word, and the factor of their loss."""
    preserve, caption = encoding.recipe.train.preserve, sample.clip.caption
    if preserve is None:
        return (), 0.0
    references = ReferenceMedia.from_bucketed_sample(sample)
    # Every sample of a batch needs such a caption, even if its loss does not count.
    if preserve.trigger not in caption:
        return (encoding.make_text_job(caption, references),), 0.0
    other_captions = preserve.replace_trigger(caption)
    return tuple(encoding.make_text_job(other, references) for other in other_captions), preserve.weight


def _plan_prompts(recipe: Recipe, encoding: CacheEntryEncoder) -> Iterator[ValidationPrompt]:
    """Yield the validation prompts, each with the empty prompt; both with the prompt's references if it has any."""
    # Without references the second list is empty, and `files` is None.
    for prompt, files in zip_longest(recipe.validation.prompts, recipe.validation.references):
        references = None
        if files:
            media = tuple(MediaFile(Path(file)) for file in files)
            references = ReferenceMedia(media, VideoShape.from_data(recipe.data))
        try:
            yield ValidationPrompt(encoding.make_text_job(prompt, references), encoding.make_text_job("", references))
        except OSError as error:
            raise DitLoraError(f"validation.references: {error.filename} cannot be read: {error.strerror}") from error


def compute_transformer_digest(info: CheckpointInfo, recipe: Recipe, digests: Digests) -> str:
    """Digest of the transformer's files, or of the settings of its random initialization."""
    scratch = recipe.model.from_scratch
    # A model without files is determined by its settings and the seed.
    if scratch is None:
        return digests.hash_component(info.path / info.part)
    return make_entry_key({"from_scratch": scratch, "seed": recipe.train.seed})


def find_rejected_files(
    recipe: Recipe,
    clips: Sequence[Clip],
    digests: Digests,
    data: DataConfig | None = None,
    shapes: Sequence[VideoShape] = (),
) -> dict[str, str]:
    """Clip files that `dit-lora audit` has rejected, each with the reason; decodes nothing."""
    memo = AuditMemo(recipe.cache_dir / AUDIT_FILE)
    if not memo:
        return {}
    rejected = {}
    for result in audit_from_stored_measurements(clips, data, memo=memo, digests=digests, shapes=shapes):
        # Warnings do not reject a file.
        reasons = [f"{f.code}: {f.message}" for f in result.findings if f.verdict == "reject"]
        if reasons:
            rejected[result.file] = f"{result.file}: {'; '.join(reasons)}"
    return rejected
