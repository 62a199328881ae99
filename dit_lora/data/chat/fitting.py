"""Samples that are too long: questions are shortened, answers never."""

from collections.abc import Sequence
from dataclasses import replace

from dit_lora.data.chat.rendered import Piece, Rendered
from dit_lora.errors import DitLoraError

KEPT = 8
"""Number of tokens that a question keeps at least: with fewer it asks nothing."""


class UnusableSampleError(DitLoraError):
    """Error of a conversation that cannot be trained on; `code` is the reason's, the message has the numbers."""

    code = "conversation"


class TooLongError(UnusableSampleError):
    """Error of a sample that has more than `chat.max_tokens` tokens even with its questions shortened."""

    code = "too_long"


class NothingToLearnError(UnusableSampleError):
    """Error of a sample without a token with a label: its loss would be 0/0."""

    code = "no_labels"


def fit(rendered: Rendered, max_tokens: int) -> Rendered:
    """Shorten a conversation to at most `max_tokens` tokens, by dropping the middle of the longest questions.

    The longest are cut to one common length, shorter ones are left alone. The middle goes because a
    question says at its beginning and end what is asked, and with what choices; what makes it long, such as
    subtitles, stands between. Media, fixed text and answers stay whole, so no label is ever lost. Raises
    `NothingToLearnError` and `TooLongError`.
    """
    if not rendered.answers:
        raise NothingToLearnError(
            f"none of its {len(rendered)} tokens is an answer's, so there is nothing to learn; give the sample an "
            "answer or remove it"
        )
    if len(rendered) <= max_tokens:
        return rendered
    media, answers, fixed = (rendered.count(part) for part in ("media", "answer", "fixed"))
    whole = media + answers + fixed
    questions = [len(piece.ids) for piece in rendered.pieces if piece.part == "question"]
    room = max_tokens - whole
    least = sum(min(length, KEPT) for length in questions)
    if room < least:
        raise TooLongError(
            f"its media ({media}), answers ({answers}), fixed text ({fixed}) and at "
            f"least {KEPT} tokens of each question ({least}) need {whole + least} tokens; "
            f"chat.max_tokens is {max_tokens}: raise it, or split the sample"
        )
    lengths = iter(_levelled(questions, room))
    return replace(
        rendered,
        pieces=tuple(
            _shortened(piece, next(lengths)) if piece.part == "question" else piece
            for piece in rendered.pieces
        ),
    )


def _levelled(lengths: Sequence[int], room: int) -> list[int]:
    """Return lengths that sum to `room`: the longest are cut to one level, to within a token."""
    cut = list(lengths)
    ordered = sorted(range(len(cut)), key=lambda index: cut[index])
    # From the shortest on, each takes its own length or an equal share of the room that is left.
    for position, index in enumerate(ordered):
        cut[index] = min(cut[index], room // (len(ordered) - position))
        room -= cut[index]
    return cut


def _shortened(piece: Piece, length: int) -> Piece:
    gone = len(piece.ids) - length
    if not gone:
        return piece
    head = length - length // 2
    ids = piece.ids[:head] + piece.ids[head + gone :]
    return replace(piece, ids=ids, dropped=piece.dropped + gone)
