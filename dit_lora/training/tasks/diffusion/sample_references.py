"""References of samples: how many a model takes, and the shapes in which they are encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dit_lora.config.data import VideoShape
from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.clips import Clip
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo
from dit_lora.families.references import ReferenceSpec

ReadHeaders = Callable[[Sequence[Media]], list[VideoHeader | ClipError]]


@dataclass(frozen=True, slots=True)
class BucketedSample:
    """A clip, or one window of it, with the shape of its bucket."""

    id: str
    clip: Clip
    shape: VideoShape
    """The sample's shape, including its references' shapes."""
    start: float = 0.0
    """Seconds from the clip's first frame."""


def require_usable_references(info: CheckpointInfo, clips: Sequence[Clip]) -> None:
    """Raise `DitLoraError` if all data lack references that the model needs, or have some that it does not take."""
    supported = info.references
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
    samples: Sequence[BucketedSample], info: CheckpointInfo, read_headers: ReadHeaders
) -> tuple[tuple[BucketedSample, ...], dict[str, str]]:
    """Add the references' shapes to the samples; returns them, and the reasons for samples left out, by id.

    Sizes are read from headers; nothing is decoded.
    """
    supported = info.references
    if supported is None:
        return tuple(samples), {}
    # Each file once: several samples may share a reference.
    files = {reference.location: reference for sample in samples for reference in sample.clip.references}
    headers = dict(zip(files, read_headers(list(files.values())), strict=True))
    fitting, unfit = [], {}
    for sample in samples:
        own_headers = [(reference.name, headers[reference.location]) for reference in sample.clip.references]
        # The number is checked first; only then each file.
        problem = supported.count_error(len(own_headers)) or "; ".join(
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
