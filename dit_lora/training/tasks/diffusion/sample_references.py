"""The references of samples: how many a model takes, and the shapes that they are encoded in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dit_lora.config.data import VideoShape
from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.clips import Clip
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Opened
from dit_lora.families.references import References

ReadHeaders = Callable[[Sequence[Media]], list[VideoHeader | ClipError]]


@dataclass(frozen=True, slots=True)
class BucketedSample:
    """A clip, or one window of it, in the shape of its bucket."""

    id: str
    clip: Clip
    shape: VideoShape
    """Its own shape, with those of its references."""
    start: float = 0.0
    """Seconds from the clip's first frame."""


def refuse_all(checkpoint: Opened, clips: Sequence[Clip]) -> None:
    """Raise `DitLoraError`, in one line, where the data and the model disagree about references altogether."""
    takes = checkpoint.references
    given = [clip for clip in clips if clip.references]
    if takes is None and given:
        raise DitLoraError(
            f"{checkpoint.path.name} takes no references, and {len(given)} of {len(clips)} samples have some, such as "
            f"{given[0].id}; take a model that edits, or set data.reference_columns to [] to leave them out"
        )
    if takes is not None and takes.least and clips and not given:
        raise DitLoraError(
            f"{checkpoint.path.name} makes a picture from references, and no sample has any; give them in a column "
            "`references` of metadata.jsonl, in data.reference_columns, or in data.reference_folders"
        )


def with_references(
    samples: Sequence[BucketedSample], checkpoint: Opened, read: ReadHeaders
) -> tuple[tuple[BucketedSample, ...], dict[str, str]]:
    """Return the samples with the shapes of their references, and why others are left out, by id.

    Sizes are read from headers; nothing is decoded.
    """
    takes = checkpoint.references
    if takes is None:
        return tuple(samples), {}
    files = {one.place: one for sample in samples for one in sample.clip.references}
    headers = dict(zip(files, read(list(files.values())), strict=True))
    found, unfit = [], {}
    for sample in samples:
        own = [(one.name, headers[one.place]) for one in sample.clip.references]
        wrong = takes.wrong_number(len(own)) or "; ".join(
            words for name, header in own if (words := _wrong(name, header, takes, sample.shape))
        )
        if wrong:
            unfit[sample.id] = wrong
            continue
        shapes = tuple(
            takes.shape(header.height, header.width, sample.shape)
            for _, header in own
            if isinstance(header, VideoHeader)
        )
        found.append(replace(sample, shape=replace(sample.shape, references=shapes)))
    return tuple(found), unfit


def _wrong(
    name: str, header: VideoHeader | ClipError, takes: References, shape: VideoShape
) -> str | None:
    if isinstance(header, ClipError):
        return f"its reference {name}: {header}"
    if takes.clips and shape.frames > 1 and header.is_image:
        return f"its reference {name} is a picture, and that of a clip is a clip"
    refusal = takes.refusal(header.height, header.width)
    return f"its reference {name}: {refusal}" if refusal else None
