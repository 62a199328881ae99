"""Clips with their captions, and the problems met while reading a source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dit_lora.data.media.media import Media
from dit_lora.data.sources.caption_text import Fault, find_caption_fault

REFERENCE, MASK = "reference", "mask"
"""Names of a sample's additional files, used in messages and as the beginning of codes such as `mask_missing`."""

MediaT = TypeVar("MediaT")


@dataclass(frozen=True)
class LossMask:
    """Loss mask of a sample: the grey values of a picture, or its alpha channel."""

    media: Media
    alpha: bool = False


@dataclass(frozen=True)
class Clip:
    """One training sample: a video or image with its caption. `id` is its path below the data folder."""

    id: str
    media: Media
    caption: str
    """Text that describes the clip; with one folder per class, the class name."""
    image: Media | None = None
    """The clip's first image, if the data has a separate one."""
    references: tuple[Media, ...] = ()
    """Pictures or clips that the model receives as input for this sample, in order."""
    mask: LossMask | None = None
    """The part of the picture that is trained on; None for all of it."""
    times_per_epoch: float = 1.0
    """Number of times that the clip is used in an epoch: 2.5 means twice, and a third time in half of the epochs."""
    loss_weight: float = 1.0
    """Factor by which the clip's loss is multiplied."""
    is_held_out: bool = False
    """True if the clip is never trained on: the validation loss is measured on it (`validation.data`)."""


@dataclass(frozen=True)
class ClipProblem:
    """One reason why a sample cannot be used."""

    file: str
    """Id of the sample, or name of the faulty table or tar."""
    code: str
    """Code of the audit, such as `missing` or `caption_empty`."""
    message: str


class DataScan(NamedTuple):
    """Clips of the data sources, problems of others, and notes."""

    clips: list[Clip]
    """Clips without a problem."""
    problems: list[ClipProblem]
    notes: tuple[str, ...] = ()
    """Lines about files that are left out, and about how names were interpreted."""


class SampleCollector:
    """Collects the clips and problems of one data source."""

    def __init__(self, caption: str | None) -> None:
        self._source_caption = caption
        self._clips: dict[str, Clip] = {}
        self._problems: dict[tuple[str, str], ClipProblem] = {}
        self._rejected_ids: set[str] = set()

    def add(
        self,
        id: str,
        media: Media,
        caption: object,
        *,
        image: Media | None = None,
        references: Sequence[Media] = (),
        mask: LossMask | None = None,
        times_per_epoch: float = 1.0,
        missing_caption_fault: Fault = ("caption_missing", "it has no caption"),
    ) -> None:
        """Add one sample to a source's clips; it becomes a problem if its id exists or its caption is unusable.

        The source's `caption` replaces every other caption. `missing_caption_fault` is the code and message used if
        `caption` is None.
        """
        # A second entry with this id is a problem of the sample; the last one is stored.
        if id in self._clips:
            self.add_problem(id, "duplicate_clip", "listed twice")
        text = self._source_caption
        if text is None and isinstance(caption, str | int | float):
            # Labels may be numbers.
            text = str(caption).strip()
        if text is not None:
            fault = find_caption_fault(text)
        elif caption is None:
            fault = missing_caption_fault
        else:
            fault = ("caption_not_text", f"its caption is of type {type(caption).__name__}, not text")
        if fault is not None:
            self.add_problem(id, *fault)
        # Store refused clips too, so that a second one with the same id is noticed; `build_scan` leaves them out.
        self._clips[id] = Clip(id, media, text or "", image, tuple(references), mask, times_per_epoch)

    def add_problem(self, file: str, code: str, message: str) -> None:
        """Add a problem of a file, once per code; the sample with this id is left out of the clips."""
        self._rejected_ids.add(file)
        self._problems.setdefault((file, code), ClipProblem(file, code, message))

    def add_problems(self, file: str, faults: Sequence[Fault]) -> None:
        """Add problems of a file; those with the same code are merged, since a sample has one problem per code."""
        for fault in merge_faults_by_code(faults):
            self.add_problem(file, *fault)

    def build_scan(self, notes: Sequence[str] = ()) -> DataScan:
        """The collected clips and problems in the order in which they were added, with these notes."""
        clips = [clip for clip_id, clip in self._clips.items() if clip_id not in self._rejected_ids]
        return DataScan(clips, list(self._problems.values()), tuple(notes))


def remove_empty_references(cells: Sequence[MediaT | None], faults: list[Fault]) -> list[MediaT]:
    """Remove empty cells at the end of a sample's references; adds to its faults if an earlier one is empty.

    Models identify references by their order, which an empty cell would shift.
    """
    references = [reference for reference in cells if reference is not None]
    # Index of the first empty cell; the number of references if there is none.
    empty = next((index for index, reference in enumerate(cells) if reference is None), len(references))
    # A missing or unreadable file leaves a gap too, but is already reported.
    if empty < len(references) and not faults:
        faults.append((f"{REFERENCE}_missing", f"its reference {empty + 1} is empty, and others follow"))
    return references


def merge_faults_by_code(faults: Sequence[Fault]) -> list[Fault]:
    """Merge faults with the same code, since a sample has at most one problem per code."""
    messages: dict[str, list[str]] = {}
    for code, message in faults:
        messages.setdefault(code, []).append(message)
    return [(code, "; ".join(texts)) for code, texts in messages.items()]
