"""Clips with their captions: the result of reading a source, with its problems."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dit_lora.data.media.media import Media
from dit_lora.data.sources.caption_text import Fault, caption_fault

REFERENCE, MASK = "reference", "mask"
"""Names of what a sample has beside its own media, in messages and, with `_missing` behind it, in codes."""

Held = TypeVar("Held")


@dataclass(frozen=True)
class LossMask:
    """The mask of a sample: a picture's grey values, or its transparency."""

    media: Media
    alpha: bool = False


@dataclass(frozen=True)
class Clip:
    """One video or image and what it shows; `id` is its path below the data folder."""

    id: str
    media: Media
    caption: str
    """Text that describes the clip; for folders with one subfolder per class, the class name."""
    image: Media | None = None
    """The clip's first image, where the data has one of its own."""
    references: tuple[Media, ...] = ()
    """Pictures or clips that the sample is made from, in their order."""
    mask: LossMask | None = None
    """The part of the picture that is learned; None for all of it."""
    times: float = 1.0
    """Number of times that the clip comes in an epoch: 2.5 is twice, and a third time in half of the epochs."""
    loss_weight: float = 1.0
    """Factor of the clip's loss."""


@dataclass(frozen=True)
class ClipProblem:
    """One reason why a sample cannot be used."""

    file: str
    """The sample's id, or the name of the table or tar that has a fault."""
    code: str
    """One of the audit's codes, such as `missing` or `caption_empty`."""
    words: str


class Scan(NamedTuple):
    """Contents of the sources."""

    clips: list[Clip]
    """Clips without a problem."""
    problems: list[ClipProblem]
    notes: tuple[str, ...] = ()
    """Lines on files that are left out, and on what was taken for what."""


class Gathered:
    """Collector of one source's clips and problems, for its reader."""

    def __init__(self, caption: str | None) -> None:
        self._caption = caption
        self._clips: dict[str, Clip] = {}
        self._problems: dict[tuple[str, str], ClipProblem] = {}
        self._refused: set[str] = set()

    def add(
        self,
        id: str,
        media: Media,
        caption: object,
        *,
        image: Media | None = None,
        references: Sequence[Media] = (),
        mask: LossMask | None = None,
        times: float = 1.0,
        no_caption: Fault = ("caption_missing", "it has no caption"),
    ) -> None:
        """Add one sample; it is a problem if its id is there already, or if its caption cannot be trained on.

        The source's own caption is in place of every other. `no_caption` is the code and message where
        `caption` is None.
        """
        if id in self._clips:
            self.refuse(id, "duplicate_clip", "listed twice")
        text = self._caption if self._caption is not None else _text(caption)
        if text is not None:
            fault = caption_fault(text)
        elif caption is None:
            fault = no_caption
        else:
            kind = type(caption).__name__
            fault = ("caption_not_text", f"its caption is of type {kind}, not text")
        if fault is not None:
            self.refuse(id, *fault)
        # A refused clip is stored too, so that a second one of its id is found; `scan` leaves it out.
        self._clips[id] = Clip(id, media, text or "", image, tuple(references), mask, times)

    def refuse(self, file: str, code: str, words: str) -> None:
        """Keep a problem, once for each file and code; the sample of that id is left out of the scan."""
        self._refused.add(file)
        self._problems.setdefault((file, code), ClipProblem(file, code, words))

    def scan(self, notes: Sequence[str] = ()) -> Scan:
        """Return clips and problems in the order in which they were added, with these notes."""
        clips = [clip for clip_id, clip in self._clips.items() if clip_id not in self._refused]
        return Scan(clips, list(self._problems.values()), tuple(notes))


def _text(caption: object) -> str | None:
    """Return a caption as text, a number as its digits; None for other types. Labels may be numbers."""
    if isinstance(caption, str):
        return caption.strip()
    return str(caption) if isinstance(caption, int | float) else None


def in_order(given: Sequence[Held | None]) -> tuple[list[Held], Fault | None]:
    """Return references without the empty places at the end, and what is wrong if one before the last is empty.

    Models tell references apart by their order, which an empty place would shift.
    """
    held = [one for one in given if one is not None]
    empty = next((place for place, one in enumerate(given) if one is None), len(held))
    if empty >= len(held):
        return held, None
    message = f"its reference {empty + 1} is empty, and there are others behind it"
    return held, (f"{REFERENCE}_missing", message)


def by_code(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults with those of one code as one: a sample has one problem of a code."""
    words: dict[str, list[str]] = {}
    for code, message in faults:
        words.setdefault(code, []).append(message)
    return [(code, "; ".join(messages)) for code, messages in words.items()]
