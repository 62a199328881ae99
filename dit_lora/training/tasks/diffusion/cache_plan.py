"""Plans a recipe's cache: the entries of each sample and each caption, before anything is encoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.runner import audit_from_memo
from dit_lora.data.cache.cache import make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import Job
from dit_lora.data.loading.encoded import Entry
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.clips import Clip
from dit_lora.data.storage import read_with_retry
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo, Encoders
from dit_lora.training.tasks.diffusion.cache_entries import Encoding, ReferenceMedia
from dit_lora.training.tasks.diffusion.sample_references import BucketedSample
from dit_lora.training.tasks.diffusion.samples import Samples, find_samples, make_progress_bar

AUDIT_FILE = "audit.jsonl"
"""The file in the cache folder with the results of `dit-lora audit`."""


@dataclass(frozen=True)
class PlannedSample:
    """One sample and the encoding jobs for its cache entries."""

    sample: BucketedSample
    video: Job
    mirror: Job | None
    text: Job
    empty: Job | None = None
    """The empty caption with the sample's references, if captions are encoded with them and dropped; else None."""
    preserve: tuple[Job, ...] = ()
    """The captions without the trigger, for `train.preserve`."""
    preserve_weight: float = 0.0
    """Factor of the preservation loss; 0 if the caption has no trigger."""

    @property
    def videos(self) -> tuple[Job, ...]:
        return (self.video, self.mirror) if self.mirror else (self.video,)

    @property
    def entry(self) -> Entry:
        sample = self.sample
        return Entry(
            sample.id,
            self.video.key,
            self.text.key,
            self.mirror.key if self.mirror else None,
            sample.shape,
            sample.clip.times_per_epoch,
            sample.clip.loss_weight,
            self.empty.key if self.empty else None,
            tuple(job.key for job in self.preserve),
            self.preserve_weight,
        )

    @property
    def texts(self) -> tuple[Job, ...]:
        return (self.text, *([self.empty] if self.empty else []), *self.preserve)


class ValidationPrompt(NamedTuple):
    """Encoding jobs of a validation prompt and its negative prompt."""

    text: Job
    negative: Job
    """The empty prompt, for guidance."""


@dataclass(frozen=True)
class Plan:
    """A recipe's samples with their cache entries."""

    encoding: Encoding
    samples: Samples
    planned_samples: tuple[PlannedSample, ...]
    rejected: dict[str, str]
    """Samples that are known to be unusable without decoding, each with the reason."""
    empty: Job
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
    def prompt_jobs(self) -> tuple[Job, ...]:
        """Encoding jobs of the validation prompts and their empty prompts."""
        return tuple(job for prompt in self.validation_prompts for job in prompt)


def make_plan(
    recipe: Recipe,
    encoders: Encoders,
    dtype: torch.dtype,
    *,
    samples_per_step: int,
    quiet: bool,
    sampling_encoders: Encoders | None = None,
) -> Plan:
    """Read a recipe's sources, and files that have not been read before. Their digests are saved unless `quiet`.

    `sampling_encoders` are those of the checkpoint that samples are generated with, if it differs.
    """
    digests = Digests(recipe.cache_dir / "digests.json")
    encoding = Encoding.from_recipe(recipe, encoders, dtype, digests)
    transformer = compute_transformer_digest(encoders.info, recipe, digests)
    samples = find_samples(recipe, encoders.info, samples_per_step=samples_per_step, quiet=quiet)
    of_samples = Encoding.from_recipe(recipe, sampling_encoders, dtype, digests) if sampling_encoders else encoding
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
    first_references = ReferenceMedia.from_sample(planned[0].sample) if planned else None
    # An equal text encoder gives equal keys, whichever checkpoint contains it.
    is_own = of_samples.make_text_job("").key == encoding.make_text_job("").key
    empty = encoding.make_text_job("", first_references)
    return Plan(encoding, samples, tuple(planned), rejected, empty, prompts, transformer, is_own)


def _plan_sample(encoding: Encoding, sample: BucketedSample) -> PlannedSample:
    """A sample with its encoding jobs. Raises `OSError` if one of its files cannot be read."""
    video = encoding.make_video_job(sample)
    mirror = encoding.make_video_job(sample, mirrored=True) if encoding.recipe.data.flip else None
    references = ReferenceMedia.from_sample(sample)
    text, empty = encoding.make_text_job(sample.clip.caption, references), None
    # Otherwise all samples share the empty caption.
    if encoding.has_references_in_text and encoding.recipe.data.caption_dropout > 0:
        empty = encoding.make_text_job("", references)
    return PlannedSample(sample, video, mirror, text, empty, *_plan_preserved(encoding, sample))


def _plan_preserved(encoding: Encoding, sample: BucketedSample) -> tuple[tuple[Job, ...], float]:
    """Encoding jobs of a sample's captions without the trigger word, and the factor of their loss."""
    preserve, caption = encoding.recipe.train.preserve, sample.clip.caption
    if preserve is None:
        return (), 0.0
    references = ReferenceMedia.from_sample(sample)
    # Every sample of a batch needs such a caption, even if its loss does not count.
    if preserve.trigger not in caption:
        return (encoding.make_text_job(caption, references),), 0.0
    other_captions = preserve.replace_trigger(caption)
    return tuple(encoding.make_text_job(other, references) for other in other_captions), preserve.weight


def _plan_prompts(recipe: Recipe, encoding: Encoding) -> Iterator[ValidationPrompt]:
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
    for result in audit_from_memo(clips, data, memo=memo, digests=digests, shapes=shapes):
        # Warnings do not reject a file.
        reasons = [f"{f.code}: {f.words}" for f in result.findings if f.verdict == "reject"]
        if reasons:
            rejected[result.file] = f"{result.file}: {'; '.join(reasons)}"
    return rejected
