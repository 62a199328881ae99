"""Shortens samples that are too long: questions are shortened, answers never."""

from collections.abc import Sequence
from dataclasses import replace

from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.errors import DitLoraError

MIN_QUESTION_TOKENS = 8
"""Minimum number of tokens that a question keeps: with fewer, it would be meaningless."""


class UnusableSampleError(DitLoraError):
    """Raised if a conversation cannot be trained on; `code` is the audit's code of the reason."""

    code = "conversation"


class TooLongError(UnusableSampleError):
    """Raised if a conversation has more than `chat.max_tokens` tokens, even with its questions shortened."""

    code = "too_long"


class NothingToLearnError(UnusableSampleError):
    """Raised if a conversation has no token with a label, so that its loss would be 0/0."""

    code = "no_labels"


def shorten_conversation(rendered: RenderedConversation, max_tokens: int) -> RenderedConversation:
    """Shorten a conversation to at most `max_tokens` tokens by removing the middle of the longest questions.

    The longest questions are cut to one common length; shorter ones stay. The middle is removed because a
    question usually states its task at the beginning and the choices at the end. Long parts, such as subtitles,
    are in between. Media, fixed text and answers are never cut, so no label is lost.

    Raises:
        NothingToLearnError: The conversation has no answer token.
        TooLongError: It does not fit even with every question cut to `MIN_QUESTION_TOKENS` tokens.
    """
    # Check this first: a sample without answers cannot be trained on at any length.
    if not rendered.num_answer_tokens:
        raise NothingToLearnError(
            f"none of its {len(rendered)} tokens belongs to an answer, so there is nothing to learn; add an "
            "answer or remove the sample"
        )
    if len(rendered) <= max_tokens:
        return rendered
    # Only questions may be shortened; everything else needs this many tokens.
    media, answers, fixed = (rendered.count_tokens(part) for part in ("media", "answer", "fixed"))
    unshortened = media + answers + fixed
    questions = [len(piece.ids) for piece in rendered.pieces if piece.part == "question"]
    question_budget = max_tokens - unshortened
    min_tokens = sum(min(length, MIN_QUESTION_TOKENS) for length in questions)
    if question_budget < min_tokens:
        raise TooLongError(
            f"its media ({media}), answers ({answers}), fixed text ({fixed}) and at least {MIN_QUESTION_TOKENS} "
            f"tokens of each question ({min_tokens}) need {unshortened + min_tokens} tokens; "
            f"chat.max_tokens is {max_tokens}: raise it, or split the sample"
        )
    lengths = iter(_cap_lengths_to_budget(questions, question_budget))
    pieces = []
    for piece in rendered.pieces:
        num_dropped = len(piece.ids) - next(lengths) if piece.part == "question" else 0
        if num_dropped:
            # With an odd length, the beginning keeps one token more than the end.
            length = len(piece.ids) - num_dropped
            head = length - length // 2
            ids = piece.ids[:head] + piece.ids[head + num_dropped :]
            piece = replace(piece, ids=ids, num_dropped=piece.num_dropped + num_dropped)
        pieces.append(piece)
    return replace(rendered, pieces=tuple(pieces))


def _cap_lengths_to_budget(lengths: Sequence[int], token_budget: int) -> list[int]:
    """Shorten the longest of several lengths to a common level, so that their sum is `token_budget`.

    The level differs by at most a token.
    """
    new_lengths = list(lengths)
    indices = sorted(range(len(new_lengths)), key=lambda index: new_lengths[index])
    # From the shortest on, each takes its full length or an equal share of the remaining tokens.
    for position, index in enumerate(indices):
        new_lengths[index] = min(new_lengths[index], token_budget // (len(indices) - position))
        token_budget -= new_lengths[index]
    return new_lengths
