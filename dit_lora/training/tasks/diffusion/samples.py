"""Finds the samples of a recipe: clips in their buckets, cut into windows, without those that cannot be used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tqdm import tqdm

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.judge import judge
from dit_lora.data.audit.probe import probe
from dit_lora.data.buckets.buckets import Dropped, Placed, buckets_of, place, window_id
from dit_lora.data.buckets.report import BucketReport, advice_on_references
from dit_lora.data.media.clip_sound import unusable_sound
from dit_lora.data.media.headers import Headers
from dit_lora.data.media.media import Media
from dit_lora.data.media.references import wrong_mask
from dit_lora.data.media.video import ClipError, too_short
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.scan import Clip, scan
from dit_lora.families.base import Opened
from dit_lora.training.tasks.diffusion.sample_references import (
    BucketedSample,
    refuse_all,
    with_references,
)


@dataclass(frozen=True)
class Samples:
    """The samples of a recipe, and what it leaves out."""

    all: tuple[BucketedSample, ...]
    rejected: Mapping[str, str]
    """Reasons why clips cannot be used, by their ids."""
    shapes: tuple[VideoShape, ...] = ()
    """The buckets, or the one shape."""
    clips: tuple[Clip, ...] = ()
    """All clips of the sources, those left out too."""
    report: BucketReport | None = None
    """The report on buckets; None where there are neither buckets nor windows."""
    notes: tuple[str, ...] = field(default=())
    """Lines on files that are left out, buckets that the model cannot take, and shapes of references."""


def find_samples(recipe: Recipe, checkpoint: Opened, *, group: int, quiet: bool) -> Samples:
    """Read the sources, and headers where shapes depend on them; nothing is decoded.

    `group` is the number of samples of a step. With one shape, headers are left to `check_headers`.
    """
    data = recipe.data
    sources = scan(data, recipe.cache_dir)
    rejected = {one.file: one.words for one in sources.problems}
    clips = [clip for clip in sources.clips if data.classes is None or clip.caption in data.classes]
    table = ", ".join(data.classes or ())
    rejected |= {
        clip.id: f"its class {clip.caption!r} is not one of data.classes: {table}"
        for clip in sources.clips
        if data.classes is not None and clip.caption not in data.classes
    }
    refuse_all(checkpoint, clips)
    # One shape needs no header of a file: those are read later, and only of what is not cached.
    if data.buckets is None and data.windows == 1:
        shape = VideoShape.of(data)
        alone = [BucketedSample(clip.id, clip, shape) for clip in clips]
        found, unfit = with_references(alone, checkpoint, _reader(recipe, quiet))
        advice = advice_on_references([one.shape for one in found], group)
        clips_found = tuple(sources.clips)
        lines = (*sources.notes, *advice)
        return Samples(found, rejected | unfit, (shape,), clips_found, notes=lines)
    notes = list(sources.notes)
    shapes = buckets_of(data, checkpoint.side_step, checkpoint.refusal, notes.append)
    # A bucket is chosen by size and length, which headers have; decoding would take hours.
    read = read_headers([clip.media for clip in clips], recipe, quiet=quiet)
    placed: list[tuple[str, Placed | Dropped]] = []
    all_samples: list[BucketedSample] = []
    for clip, header in zip(clips, read, strict=True):
        if isinstance(header, ClipError):
            rejected[clip.id] = in_words(clip.media, header)
            continue
        where = place(header, shapes, data)
        placed.append((clip.id, where))
        if isinstance(where, Dropped):
            rejected[clip.id] = where.words
            continue
        all_samples += [
            BucketedSample(window_id(clip.id, start), clip, where.shape, start)
            for start in where.starts
        ]
    report = BucketReport.of(placed, shapes, data, group)
    found, unfit = with_references(all_samples, checkpoint, _reader(recipe, quiet))
    notes += advice_on_references([one.shape for one in found], group)
    clips_found = tuple(sources.clips)
    return Samples(found, rejected | unfit, shapes, clips_found, report, tuple(notes))


def _reader(
    recipe: Recipe, quiet: bool
) -> Callable[[Sequence[Media]], list[VideoHeader | ClipError]]:
    return lambda media: read_headers(media, recipe, quiet=quiet)


def check_headers(
    samples: Sequence[BucketedSample], recipe: Recipe, *, quiet: bool
) -> dict[str, str]:
    """Return which samples surely cannot be used, by what their files say of themselves, and why."""
    data, unusable = recipe.data, dict[str, str]()
    masked: dict[str, tuple[Media, VideoHeader]] = {}
    headers = read_headers([sample.clip.media for sample in samples], recipe, quiet=quiet)
    for sample, header in zip(samples, headers, strict=True):
        if isinstance(header, ClipError):
            unusable[sample.id] = in_words(sample.clip.media, header)
            continue
        if not header.is_image and data.fps is not None:
            frames, start = sample.shape.frames, sample.start
            short = too_short(header, frames=frames, fps=data.fps, start=start)
            if short:
                unusable[sample.id] = f"{sample.clip.media.name}: {short}"
                continue
        if data.sound:
            deaf = _without_sound(sample, header, data)
            if deaf:
                unusable[sample.id] = f"{sample.clip.media.name}: {deaf}"
                continue
        if sample.clip.mask is not None and not sample.clip.mask.alpha:
            masked[sample.id] = (sample.clip.mask.media, header)
    read = read_headers([media for media, _ in masked.values()], recipe, quiet=quiet)
    for (sample_id, (media, own)), header in zip(masked.items(), read, strict=True):
        if isinstance(header, ClipError):
            unusable[sample_id] = f"its mask: {in_words(media, header)}"
        elif wrong := wrong_mask((header.height, header.width), (own.height, own.width)):
            unusable[sample_id] = wrong
    return unusable


def _without_sound(sample: BucketedSample, header: VideoHeader, data: DataConfig) -> str | None:
    assert data.fps is not None  # data.sound needs it
    return unusable_sound(header, frames=sample.shape.frames, fps=data.fps, start=sample.start)


def in_words(media: Media, error: ClipError) -> str:
    """Return why a file cannot be opened, as the audit says it, which knows more than FFmpeg's word."""
    rejects = [one for one in judge(media, probe(media), None) if one.verdict == "reject"]
    if not rejects:
        return str(error)
    return f"{media.name}: " + "; ".join(f"{one.code}: {one.words}" for one in rejects)


def read_headers(
    media: Sequence[Media], recipe: Recipe, *, quiet: bool
) -> list[VideoHeader | ClipError]:
    """Return each file's header or what is wrong with it; remembered in the cache's folder unless `quiet`."""
    headers = Headers(recipe.cache_dir / "headers.json")
    results = headers.read(media, bar("reading headers", "clip", quiet))
    if not quiet:
        headers.save()
    return results


def bar(what: str, unit: str, quiet: bool) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """Return a function that puts a progress bar with rate and time left around an iterable."""
    return partial(tqdm, desc=what, unit=unit, disable=quiet, delay=1, dynamic_ncols=True)
