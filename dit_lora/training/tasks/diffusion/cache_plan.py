"""Plans a recipe's cache: each sample's entries and each caption's, before anything is encoded."""

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
from dit_lora.data.audit.runner import remembered
from dit_lora.data.cache.cache import entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import Job
from dit_lora.data.loading.encoded import Entry
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.clips import Clip
from dit_lora.data.storage import read_stored
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Encoders, Opened
from dit_lora.training.tasks.diffusion.cache_entries import Encoding, Shown
from dit_lora.training.tasks.diffusion.sample_references import BucketedSample
from dit_lora.training.tasks.diffusion.samples import Samples, bar, find_samples

AUDIT_MEMO = "audit.jsonl"
"""The file in the cache's folder that holds what `dit-lora audit` measured."""


@dataclass(frozen=True)
class PlannedSample:
    """One sample and the entries that it needs."""

    sample: BucketedSample
    video: Job
    mirror: Job | None
    text: Job
    empty: Job | None = None
    """The empty caption with the sample's own references, where captions are encoded with them and dropped."""
    preserve: tuple[Job, ...] = ()
    """The captions without the trigger, under `train.preserve`."""
    preserve_weight: float = 0.0
    """Factor of the loss on that caption; 0 for a caption that has no trigger."""

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
            sample.clip.times,
            sample.clip.loss_weight,
            self.empty.key if self.empty else None,
            tuple(job.key for job in self.preserve),
            self.preserve_weight,
        )

    @property
    def texts(self) -> tuple[Job, ...]:
        return (self.text, *([self.empty] if self.empty else []), *self.preserve)


class ShownPrompt(NamedTuple):
    """A validation prompt's jobs."""

    text: Job
    negative: Job
    """The empty prompt, for guidance."""


@dataclass(frozen=True)
class Plan:
    """A recipe's samples with their entries."""

    encoding: Encoding
    samples: Samples
    wanted: tuple[PlannedSample, ...]
    rejected: dict[str, str]
    """Samples that cannot be used, as far as is known without decoding, and why."""
    empty: Job
    """The empty caption, which dropout puts in place; of a model that sees references, with the first sample's."""
    shown: tuple[ShownPrompt, ...]
    """The validation prompts, for the checkpoint that samples are made with."""
    transformer_digest: str
    own_text_encoder: bool = True
    """True if prompts are encoded as captions are."""

    @property
    def keys(self) -> tuple[set[str], set[str]]:
        """Keys of all clips and of all captions that the recipe uses."""
        videos = {job.key for one in self.wanted for job in one.videos}
        of_samples = (job for one in self.wanted for job in one.texts)
        return videos, {job.key for job in (self.empty, *self.shown_texts, *of_samples)}

    @property
    def shown_texts(self) -> tuple[Job, ...]:
        """Jobs of validation prompts, and of the empty ones beside them."""
        return tuple(job for one in self.shown for job in one)


def make_plan(
    recipe: Recipe,
    checkpoint: Encoders,
    dtype: torch.dtype,
    *,
    group: int,
    quiet: bool,
    second: Encoders | None = None,
) -> Plan:
    """Read the sources, and the files that were not read before; remembers their digests unless `quiet`.

    `second` is the checkpoint that samples are made with, if it is another.
    """
    digests = Digests(recipe.cache_dir / "digests.json")
    encoding = Encoding.of(recipe, checkpoint, dtype, digests)
    transformer = transformer_digest(checkpoint, recipe, digests)
    samples = find_samples(recipe, checkpoint, group=group, quiet=quiet)
    of_samples = Encoding.of(recipe, second, dtype, digests) if second else encoding
    shown = tuple(_shown_prompts(recipe, of_samples))
    rejected = dict(samples.rejected)
    wanted: list[PlannedSample] = []
    for sample in bar("reading files", "clip", quiet)(samples.all):
        # A file that is away is waited for: left out, the sample would be missing in the whole run.
        folder = Path(sample.clip.media.place).parent
        wanted.append(read_stored(partial(_planned, encoding, sample), folder))
    _require_triggers(recipe, wanted)
    if not quiet:
        digests.save()
    # By content and not by name: a file that was mended since is judged anew.
    at_fault = audited(recipe, samples.clips, digests, recipe.data, samples.shapes)
    windows: dict[str, list[str]] = {}
    for sample in samples.all:
        windows.setdefault(sample.clip.id, []).append(sample.id)
    for file, words in at_fault.items():
        rejected |= dict.fromkeys(windows.get(file, [file]), words)
    first = Shown.of(wanted[0].sample) if wanted else None
    # An equal text encoder gives equal keys, in whichever checkpoint it lies.
    is_own = of_samples.text("").key == encoding.text("").key
    empty = encoding.text("", first)
    return Plan(encoding, samples, tuple(wanted), rejected, empty, shown, transformer, is_own)


