"""Converts a rendered conversation to tensors, padded to the lengths of its bucket."""

import torch

from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.numerics.objectives import IGNORE_INDEX


def round_up_length(num_tokens: int, step: int) -> int:
    """Round a number of tokens up to a multiple of `step`."""
    # Floor division of the negative number rounds up.
    return -(-num_tokens // step) * step


def conversation_to_tensors(
    rendered: RenderedConversation, *, length: int, num_answers: int, instruction_length: int | None, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Convert a rendered conversation to int64 tensors, padded on the right.

    They are `input_ids` (length,), and `labels` and `answer_positions` (answers,). `labels` are the trained tokens in
    order, then -100. `answer_positions` are the indices of the tokens before them, whose hidden states predict them,
    then 0. With `instruction_length`, there are also `instruction_ids` and `instruction_mask` of that length, padded
    with 0, which is [PAD] in BERT's vocabulary.

    Raises:
        ValueError: Something does not fit; cutting it off would lose answers.
    """
    ids = rendered.ids
    learned = [index for index, label in enumerate(rendered.labels) if label != IGNORE_INDEX]
    # The first token is never predicted, so it must not be learned.
    if learned and not learned[0]:
        raise ValueError("the first token has a label, and nothing before it to predict it from")
    tensors = {
        "input_ids": _pad(ids, length, pad_token_id, "tokens"),
        "labels": _pad([ids[index] for index in learned], num_answers, IGNORE_INDEX, "answer tokens"),
        # The hidden state before a token predicts it, hence the shift by one.
        "answer_positions": _pad([index - 1 for index in learned], num_answers, 0, "answer positions"),
    }
    if instruction_length is not None:
        read = list(rendered.instruction)
        tensors["instruction_ids"] = _pad(read, instruction_length, 0, "instruction tokens")
        tensors["instruction_mask"] = _pad([1] * len(read), instruction_length, 0, "instruction tokens")
    return tensors


def _pad(values: list[int], length: int, pad_value: int, description: str) -> torch.Tensor:
    """Pad a list of numbers to an int64 tensor (length,) with `pad_value`; raises `ValueError` if it is longer."""
    if len(values) > length:
        raise ValueError(f"{len(values)} {description} do not fit into {length}")
    return torch.tensor(values + [pad_value] * (length - len(values)), dtype=torch.int64)
