"""A clip with its caption, and what a reader of sources found: clips that can be used, and what is wrong."""

from dataclasses import dataclass

from dit_lora.data.caption_text import Fault, caption_fault
from dit_lora.data.media import Media


@dataclass(frozen=True)
class Clip:
    """One video or image and what it shows; `id` is its path below the data folder."""

    id: str
    media: Media
    caption: str
    """Of a folder a class, the class's name."""
    image: Media | None = None
    """Its first image, where the data has one of its own."""
    times: float = 1.0
    """How often it comes in an epoch: 2.5 is twice, and a third time in half of the epochs."""
    loss_weight: float = 1.0
    """What its loss is multiplied by."""


@dataclass(frozen=True)
class Problem:
    """Why a sample cannot be used."""

    file: str
    """The sample's id; of a fault in a table or a tar, that file's."""
    code: str
    """One of the audit's codes, such as `missing` or `caption_empty`."""
    words: str


@dataclass(frozen=True)
class Scan:
    """What the sources hold."""

    clips: list[Clip]
    """Those without a problem."""
    problems: list[Problem]


class Gathered:
    """What one source holds, as its reader finds it."""

    def __init__(self, caption: str | None) -> None:
        self._caption = caption
        self._clips: dict[str, Clip] = {}
        self._problems: dict[tuple[str, str], Problem] = {}
        self._refused: set[str] = set()

    def add(
        self,
        id: str,
        media: Media,
        caption: object,
        *,
        image: Media | None = None,
        no_caption: Fault = ("caption_missing", "it has no caption"),
    ) -> None:
        """One sample; it is a problem if its id is there already, or if its caption cannot be trained on.

        The source's own caption is in place of every other. `no_caption` are code and words where it is None.
        """
        if id in self._clips:
            self.refuse(id, "duplicate_clip", "listed twice")
        text = self._caption if self._caption is not None else _text(caption)
        wrong = _wrong(text, caption, no_caption)
        if wrong is not None:
            self.refuse(id, *wrong)
        self._clips[id] = Clip(id, media, text or "", image)

    def refuse(self, file: str, code: str, words: str) -> None:
        """The same problem of the same file is kept once."""
        self._refused.add(file)
        self._problems.setdefault((file, code), Problem(file, code, words))

    def scan(self) -> Scan:
        """In the order found."""
        clips = [clip for id, clip in self._clips.items() if id not in self._refused]
        return Scan(clips, list(self._problems.values()))


def _wrong(text: str | None, caption: object, no_caption: Fault) -> Fault | None:
    """Why a caption, which is `text` as far as it is one, cannot be used."""
    if text is not None:
        return caption_fault(text)
    kind = type(caption).__name__
    not_text = ("caption_not_text", f"its caption is of type {kind}, not text")
    return no_caption if caption is None else not_text


def _text(caption: object) -> str | None:
    """A label may be a number."""
    if isinstance(caption, str):
        return caption.strip()
    return str(caption) if isinstance(caption, int | float) else None
