"""A conversation about an image, a video or nothing, as an annotation file has it."""

from dataclasses import dataclass
from typing import Literal

from dit_lora.data.clips import Problem
from dit_lora.data.media import Media

Kind = Literal["image", "video", "text"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    """May be empty: a caption answers no question."""
    answer: str
    instruction: str = ""
    """What VideoChat2's `i` says of the task; the Q-Former reads the first turn's."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample."""

    id: str
    kind: Kind
    media: Media | None
    """None of kind `text`."""
    turns: tuple[Turn, ...]
    independent: bool = False
    """Whether the turns may come in another order."""
    system: str = ""
    start: float | None = None
    """Seconds; with `end`, the part of the video that is asked about."""
    end: float | None = None
    times: float = 1.0
    """How often it comes in an epoch."""
    loss_weight: float = 1.0
    """What its loss is multiplied by."""


@dataclass(frozen=True)
class Conversations:
    """What the annotation files hold."""

    all: list[Conversation]
    """Those without a problem."""
    problems: list[Problem]
