"""Plans a recipe's cache: each sample's entries and each caption's, before anything is encoded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.runner import remembered
from dit_lora.data.cache.cache import entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.cache.fill import Job
from dit_lora.data.loading.encoded import Entry
from dit_lora.data.sources.clips import Clip
from dit_lora.families.base import Encoders, Opened
from dit_lora.training.tasks.diffusion.cache_entries import Encoding
from dit_lora.training.tasks.diffusion.samples import BucketedSample, Samples, bar, find_samples

AUDIT_MEMO = "audit.jsonl"
"""The file in the cache's folder that holds what `dit-lora audit` measured."""


@dataclass(frozen=True)
class PlannedSample:
    """One sample and the entries that it needs."""

    sample: BucketedSample
    video: Job
    mirror: Job | None
    text: Job

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
        )


@dataclass(frozen=True)
class Plan:
    """A recipe's samples with their entries."""

    encoding: Encoding
    samples: Samples
    wanted: tuple[PlannedSample, ...]
    rejected: dict[str, str]
    """Samples that cannot be used, as far as is known without decoding, and why."""
    texts: dict[str, Job]
    """Jobs by caption: all samples' captions, and the empty one."""
    shown: dict[str, Job]
    """Jobs by validation prompt, and the empty one, for the checkpoint that samples are made with."""
    transformer_digest: str

    @property
    def keys(self) -> tuple[set[str], set[str]]:
        """Keys of all clips and of all captions that the recipe uses."""
        videos = {job.key for one in self.wanted for job in one.videos}
        return videos, {job.key for job in (*self.texts.values(), *self.shown.values())}


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
    # The empty caption is what caption dropout trains on and guidance samples with. An equal text encoder gives equal
    # keys, in whichever checkpoint it lies.
    texts = {"": encoding.text("")}
    of_samples = Encoding.of(recipe, second, dtype, digests) if second else encoding
    shown = {text: of_samples.text(text) for text in ("", *recipe.validation.prompts)}
    rejected = dict(samples.rejected)
    wanted: list[PlannedSample] = []
    for sample in bar("reading files", "clip", quiet)(samples.all):
        try:
            video = encoding.video(sample)
            mirror = encoding.video(sample, mirrored=True) if recipe.data.flip else None
        except OSError as error:
            rejected[sample.id] = f"cannot be read: {error.strerror or error}"
            continue
        caption = sample.clip.caption
        if caption not in texts:
            texts[caption] = encoding.text(caption)
        wanted.append(PlannedSample(sample, video, mirror, texts[caption]))
    if not quiet:
        digests.save()
    # By content and not by name: a file that was mended since is judged anew.
    at_fault = audited(recipe, samples.clips, digests, recipe.data, samples.shapes)
    windows: dict[str, list[str]] = {}
    for sample in samples.all:
        windows.setdefault(sample.clip.id, []).append(sample.id)
    for file, words in at_fault.items():
        rejected |= dict.fromkeys(windows.get(file, [file]), words)
    return Plan(encoding, samples, tuple(wanted), rejected, texts, shown, transformer)


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
