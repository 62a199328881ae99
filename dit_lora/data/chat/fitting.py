"""Shortens samples that are too long: questions are shortened, answers never."""

from collections.abc import Sequence
from dataclasses import replace

from dit_lora.data.chat.rendered import Piece, Rendered
from dit_lora.errors import DitLoraError

KEPT = 8
"""Minimum number of tokens that a question keeps: with fewer, it would be meaningless."""


class UnusableSampleError(DitLoraError):
    """A conversation cannot be trained on; `code` is the audit's code of the reason."""

    code = "conversation"


class TooLongError(UnusableSampleError):
    """A sample has more than `chat.max_tokens` tokens, even with its questions shortened."""

    code = "too_long"


class NothingToLearnError(UnusableSampleError):
    """A sample has no token with a label, so its loss would be 0/0."""

    code = "no_labels"


def fit(rendered: Rendered, max_tokens: int) -> Rendered:
    """Shorten a conversation to at most `max_tokens` tokens by removing the middle of the longest questions.

    The longest questions are cut to one common length; shorter ones stay. The middle is removed because a
    question usually states its task at the beginning and the choices at the end. Long parts, such as subtitles,
    are in between. Media, fixed text and answers are never cut, so no label is lost.

    Raises:
        NothingToLearnError: The conversation has no answer token.
        TooLongError: It does not fit even with every question cut to `KEPT` tokens.
    """
    # Check this first: a sample without answers cannot be trained on at any length.
    if not rendered.answers:
        raise NothingToLearnError(
            f"none of its {len(rendered)} tokens is an answer's, so there is nothing to learn; give the sample an "
            "answer or remove it"
        )
    if len(rendered) <= max_tokens:
        return rendered
    # Only questions may be shortened; everything else needs this many tokens.
    media, answers, fixed = (rendered.count(part) for part in ("media", "answer", "fixed"))
    unshortened = media + answers + fixed
    questions = [len(piece.ids) for piece in rendered.pieces if piece.part == "question"]
    question_budget = max_tokens - unshortened
    min_tokens = sum(min(length, KEPT) for length in questions)
    if question_budget < min_tokens:
        raise TooLongError(
            f"its media ({media}), answers ({answers}), fixed text ({fixed}) and at "
            f"least {KEPT} tokens of each question ({min_tokens}) need {unshortened + min_tokens} tokens; "
            f"chat.max_tokens is {max_tokens}: raise it, or split the sample"
        )
    lengths = iter(_levelled(questions, question_budget))
    return replace(
        rendered,
        pieces=tuple(
            _shortened(piece, next(lengths)) if piece.part == "question" else piece
            for piece in rendered.pieces
        ),
    )


def _levelled(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths that sum to `room`: the longest are cut to one level, which differs by at most a token."""
    new_lengths = list(lengths)
    indices = sorted(range(len(new_lengths)), key=lambda index: new_lengths[index])
    # From the shortest on, each takes its full length or an equal share of the remaining tokens.
    for position, index in enumerate(indices):
        new_lengths[index] = min(new_lengths[index], room // (len(indices) - position))
        room -= new_lengths[index]
    return new_lengths


def _shortened(piece: Piece, length: int) -> Piece:
    """The piece with its middle removed, so that `length` tokens remain."""
    num_dropped = len(piece.ids) - length
    if not num_dropped:
        return piece
    # With an odd length, the beginning keeps one token more than the end.
    head = length - length // 2
    ids = piece.ids[:head] + piece.ids[head + num_dropped :]
    return replace(piece, ids=ids, dropped=piece.dropped + num_dropped)
