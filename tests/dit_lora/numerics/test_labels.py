"""Labels that teach nothing, or that no table has, are named; good ones are not."""

import pytest
import torch

from dit_lora.numerics.labels import IGNORE_INDEX, find_label_problem


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), ()])
@pytest.mark.parametrize("ignore", [IGNORE_INDEX, 0, -1])
def test_labels_that_are_all_ignored_teach_nothing(shape: tuple[int, ...], ignore: int) -> None:
    labels = torch.full(shape, ignore)
    message = find_label_problem(labels, ignore_index=ignore)
    assert message == f"all of its {labels.numel()} labels are {ignore}, which the loss ignores"


def test_the_index_that_torch_ignores_is_ours() -> None:
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORE_INDEX


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_sample_without_labels_has_none_to_learn_from(shape: tuple[int, ...]) -> None:
    assert find_label_problem(torch.empty(shape, dtype=torch.int64)) == "it has no label"


@pytest.mark.parametrize("kept", [0, 3, 6])
def test_one_label_that_is_kept_is_enough(kept: int) -> None:
    labels = torch.full((7,), IGNORE_INDEX)
    labels[kept] = 30 + kept
    assert find_label_problem(labels) is None
    assert find_label_problem(labels, num_classes=31 + kept) is None


@pytest.mark.parametrize(("label", "classes"), [(11, 11), (5000, 11), (-1, 11), (-101, 11), (1, 1)])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_label_that_no_table_has_is_named(label: int, classes: int, shape: tuple[int, ...]) -> None:
    labels = torch.tensor([0, IGNORE_INDEX, 0, label, 0, 0]).view(shape)
    expected = f"label {label} is outside 0..{classes - 1}"
    assert find_label_problem(labels, num_classes=classes) == expected
    assert find_label_problem(labels) is None  # where the table's size is not known


def test_the_first_and_the_last_class_are_inside() -> None:
    assert find_label_problem(torch.tensor([0, 10, IGNORE_INDEX, 4]), num_classes=11) is None


def test_an_index_that_is_ignored_is_not_outside_even_where_it_is_no_class() -> None:
    assert find_label_problem(torch.tensor([2, 255, 4]), ignore_index=255, num_classes=11) is None
    assert find_label_problem(torch.tensor([2, IGNORE_INDEX, 4]), ignore_index=255, num_classes=11) == (
        "label -100 is outside 0..10"
    )
