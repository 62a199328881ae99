"""A conversation about an image, a video or nothing, as read from an annotation file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import ClipProblem

_BLANK_LINES = re.compile(r"\A(?:[ \t]*\r?\n)+")

ConversationKind = Literal["image", "video", "text"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: a question and its answer."""

    question: str
    """The question; empty where the answer is a caption."""
    answer: str
    instruction: str = ""
    """VideoChat2's `i`, which describes the task; the Q-Former reads the first turn's."""


def join_texts(system: str, turns: Iterable[Turn]) -> str:
    """Join the system text and all texts of a conversation's turns, one per line."""
    texts = [text for turn in turns for text in (turn.question, turn.answer, turn.instruction)]
    return "\n".join([system, *texts])


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training sample of a chat model: turns about an image, a video or nothing."""

    id: str
    kind: ConversationKind
    media: Media | None
    """The image or video; None for the kind `text`."""
    turns: tuple[Turn, ...]
    is_independent: bool = False
    """True if the turns do not depend on each other, so that their order may change."""
    system: str = ""
    start: float | None = None
    """Start of the part of the video that the questions are about, in seconds; `end` is its end."""
    end: float | None = None
    times_per_epoch: float = 1.0
    """Number of times that the sample is used in an epoch."""
    loss_weight: float = 1.0
    """Factor by which the sample's loss is multiplied."""


class Conversations(NamedTuple):
    """Conversations read from the annotation files, with the problems found."""

    usable: list[Conversation]
    """Conversations without a problem."""
    problems: list[ClipProblem]


def trim_answer(text: str) -> str:
    """Remove white space around an answer, but keep the indent of its first line, which matters in code and verse.

    A single space before an answer is not indentation; data sets write it between the role and the text.
    """
    # Blank lines before the answer carry no meaning, while the indent of its first line does.
    text = _BLANK_LINES.sub("", text).rstrip()
    indent = text[: len(text) - len(text.lstrip())]
    return text[1:] if indent == " " else text
