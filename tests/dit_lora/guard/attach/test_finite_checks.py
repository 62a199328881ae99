"""Gradients and weights of every size, layout and place in memory are looked at."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.guard.attach.finite_checks import OptimizerChecks

LARGE = (257, 257)
"""More elements than are joined with those of other tensors."""
KINDS: dict[str, list[Callable[[], torch.Tensor]]] = {
    "small": [lambda: torch.randn(3, 5), lambda: torch.randn(5)],
    "large": [lambda: torch.randn(LARGE), lambda: torch.randn(LARGE)],
    "both": [lambda: torch.randn(LARGE), lambda: torch.randn(3, 5), lambda: torch.randn(7)],
    "not contiguous": [lambda: torch.randn(5, 3).t(), lambda: torch.randn(4, 3).t()],
    "one is contiguous": [lambda: torch.randn(5, 3).t(), lambda: torch.randn(4, 3)],
    "scalars": [lambda: torch.randn(()), lambda: torch.randn(())],
    "channels last": [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 3, 4, 5),
    ],
    "bf16": [lambda: torch.randn(3, 5).bfloat16(), lambda: torch.randn(LARGE).bfloat16()],
}
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(params=KINDS)
def parameters(request: pytest.FixtureRequest) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(make()) for make in KINDS[request.param]]


def checks_of(parameters: Sequence[nn.Parameter]) -> OptimizerChecks:
    named_parameters = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    return OptimizerChecks(named_parameters, torch.optim.AdamW(parameters))


def set_last(tensor: torch.Tensor, value: float) -> float:
    """Set the last element and return what it was."""
    index = tuple(size - 1 for size in tensor.shape)
    before = tensor[index].item()
    with torch.no_grad():
        tensor[index] = value
    return before


@pytest.mark.parametrize("value", BAD)
def test_a_bad_weight_is_seen_whichever_it_is(parameters: list[nn.Parameter], value: float) -> None:
    checks = checks_of(parameters)
    assert checks.has_finite_weights()
    for parameter in parameters:
        before = set_last(parameter, value)
        assert not checks.has_finite_weights()
        set_last(parameter, before)
        assert checks.has_finite_weights()


def test_a_bad_weight_is_seen_within_eight_looks_after_the_weights_were_given_other_memory(
    parameters: list[nn.Parameter],
) -> None:
    checks = checks_of(parameters)
    assert checks.has_finite_weights()
    for parameter in parameters:
        parameter.data = parameter.data.clone()
        before = set_last(parameter, torch.nan)
        assert not all(checks.has_finite_weights() for _ in range(8))
        set_last(parameter, before)
        assert checks.has_finite_weights()


@pytest.mark.parametrize("value", BAD)
def test_a_bad_gradient_is_seen_whichever_it_is(parameters: list[nn.Parameter], value: float) -> None:
    checks = checks_of(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    assert checks.has_healthy_gradients()
    for number, parameter in enumerate(parameters):
        before = set_last(parameter.grad, value)
        assert not checks.has_healthy_gradients()
        assert checks.is_bad_gradient(checks.compute_gradient_peak())
        assert checks.find_bad_gradients() == [str(number)]
        set_last(parameter.grad, before)
        assert checks.has_healthy_gradients()


def test_a_bad_gradient_is_seen_though_others_have_none(parameters: list[nn.Parameter]) -> None:
    checks = checks_of(parameters)
    for parameter in parameters:
        for parameter_set in parameters:
            parameter_set.grad = torch.randn_like(parameter_set) if parameter_set is parameter else None
        assert checks.has_healthy_gradients()
        set_last(parameter.grad, torch.nan)
        assert not checks.has_healthy_gradients()


def test_gradients_that_are_none_or_zero_or_too_large_to_square_are_looked_at_closely(
    parameters: list[nn.Parameter],
) -> None:
    checks = checks_of(parameters)
    assert not checks.has_healthy_gradients()
    assert checks.compute_gradient_peak() == 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    assert not checks.has_healthy_gradients()
    set_last(parameters[-1].grad, 1e30)
    assert not checks.has_healthy_gradients()
    assert checks.is_bad_gradient(checks.compute_gradient_peak())


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of one moment, with the `eps` of 0 among its defaults that bitsandbytes' Lion has."""

    def __init__(self, params: Any, eps: float = 0.0) -> None:
        super().__init__(params, {"lr": 1e-3, "eps": eps})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.data.sub_(group["lr"] * momentum.sign())


@pytest.mark.parametrize(
    ("make", "is_bad_before", "is_bad"),
    [
        (torch.optim.AdamW, True, True),
        (torch.optim.RMSprop, True, True),
        (torch.optim.Adagrad, True, True),
        (torch.optim.Adafactor, True, True),
        (torch.optim.Adamax, True, False),  # no square: its second state is a maximum
        (torch.optim.SGD, False, False),
        (SignMomentum, False, False),
        (lambda parameters: SignMomentum(parameters, eps=1e-8), True, False),
    ],
)
def test_the_state_says_whether_gradients_are_squared(
    make: Callable[..., Any], is_bad_before: bool, is_bad: bool
) -> None:
    parameter = nn.Parameter(torch.randn(3, 5))
    optimizer = make([parameter])
    checks = OptimizerChecks([("weight", parameter)], optimizer)
    assert checks.is_bad_gradient(1e25) is is_bad_before
    parameter.grad = torch.randn(3, 5)
    optimizer.step()
    assert checks.is_bad_gradient(1e25) is is_bad
    assert not checks.is_bad_gradient(1e15)
    assert checks.is_bad_gradient(torch.inf)
