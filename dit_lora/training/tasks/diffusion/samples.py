"""Finds a recipe's samples: clips in their buckets, cut into windows, with their references' shapes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.audit.judge import collect_media_findings
from dit_lora.data.audit.probe import probe_file
from dit_lora.data.buckets.buckets import BucketPlacement, DroppedClip, choose_bucket, list_buckets, make_window_id
from dit_lora.data.buckets.report import BucketReport, advise_on_references
from dit_lora.data.media.clip_sound import find_sound_problem
from dit_lora.data.media.headers import MediaHeaderCache
from dit_lora.data.media.media import Media
from dit_lora.data.media.pictures import find_mask_mismatch
from dit_lora.data.media.video import ClipError, explain_missing_frames
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.clips import Clip
from dit_lora.data.sources.held_out import scan_recipe
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo
from dit_lora.families.references import ReferenceSpec


@dataclass(frozen=True, slots=True)
class BucketedSample:
    """A clip, or one window of it, with the shape of its bucket."""

    id: str
    clip: Clip
    shape: VideoShape
    """The sample's shape, including its references' shapes."""
    start: float = 0.0
    """Seconds from the clip's first frame."""


@dataclass(frozen=True)
class RecipeSamples:
    """The samples of a recipe, and the ones it leaves out."""

    usable: tuple[BucketedSample, ...]
    """Samples to train on, and those of `validation.data`, whose clips have `is_held_out`."""
    rejected: Mapping[str, str]
    """Reasons why clips cannot be used, by id."""
    shapes: tuple[VideoShape, ...] = ()
    """The buckets, or the single shape."""
    clips: tuple[Clip, ...] = ()
    """All clips of the sources, including those left out."""
    report: BucketReport | None = None
    """The report on buckets; None without buckets and windows."""
    notes: tuple[str, ...] = field(default=())
    """Messages about files left out, buckets that the model does not support, and shapes of references."""


def find_samples(recipe: Recipe, info: CheckpointInfo, *, samples_per_step: int, quiet: bool) -> RecipeSamples:
    """Read the sources, and headers if shapes depend on them; decodes nothing.

    With a single shape, headers are left to `find_header_problems`.
    """
    data = recipe.data
    sources = scan_recipe(recipe)
    rejected = {problem.file: problem.message for problem in sources.problems}
    clips = [clip for clip in sources.clips if data.classes is None or clip.caption in data.classes]
    table = ", ".join(data.classes or ())
    # For class-conditional models the caption is the name of the class.
    rejected |= {
        clip.id: f"its class {clip.caption!r} is not in data.classes: {table}"
        for clip in sources.clips
        if data.classes is not None and clip.caption not in data.classes
    }
    require_usable_references(info, clips)
    # A single shape needs no headers: these are read later, and only for files that are not cached.
    if data.buckets is None and data.windows == 1:
        shape = VideoShape.from_data(data)
        plain_samples = [BucketedSample(clip.id, clip, shape) for clip in clips]
        fitting, unfit = add_reference_shapes(plain_samples, info, recipe, quiet=quiet)
        advice = advise_on_references(_list_trained_shapes(fitting), samples_per_step)
        lines = (*sources.notes, *advice)
        return RecipeSamples(fitting, rejected | unfit, (shape,), tuple(sources.clips), notes=lines)
    notes = list(sources.notes)
    shapes = list_buckets(data, info.size_multiple, info.unsupported_reason, notes.append)
    # Size and length, which choose the bucket, are in the header; decoding would take hours.
    read = read_headers([clip.media for clip in clips], recipe, quiet=quiet)
    placed: list[tuple[str, BucketPlacement | DroppedClip]] = []
    all_samples: list[BucketedSample] = []
    for clip, header in zip(clips, read, strict=True):
        if isinstance(header, ClipError):
            rejected[clip.id] = describe_read_error(clip.media, header)
            continue
        placement = choose_bucket(header, shapes, data)
        # The report is on what is trained on, and on everything that is left out.
        if isinstance(placement, DroppedClip) or not clip.is_held_out:
            placed.append((clip.id, placement))
        if isinstance(placement, DroppedClip):
            rejected[clip.id] = placement.words
            continue
        # One sample per window; a clip without windows has a single start.
        all_samples += [
            BucketedSample(make_window_id(clip.id, start), clip, placement.shape, start) for start in placement.starts
        ]
    # Also on what found no bucket.
    report = BucketReport.from_clips(placed, shapes, data, samples_per_step)
    fitting, unfit = add_reference_shapes(all_samples, info, recipe, quiet=quiet)
    notes += advise_on_references(_list_trained_shapes(fitting), samples_per_step)
    return RecipeSamples(fitting, rejected | unfit, shapes, tuple(sources.clips), report, tuple(notes))


def _list_trained_shapes(samples: Sequence[BucketedSample]) -> list[VideoShape]:
    return [sample.shape for sample in samples if not sample.clip.is_held_out]


