"""Questions are shortened, the longest first; nothing that is learned or seen is ever lost."""

import random

import pytest

from dit_lora.data.chat.fitting import (
    MIN_QUESTION_TOKENS,
    NothingToLearnError,
    TooLongError,
    shorten_conversation,
)
from dit_lora.data.chat.rendered import RenderedConversation, TokenPiece


def rendered(questions: list[int], answers: list[int], media: int = 7) -> RenderedConversation:
    """Fixed 2 + media, then questions and answers in turn; every token has an id of its own."""
    token = iter(range(1, 100_000))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(next(token) for _ in range(count))

    pieces = [TokenPiece(ids(2), "fixed"), TokenPiece(ids(media), "media")]
    for question, answer in zip(questions, answers, strict=True):
        pieces += [TokenPiece(ids(question), "question"), TokenPiece(ids(answer), "answer")]
    return RenderedConversation(tuple(pieces), instruction=(5, 6))


def questions(sample: RenderedConversation) -> list[int]:
    return [len(piece.ids) for piece in sample.pieces if piece.part == "question"]


def test_what_fits_is_left_alone() -> None:
    sample = rendered([9, 3], [4, 2])
    assert shorten_conversation(sample, len(sample)) is sample


@pytest.mark.parametrize(
    ("lengths", "drop", "left"),
    [
        ([40, 12, 9], 5, [35, 12, 9]),
        ([40, 12, 9], 30, [11, 11, 9]),
        ([30, 30], 11, [24, 25]),
        ([20, 5, 20], 20, [10, 5, 10]),
        ([40, 3], 32, [8, 3]),
    ],
)
def test_the_longest_questions_are_cut_to_one_level(lengths: list[int], drop: int, left: list[int]) -> None:
    sample = rendered(lengths, [3] * len(lengths))
    fitted = shorten_conversation(sample, len(sample) - drop)
    assert sorted(questions(fitted)) == sorted(left)
    assert len(fitted) == len(sample) - drop
    dropped_counts = [piece.num_dropped for piece in fitted.pieces if piece.part == "question"]
    assert [
        num_kept + num_dropped for num_kept, num_dropped in zip(questions(fitted), dropped_counts, strict=True)
    ] == lengths


def test_media_fixed_and_answers_stay_and_questions_keep_both_ends() -> None:
    rng = random.Random(1)
    for _ in range(300):
        turns = rng.randint(1, 5)
        sample = rendered([rng.randint(0, 60) for _ in range(turns)], [rng.randint(1, 20) for _ in range(turns)])
        min_tokens = sum(min(length, MIN_QUESTION_TOKENS) for length in questions(sample))
        max_tokens = len(sample) - sum(questions(sample)) + min_tokens + rng.randint(0, 40)
        fitted = shorten_conversation(sample, max_tokens)
        assert len(fitted) == min(max_tokens, len(sample))
        assert fitted.instruction == sample.instruction
        for before, after in zip(sample.pieces, fitted.pieces, strict=True):
            if before.part != "question":
                assert after == before
                continue
            head = (len(after.ids) + 1) // 2
            tail = len(after.ids) - head
            assert len(after.ids) >= min(len(before.ids), MIN_QUESTION_TOKENS)
            assert after.ids[:head] == before.ids[:head]
            assert after.ids[head:] == before.ids[len(before.ids) - tail :]
            assert after.num_dropped == len(before.ids) - len(after.ids)


def test_what_no_question_can_make_short_enough_is_refused_with_the_numbers() -> None:
    sample = rendered([30, 3], [20, 5], media=64)
    min_length = 2 + 64 + 25 + MIN_QUESTION_TOKENS + 3
    assert len(shorten_conversation(sample, min_length)) == min_length
    with pytest.raises(TooLongError) as error:
        shorten_conversation(sample, min_length - 1)
    for message in (
        "media (64)",
        "answers (25)",
        f"need {min_length} tokens",
        f"is {min_length - 1}",
    ):
        assert message in str(error.value)


def test_a_sample_without_a_label_is_refused_however_short() -> None:
    sample = RenderedConversation(
        (TokenPiece((1, 2), "fixed"), TokenPiece((3,), "question"), TokenPiece((), "answer"))
    )
    with pytest.raises(NothingToLearnError, match="none of its 3 tokens"):
        shorten_conversation(sample, 100)
