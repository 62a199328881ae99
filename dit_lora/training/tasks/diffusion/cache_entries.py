"""Makes the cache entry of a sample or a caption, and the facts that its key depends on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.judge import judge_frames
from dit_lora.data.cache.cache import entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import Job
from dit_lora.data.media.video import DECODE_VERSION, ClipError, read_frames
from dit_lora.families.base import Encoders, Tensors, TextEncoder, VideoEncoder
from dit_lora.families.vae_memory import VaeMemory
from dit_lora.training.tasks.diffusion.samples import BucketedSample


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample, as `VideoEncoder` takes it."""

    video: torch.Tensor
    """Frames, uint8 (F, 3, H, W)."""
    image: torch.Tensor | None
    """The sample's own first image, uint8 (3, H, W); None where it has none."""


@dataclass(frozen=True)
class Encoding:
    """Makes a recipe's cache entries."""

    recipe: Recipe
    digests: Digests
    text_facts: Mapping[str, Any]
    video_facts: Mapping[str, Any]

    @classmethod
    def of(
        cls, recipe: Recipe, checkpoint: Encoders, dtype: torch.dtype, digests: Digests
    ) -> "Encoding":
        def resolved(facts: Mapping[str, Any]) -> dict[str, Any]:
            """Replace folders by digests of their contents, and add the dtype of encoding: it is a fact too."""
            components = {
                name: digests.component(value) if isinstance(value, Path) else value
                for name, value in facts.items()
            }
            return components | {"dtype": str(dtype)}

        video_facts = {**checkpoint.video_facts(), **VaeMemory.of(recipe.data).facts()}
        return cls(recipe, digests, resolved(checkpoint.text_facts()), resolved(video_facts))

    def text(self, caption: str) -> Job:
        facts = {**self.text_facts, "caption": caption}

        def make(encode: TextEncoder) -> Tensors:
            # One at a time: in a batch, the result would depend on its neighbours in the last bits.
            return {name: tensor[0] for name, tensor in encode([caption]).items()}

        return Job(f"caption {caption!r}", entry_key(facts), facts, make)

    def video(self, sample: BucketedSample, *, mirrored: bool = False) -> Job:
        """Return the job that encodes a sample. Raises `OSError` if its file cannot be read."""
        # Everything that changes the latents is in the key: no entry is ever stale, only unused.
        facts = {
            **self.video_facts,
            **asdict(sample.shape),
            "fps": self.recipe.data.fps,
            "decode": DECODE_VERSION,
            "media": self.digests.media(sample.clip.media),
        }
        # Keys of samples that do without an option are those from before it was offered: old caches stay good.
        if sample.start:
            facts["start"] = sample.start
        if sample.clip.image:
            facts["image"] = self.digests.media(sample.clip.image)
        if mirrored:
            facts["mirrored"] = True

        def make(encode: VideoEncoder) -> Tensors:
            pixels = self.decode(sample, mirrored=mirrored)
            return encode(pixels.video, pixels.image)

        return Job(sample.id, entry_key(facts), facts, make)

    def decode(self, sample: BucketedSample, *, mirrored: bool = False) -> DecodedSample:
        """Return the sample's frames and first image; raises `ClipError` if nothing can be learned from them."""
        size = {"height": sample.shape.height, "width": sample.shape.width}
        video = read_frames(
            sample.clip.media,
            frames=sample.shape.frames,
            fps=self.recipe.data.fps,
            start=sample.start,
            **size,
        )
        # On decoded frames, before encoding: a black clip would be cached as good.
        for finding in judge_frames(video):
            if finding.verdict == "reject":
                raise ClipError(f"{sample.clip.media.name}: {finding.code}: {finding.words}")
        image_file = sample.clip.image
        image = read_frames(image_file, frames=1, fps=None, **size)[0] if image_file else None
        return DecodedSample(video.flip(-1) if mirrored else video, image)
