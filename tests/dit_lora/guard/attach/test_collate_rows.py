"""Rows of a collated batch are matched with the items that they were made of, or with none."""

import pytest
import torch

from dit_lora.guard.attach.samples.collate_rows import match_rows_to_items

ITEMS = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in (2, 5, 3)]


def padded(rows: list[torch.Tensor], *, in_front: bool = False) -> torch.Tensor:
    sides = [(6 - len(row), 0) if in_front else (0, 6 - len(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(r, s) for r, s in zip(rows, sides, strict=True)])


def test_rows_are_matched_in_any_order_padded_or_cut_to_items() -> None:
    a, b, c = ITEMS
    assert match_rows_to_items(ITEMS, [padded([c, a, b])]) == ((2, 0, 1),)
    assert match_rows_to_items(ITEMS, [padded([b, c, a], in_front=True)]) == ((1, 2, 0),)
    assert match_rows_to_items(ITEMS, [padded([b, b])]) == ((1, 1),)
    assert match_rows_to_items(ITEMS, [padded([b, c * 2])]) == ((1, None),)
    assert match_rows_to_items(ITEMS, [padded([a * 2, c * 2])]) == (None,)


def test_items_that_are_equal_are_not_told_apart() -> None:
    a, b, _ = ITEMS
    assert match_rows_to_items([a, b, a.clone()], [padded([a, b])]) == ((None, 1),)


def test_parts_that_are_joined_belong_to_their_items() -> None:
    assert match_rows_to_items(ITEMS, [torch.cat(ITEMS)]) == ((0, 0, 1, 1, 1, 1, 1, 2, 2, 2),)
    a, b, c = ITEMS
    assert match_rows_to_items(ITEMS, [torch.cat([b, a, c])]) == (None,)


def test_an_item_with_nan_is_matched_too() -> None:
    spoiled = ITEMS[1].clone()
    spoiled[3] = torch.nan
    a, _, c = ITEMS
    assert match_rows_to_items([a, spoiled, c], [padded([spoiled, a])]) == ((1, 0),)


@pytest.mark.parametrize("kind", ["dict", "lists of numbers", "tuple"])
def test_values_inside_of_items_are_found(kind: str) -> None:
    pairs = [(tensor, torch.tensor(number % 2)) for number, tensor in enumerate(ITEMS)]
    items: list[object] = {
        "dict": [{"label": label, "x": {"values": x}} for x, label in pairs],
        "lists of numbers": [{"x": x.tolist()} for x, _ in pairs],
        "tuple": [(label, x) for x, label in pairs],
    }[kind]  # type: ignore[assignment]
    batch = padded([ITEMS[2], ITEMS[0], ITEMS[1]])
    labels = torch.tensor([0, 0, 1])
    # One number says too little: labels repeat.
    assert match_rows_to_items(items, [batch, labels]) == ((2, 0, 1), None)


def test_a_tensor_that_is_an_item_itself_belongs_to_it() -> None:
    assert match_rows_to_items(ITEMS, [ITEMS[1]]) == ((1,) * 5,)
    assert match_rows_to_items(ITEMS, [torch.tensor(3.0)]) == (None,)
