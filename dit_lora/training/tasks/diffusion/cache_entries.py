"""Creates the cache entry of a sample or a caption, and the metadata that its key depends on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.judge import collect_frame_findings
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import Job
from dit_lora.data.media.clip_sound import SOUND_VERSION, read_sound
from dit_lora.data.media.media import Media
from dit_lora.data.media.references import read_mask, read_reference
from dit_lora.data.media.sound import Sound, SoundFormat
from dit_lora.data.media.video import DECODE_VERSION, ClipError, read_frames
from dit_lora.families.base import Encoders, Tensors, TextEncoder, VideoEncoder
from dit_lora.families.latents import LOSS_MASK, VaeMemory, downscale_mask
from dit_lora.families.references import EditTextEncoder, ReferenceEncoder, ReferenceSpec
from dit_lora.families.sound import SoundEncoder
from dit_lora.training.tasks.diffusion.sample_references import BucketedSample


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

    def encode(self, encoder: VideoEncoder, shape: VideoShape) -> Tensors:
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
    def from_sample(cls, sample: BucketedSample) -> "ReferenceMedia":
        return cls(sample.clip.references, sample.shape, sample.start)


@dataclass(frozen=True)
class Encoding:
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
    def from_recipe(cls, recipe: Recipe, encoders: Encoders, dtype: torch.dtype, digests: Digests) -> "Encoding":
        def replace_by_digests(facts: Mapping[str, Any]) -> dict[str, Any]:
            # A folder is replaced by the digest of its content: a moved checkpoint keeps its cache.
            components = {n: digests.hash_component(v) if isinstance(v, Path) else v for n, v in facts.items()}
            # The same files encode to other bits in another dtype.
            return components | {"dtype": str(dtype)}

        video_facts = {**encoders.latent_cache_key(), **VaeMemory.from_config(recipe.data).cache_key()}
        text_key = replace_by_digests(encoders.text_cache_key())
        latent_key = replace_by_digests(video_facts)
        has_masks = any(source.has_masks for source in recipe.data.all_sources)
        return cls(recipe, digests, text_key, latent_key, encoders.info.references, has_masks, encoders.sound_format)

    @property
    def has_references_in_text(self) -> bool:
        """True if captions are encoded together with their samples' references."""
        return self.supported_references is not None and self.supported_references.is_encoded_with_caption

    def make_text_job(self, caption: str, reference_media: ReferenceMedia | None = None) -> Job:
        """The job that encodes a caption, with the references `reference_media` if the text encoder reads them.

        Raises `OSError` if a reference cannot be read.
        """
        facts = {**self.text_cache_key, "caption": caption}
        if reference_media is not None and self.has_references_in_text:
            # By content, so that renamed or moved references keep their entry.
            facts["references"] = [self.digests.hash_pixels(reference) for reference in reference_media.media]
            facts["start"], facts["shape"] = reference_media.start, str(reference_media.shape)

            def make_with_references(encoder: EditTextEncoder) -> Tensors:
                references = self._decode_references(reference_media)
                tensors = encoder.encode_with_references(caption, references, reference_media.shape)
                return {name: tensor[0] for name, tensor in tensors.items()}

            return Job(f"caption {caption!r}", make_entry_key(facts), facts, make_with_references)

        def make(encoder: TextEncoder) -> Tensors:
            # One caption at a time: in a batch the last bits of the result would depend on its neighbours.
            return {name: tensor[0] for name, tensor in encoder([caption]).items()}

        return Job(f"caption {caption!r}", make_entry_key(facts), facts, make)

    def _decode_references(self, reference_media: ReferenceMedia) -> tuple[torch.Tensor, ...]:
        assert self.supported_references is not None
        # Clips are read in the sample's shape, pictures at their own size.
        clip = reference_media.shape if self.supported_references.is_clip else None
        fps, start = self.recipe.data.fps, reference_media.start
        return tuple(read_reference(reference, clip, fps, start) for reference in reference_media.media)

    def make_video_job(self, sample: BucketedSample, *, mirrored: bool = False) -> Job:
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

        def make(encoder: VideoEncoder) -> Tensors:
            return self.decode(sample, mirrored=mirrored).encode(encoder, sample.shape)

        return Job(sample.id, make_entry_key(facts), facts, make)

    def decode(self, sample: BucketedSample, *, mirrored: bool = False) -> DecodedSample:
        """Decode the sample's frames, image, references, mask and sound. Raises `ClipError` if it is unusable."""
        size = {"height": sample.shape.height, "width": sample.shape.width}
        video = read_frames(
            sample.clip.media, frames=sample.shape.frames, fps=self.recipe.data.fps, start=sample.start, **size
        )
        # Check decoded frames before encoding: a black clip would be cached as good.
        for finding in collect_frame_findings(video):
            if finding.verdict == "reject":
                raise ClipError(f"{sample.clip.media.name}: {finding.code}: {finding.words}")
        image_file = sample.clip.image
        # (1, 3, H, W) to (3, H, W).
        image = read_frames(image_file, frames=1, fps=None, **size)[0] if image_file else None
        references = self._decode_references(ReferenceMedia.from_sample(sample)) if sample.clip.references else ()
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
