"""The gate on one process; two ranks are in tests/recipes/test_distributed.py."""

import pytest
import torch
from accelerate import Accelerator

from dit_lora.numerics.gate import Gate, NonFiniteError


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(Accelerator(cpu=True))


def test_finite_losses_and_gradients_pass(gate: Gate) -> None:
    gate.check_losses(torch.tensor([0.0, 3e38]), ["a", "b"], {}, step=1, micro_step=0)
    gate.check_gradients({"adapter": torch.tensor(5.0)}, ["a"], step=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_is_not_finite_names_its_sample_alone(gate: Gate, value: float) -> None:
    with pytest.raises(NonFiniteError) as error:
        gate.check_losses(
            torch.tensor([1.0, value]), ["good.mp4", "bad.mp4"], {}, step=23, micro_step=1
        )
    message = str(error.value)
    assert "step 23: loss is not finite; the weights are those of step 22" in message
    assert "bad.mp4 (rank 0)" in message
    assert "good.mp4" not in message
    assert error.value.exit_code == 3
    assert error.value.event["sample_ids"] == ["bad.mp4"]
    assert error.value.event["micro_step"] == 1


def test_a_fault_in_the_data_stops_even_if_its_loss_is_finite(gate: Gate) -> None:
    """A cached embedding of 1e30 that a norm layer scales away must not train."""
    with pytest.raises(NonFiniteError, match=r"b\.mp4 \(rank 0\): reaches 1e\+30"):
        gate.check_losses(
            torch.tensor([1.0, 1.0]),
            ["a.mp4", "b.mp4"],
            {"b.mp4": "reaches 1e+30"},
            step=2,
            micro_step=0,
        )


def test_a_gradient_that_is_not_finite_names_the_group_and_the_steps_samples(gate: Gate) -> None:
    norms = {"adapter": torch.tensor(1.0), "connector": torch.tensor(torch.inf)}
    with pytest.raises(NonFiniteError, match="connector gradient is not finite") as error:
        gate.check_gradients(norms, ["a.mp4", "b.mp4"], step=3)
    assert error.value.event["sample_ids"] == ["a.mp4", "b.mp4"]
    assert error.value.event["kind"] == "non_finite_gradient"
