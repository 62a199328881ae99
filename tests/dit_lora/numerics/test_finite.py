"""Messages about values that are not finite."""

import pytest
import torch

from dit_lora.numerics.finite import (
    abs_max,
    compute_headroom,
    describe_bad_tensors,
    describe_nonfinite_tensors,
    is_finite,
)


def test_describe_bad_counts_in_any_float_dtype() -> None:
    tensor = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf], dtype=torch.bfloat16)
    assert describe_bad_tensors({"x": tensor}) == "x has 1 NaN and 2 Inf among 4 values"
    assert describe_bad_tensors({"x": torch.zeros(0)}) is None


def test_a_value_beyond_the_limit_is_named_and_one_within_it_is_not() -> None:
    tensors = {"x": torch.tensor([1.0, -3e4]), "y": torch.tensor([2.0])}
    assert describe_bad_tensors(tensors, limit=1e4) == "x reaches 3e+04, beyond 10000"
    assert describe_bad_tensors(tensors) is None


def test_integers_are_finite_and_only_bad_tensors_are_listed() -> None:
    tensors = {"ids": torch.arange(3), "a": torch.ones(2), "b": torch.tensor([torch.inf, 1.0])}
    assert is_finite(tensors["ids"])
    assert not is_finite(tensors["b"])
    assert describe_nonfinite_tensors(tensors.items()) == ["b has 1 Inf among 2 values"]


def test_headroom_counts_how_often_the_peak_fits() -> None:
    assert compute_headroom(655.04, torch.float16) == pytest.approx(100)
    assert compute_headroom(0.0, torch.bfloat16) == float("inf")
    assert abs_max(torch.tensor([-7.0, 3.0], dtype=torch.bfloat16)) == 7.0
    assert abs_max(torch.tensor([torch.nan, 3.0])).isnan()
