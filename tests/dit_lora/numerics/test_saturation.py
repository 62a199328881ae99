"""fp16's limit in a wider dtype: value, gradient, and what the check before a run makes of it."""

import pytest
import torch

from dit_lora.guard.stored_precision import check_stored_precision
from dit_lora.numerics.saturation import FP16_MAX, saturate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def test_saturation_clamps_and_stops_the_gradient_where_it_does() -> None:
    x = torch.tensor([1e6, -3.2e5, 65504.0, -70.0, 0.3]).requires_grad_()
    saturated = saturate(x)
    assert saturated.tolist() == pytest.approx([65504.0, -65504.0, 65504.0, -70.0, 0.3])
    (saturated * torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 5.0, 7.0, 11.0]


def test_bf16_has_no_65504_and_takes_the_nearest() -> None:
    saturated = saturate(torch.tensor([1e6, -1e6, 65280.0, 3.0], dtype=torch.bfloat16))
    assert saturated.tolist() == [65536.0, -65536.0, 65280.0, 3.0]


def test_not_a_number_stays_one() -> None:
    """The guard must see it: inf is a value beyond the limit, NaN is a fault."""
    saturated = saturate(torch.tensor([torch.inf, torch.nan]))
    assert saturated[0] == FP16_MAX
    assert saturated[1].isnan()


@pytest.mark.parametrize("compute", [BF16, F32])
def test_activations_beyond_fp16_are_right_where_the_model_repeats_its_limit(
    compute: torch.dtype,
) -> None:
    (finding,) = check_stored_precision(F16, compute, 1e6, saturates=True)
    assert finding.ok
    assert "limit of 65504 repeated" in finding.message
    (finding,) = check_stored_precision(BF16, F16, 1e6, saturates=True)
    assert finding.fatal  # another mistake, that it does not cover