def require_usable_references(info: CheckpointInfo, clips: Sequence[Clip]) -> None:
    """Raise `DitLoraError` if all data lack references that the model needs, or have some that it does not take."""
    supported = info.reference_spec
    with_some = [clip for clip in clips if clip.references]
    if supported is None and with_some:
        raise DitLoraError(
            f"{info.path.name} takes no references, and {len(with_some)} of {len(clips)} samples have "
            f"some, such as {with_some[0].id}; use a model that edits, or set data.reference_columns to [] to "
            "ignore them"
        )
    if supported is not None and supported.min_count and clips and not with_some:
        raise DitLoraError(
            f"{info.path.name} makes a picture from references, and no sample has any; give them in a column "
            "`references` of metadata.jsonl, in data.reference_columns, or in data.reference_folders"
        )


def add_reference_shapes(
    samples: Sequence[BucketedSample], info: CheckpointInfo, recipe: Recipe, *, quiet: bool
) -> tuple[tuple[BucketedSample, ...], dict[str, str]]:
    """Add the references' shapes to the samples; returns them, and the reasons for samples left out, by id.

    Sizes are read from headers; nothing is decoded.
    """
    supported = info.reference_spec
    if supported is None:
        return tuple(samples), {}
    # Each file once: several samples may share a reference.
    files = {reference.location: reference for sample in samples for reference in sample.clip.references}
    headers = dict(zip(files, read_headers(list(files.values()), recipe, quiet=quiet), strict=True))
    fitting, unfit = [], {}
    for sample in samples:
        own_headers = [(reference.name, headers[reference.location]) for reference in sample.clip.references]
        # The number is checked first; only then each file.
        problem = supported.reference_count_error(len(own_headers)) or "; ".join(
            message
            for name, header in own_headers
            if (message := _find_reference_problem(name, header, supported, sample.shape))
        )
        if problem:
            unfit[sample.id] = problem
            continue
        # Without a problem every header was read; the test is for the type checker.
        shapes = tuple(
            supported.encoded_shape(header.height, header.width, sample.shape)
            for _, header in own_headers
            if isinstance(header, VideoHeader)
        )
        fitting.append(replace(sample, shape=replace(sample.shape, references=shapes)))
    return tuple(fitting), unfit


def _find_reference_problem(
    name: str, header: VideoHeader | ClipError, supported: ReferenceSpec, shape: VideoShape
) -> str | None:
    if isinstance(header, ClipError):
        return f"its reference {name}: {header}"
    # The reference of a clip must be a clip too, if the model takes clips.
    if supported.is_clip and shape.frames > 1 and header.is_image:
        return f"its reference {name} is a picture, and that of a clip is a clip"
    refusal = supported.unsupported_reason(header.height, header.width)
    return f"its reference {name}: {refusal}" if refusal else None


def find_header_problems(samples: Sequence[BucketedSample], recipe: Recipe, *, quiet: bool) -> dict[str, str]:
    """Find samples that their files' headers show to be unusable; returns reasons by id."""
    data, unusable = recipe.data, dict[str, str]()
    masked: dict[str, tuple[Media, VideoHeader]] = {}
    headers = read_headers([sample.clip.media for sample in samples], recipe, quiet=quiet)
    for sample, header in zip(samples, headers, strict=True):
        if isinstance(header, ClipError):
            unusable[sample.id] = describe_read_error(sample.clip.media, header)
            continue
        if not header.is_image and data.fps is not None:
            short = explain_missing_frames(header, frames=sample.shape.frames, fps=data.fps, start=sample.start)
            if short:
                unusable[sample.id] = f"{sample.clip.media.name}: {short}"
                continue
        if data.sound:
            # Recipes with data.sound have data.fps.
            assert data.fps is not None
            deaf = find_sound_problem(header, frames=sample.shape.frames, fps=data.fps, start=sample.start)
            if deaf:
                unusable[sample.id] = f"{sample.clip.media.name}: {deaf}"
                continue
        # A mask in the alpha channel has the sample's own size; a separate file may have another.
        if sample.clip.mask is not None and not sample.clip.mask.alpha:
            masked[sample.id] = (sample.clip.mask.media, header)
    read = read_headers([media for media, _ in masked.values()], recipe, quiet=quiet)
    for (sample_id, (media, clip_header)), header in zip(masked.items(), read, strict=True):
        if isinstance(header, ClipError):
            unusable[sample_id] = f"its mask: {describe_read_error(media, header)}"
        elif problem := find_mask_mismatch((header.height, header.width), (clip_header.height, clip_header.width)):
            unusable[sample_id] = problem
    return unusable


def describe_read_error(media: Media, error: ClipError) -> str:
    """Reason why a media file cannot be opened, in the words of the audit, which knows more than FFmpeg's error."""
    rejects = [
        finding for finding in collect_media_findings(media, probe_file(media), None) if finding.verdict == "reject"
    ]
    if not rejects:
        return str(error)
    return f"{media.name}: " + "; ".join(f"{finding.code}: {finding.message}" for finding in rejects)


def read_headers(media: Sequence[Media], recipe: Recipe, *, quiet: bool) -> list[VideoHeader | ClipError]:
    """Each media file's header or error; cached in the cache folder unless `quiet`."""
    headers = MediaHeaderCache(recipe.cache_dir / "headers.json")
    results = headers.read(media, make_progress_bar("reading headers", "clip", quiet))
    if not quiet:
        headers.save()
    return results


def make_progress_bar(description: str, unit: str, quiet: bool) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A function that wraps an iterable in a progress bar with rate and time left."""
    return partial(ProgressBar, desc=description, unit=unit, disable=quiet, delay=1)