def _planned(encoding: Encoding, sample: BucketedSample) -> PlannedSample:
    """Return a sample with its jobs. Raises `OSError` if one of its files cannot be read."""
    video = encoding.video(sample)
    mirror = encoding.video(sample, mirrored=True) if encoding.recipe.data.flip else None
    texts = _texts(encoding, sample)
    return PlannedSample(sample, video, mirror, *texts, *_preserved(encoding, sample))


def _texts(encoding: Encoding, sample: BucketedSample) -> tuple[Job, Job | None]:
    """Return a sample's caption, and what dropout puts in its place where that is not the same for all."""
    shown = Shown.of(sample)
    text = encoding.text(sample.clip.caption, shown)
    if encoding.texts_see_references and encoding.recipe.data.caption_dropout > 0:
        return text, encoding.text("", shown)
    return text, None


def _preserved(encoding: Encoding, sample: BucketedSample) -> tuple[tuple[Job, ...], float]:
    """Return a sample's captions without the trigger, and the factor of the loss on them."""
    preserve, caption = encoding.recipe.train.preserve, sample.clip.caption
    if preserve is None:
        return (), 0.0
    if preserve.trigger not in caption:  # a batch has such a caption for each sample
        return (encoding.text(caption, Shown.of(sample)),), 0.0
    shown = Shown.of(sample)
    jobs = tuple(encoding.text(one, shown) for one in preserve.without_trigger(caption))
    return jobs, preserve.weight


def _require_triggers(recipe: Recipe, wanted: Sequence[PlannedSample]) -> None:
    preserve = recipe.train.preserve
    if preserve is not None and wanted and not any(one.preserve_weight for one in wanted):
        raise DitLoraError(
            f"train.preserve: none of {len(wanted)} captions has the trigger {preserve.trigger!r} in it, as in "
            f"{wanted[0].sample.clip.caption!r}; name the words that captions have"
        )


def _shown_prompts(recipe: Recipe, encoding: Encoding) -> Iterator[ShownPrompt]:
    """Yield validation's prompts, each with the empty one: of a model that sees references, with the same ones."""
    for prompt, files in zip_longest(recipe.validation.prompts, recipe.validation.references):
        shown = None
        if files:
            media = tuple(MediaFile(Path(file)) for file in files)
            shown = Shown(media, VideoShape.of(recipe.data))
        try:
            yield ShownPrompt(encoding.text(prompt, shown), encoding.text("", shown))
        except OSError as error:
            raise DitLoraError(
                f"validation.references: {error.filename} cannot be read: {error.strerror}"
            ) from error


def transformer_digest(checkpoint: Opened, recipe: Recipe, digests: Digests) -> str:
    """Return the digest of the transformer's files, or of what it is drawn from."""
    scratch = recipe.model.from_scratch
    if scratch is None:
        return digests.component(checkpoint.path / checkpoint.part)
    return entry_key({"from_scratch": scratch, "seed": recipe.train.seed})


def audited(
    recipe: Recipe,
    clips: Sequence[Clip],
    digests: Digests,
    data: DataConfig | None = None,
    shapes: Sequence[VideoShape] = (),
) -> dict[str, str]:
    """Return what `dit-lora audit` rejected of these clips' files, by file, with the reason; decodes nothing."""
    memo = AuditMemo(recipe.cache_dir / AUDIT_MEMO)
    if not memo:
        return {}
    rejected = {}
    for one in remembered(clips, data, memo=memo, digests=digests, shapes=shapes):
        reasons = [f"{f.code}: {f.words}" for f in one.findings if f.verdict == "reject"]
        if reasons:
            rejected[one.file] = f"{one.file}: {'; '.join(reasons)}"
    return rejected
