"""Converts a rendered conversation to tensors, padded to the lengths of its bucket."""

import torch

from dit_lora.data.chat.rendered import Rendered
from dit_lora.numerics.objectives import IGNORE


def bucket_length(tokens: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `tokens`."""
    # Floor division of the negative number rounds up.
    return -(-tokens // step) * step


def to_tensors(
    rendered: Rendered, *, length: int, answers: int, instruction: int | None, pad: int
) -> dict[str, torch.Tensor]:
    """Convert to int64 `input_ids` (length,), `labels` and `answer_positions` (answers,), padded on the right.

    `labels` are the trained tokens in order, then -100. `answer_positions` are the indices of the tokens before
    them, whose hidden states predict them, then 0. With `instruction`, there are also `instruction_ids` and
    `instruction_mask` of that length, padded with 0, which is [PAD] in BERT's vocabulary.

    Raises:
        ValueError: Something does not fit; cutting it off would lose answers.
    """
    ids = rendered.ids
    learned = [index for index, label in enumerate(rendered.labels) if label != IGNORE]
    # The first token is never predicted, so it must not be learned.
    if learned and not learned[0]:
        raise ValueError("the first token has a label, and nothing before it to predict it from")
    tensors = {
        "input_ids": _padded(ids, length, pad, "tokens"),
        "labels": _padded([ids[index] for index in learned], answers, IGNORE, "answer tokens"),
        # The hidden state before a token predicts it, hence the shift by one.
        "answer_positions": _padded(
            [index - 1 for index in learned], answers, 0, "answer positions"
        ),
    }
    if instruction is not None:
        read = list(rendered.instruction)
        tensors["instruction_ids"] = _padded(read, instruction, 0, "instruction tokens")
        tensors["instruction_mask"] = _padded([1] * len(read), instruction, 0, "instruction tokens")
    return tensors


def _padded(values: list[int], length: int, filler: int, what: str) -> torch.Tensor:
    """The values as int64 (length,), filled up with `filler`."""
    if len(values) > length:
        raise ValueError(f"{len(values)} {what} do not fit into {length}")
    return torch.tensor(values + [filler] * (length - len(values)), dtype=torch.int64)
