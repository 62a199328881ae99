"""Tensors put each answer token next to the position that predicts it."""

import random

import pytest
import torch

from dit_lora.data.chat.rendered import IGNORE_INDEX, RenderedConversation, TokenPiece
from dit_lora.data.chat.tensors import conversation_to_tensors, round_up_length

SAMPLE = RenderedConversation(
    (
        TokenPiece((1, 11), "fixed"),
        TokenPiece((900, 900, 900), "media"),
        TokenPiece((12, 13), "question"),
        TokenPiece((21, 22), "answer"),
        TokenPiece((14,), "question"),
        TokenPiece((23, 24, 2), "answer"),
    ),
    instruction=(101, 7, 102),
)


def test_every_tensor_of_one_sample() -> None:
    tensors = conversation_to_tensors(SAMPLE, length=16, num_answers=7, instruction_length=5, pad_token_id=9)
    expected = {
        "input_ids": [1, 11, 900, 900, 900, 12, 13, 21, 22, 14, 23, 24, 2, 9, 9, 9],
        "labels": [21, 22, 23, 24, 2, IGNORE_INDEX, IGNORE_INDEX],
        "answer_positions": [6, 7, 9, 10, 11, 0, 0],
        "instruction_ids": [101, 7, 102, 0, 0],
        "instruction_mask": [1, 1, 1, 0, 0],
    }
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int64}


def test_without_a_q_former_there_is_no_instruction() -> None:
    tensors = conversation_to_tensors(SAMPLE, length=13, num_answers=5, instruction_length=None, pad_token_id=0)
    assert set(tensors) == {"input_ids", "labels", "answer_positions"}


def test_gathered_losses_are_those_of_shifted_labels() -> None:
    """Against Transformers' own way: labels as long as the tokens, shifted by one."""
    generator = torch.Generator().manual_seed(4)
    rng = random.Random(4)
    for _ in range(20):
        parts = ["fixed"] + [rng.choice(["question", "answer", "fixed"]) for _ in range(6)] + ["answer"]
        pieces = [
            TokenPiece(tuple(rng.randrange(50) for _ in range(rng.randint(1, 6))), part)  # type: ignore[arg-type]
            for part in parts
        ]
        sample = RenderedConversation(tuple(pieces))
        logits = torch.randn(len(sample) + 3, 50, generator=generator, dtype=torch.float64)
        tensors = conversation_to_tensors(
            sample,
            length=len(sample) + 3,
            num_answers=sample.num_answer_tokens + 2,
            instruction_length=None,
            pad_token_id=0,
        )
        labels = torch.tensor(sample.labels)
        expected = torch.nn.functional.cross_entropy(logits[: len(sample) - 1], labels[1:])
        answer_logits = logits[tensors["answer_positions"]]
        torch.testing.assert_close(torch.nn.functional.cross_entropy(answer_logits, tensors["labels"]), expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": 12}, "13 tokens do not fit into 12"),
        ({"num_answers": 4}, "5 answer tokens do not fit into 4"),
        ({"instruction_length": 2}, "3 instruction tokens do not fit into 2"),
    ],
)
def test_nothing_is_cut_off(given: dict[str, int], said: str) -> None:
    sizes = {"length": 13, "num_answers": 5, "instruction_length": 3} | given
    with pytest.raises(ValueError, match=said):
        conversation_to_tensors(SAMPLE, pad_token_id=0, **sizes)


def test_a_label_on_the_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        conversation_to_tensors(
            RenderedConversation((TokenPiece((3,), "answer"),)),
            length=4,
            num_answers=4,
            instruction_length=None,
            pad_token_id=0,
        )


@pytest.mark.parametrize(
    ("tokens", "step", "length"), [(1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 1, 7), (0, 8, 0)]
)
def test_bucket_lengths_are_the_next_multiple(tokens: int, step: int, length: int) -> None:
    assert round_up_length(tokens, step) == length
