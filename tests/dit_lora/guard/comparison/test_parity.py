"""Which kernels are asked, in which order, and what a difference is measured against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from dit_lora.guard.comparison.parity import KernelDifference, find_first_difference, iter_differences
from dit_lora.guard.fallbacks import Fallback


def switch(name: str, off: list[str], part_of: str | None = None) -> Fallback:
    return Fallback(name, "kernel", nullcontext, lambda: off.append(name), "stock", parent=part_of)


@pytest.mark.parametrize(
    ("wrong", "asked", "off"),
    [
        ((), ["other", "all"], []),
        (("rope",), ["other", "all", "norm", "rope", "all"], ["rope"]),
        (("other", "norm"), ["other", "all", "norm", "rope", "all"], ["other", "norm"]),
        # Every part is right alone: what calls them is wrong.
        (("glue",), ["other", "all", "norm", "rope"], ["all"]),
    ],
)
def test_parts_are_asked_where_the_whole_differs(wrong: tuple[str, ...], asked: list[str], off: list[str]) -> None:
    calls: list[str] = []
    runs: list[str] = []
    parts = ("norm", "rope")
    switches = [
        switch("other", runs),
        *(switch(name, runs, "all") for name in parts),
        switch("all", runs),
    ]

    def compare(one: Fallback, others: Sequence[Fallback]) -> KernelDifference | None:
        calls.append(one.name)
        expected = {"other", *parts} if one.parent else {"other", "all"}
        assert {switch.name for switch in others} == expected - {one.name}
        part_names = {*parts, "glue"} if one.name == "all" else {one.name}
        is_wrong = any(name in part_names and name not in runs for name in wrong)
        return KernelDifference(one.name, "block", 1.0) if is_wrong else None

    for name_found, difference in iter_differences(switches, compare):
        assert difference.fallback == name_found.name
        name_found.disable()
    assert calls == asked
    assert runs == off


class Keys(nn.Module):
    """The gradient of the bias is exactly zero, as that of a key's in attention; rounding makes it noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.linear(x)
        shifted = keys - keys.mean(1, keepdim=True)
        return shifted + self.noise * (keys - keys.detach()).mean(1, keepdim=True)


@pytest.mark.parametrize(("noise", "differs"), [(1e-6, False), (0.3, True)])
def test_a_gradient_of_rounding_errors_is_no_difference(noise: float, differs: bool) -> None:
    torch.manual_seed(0)
    model, x, weights = Keys(), torch.randn(2, 5, 4), torch.randn(2, 5, 4)

    @contextmanager
    def off() -> Iterator[None]:
        model.noise = 0.0
        yield
        model.noise = noise

    model.noise = noise
    kernel = Fallback("k", "kernel", off, lambda: None, "stock")
    outer = nn.Sequential(model)
    difference = find_first_difference(kernel, lambda: (outer(x) * weights).flatten(1).sum(1), outer)
    assert (difference is not None) is differs


def test_what_the_stock_model_makes_nan_of_shows_nothing() -> None:
    model = nn.Linear(3, 3)
    x = torch.full((2, 3), torch.nan)
    unchanged_fallback = Fallback("k", "kernel", nullcontext, lambda: None, "stock")
    assert find_first_difference(unchanged_fallback, lambda: model(x).sum(1), model) is None


def test_dropout_of_other_draws_is_no_difference_and_is_on_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train()
    x, state = torch.randn(2, 6), torch.get_rng_state()

    @contextmanager
    def off() -> Iterator[None]:
        torch.rand(1)  # the kernel draws otherwise
        yield

    kernel = Fallback("k", "kernel", off, lambda: None, "stock")
    assert find_first_difference(kernel, lambda: model(x).sum(1), model) is None
    assert model[1].training
    torch.set_rng_state(state)


@pytest.mark.parametrize("angle", [0.5, -0.5])
def test_a_rotation_differs_by_its_imaginary_part_too(angle: float) -> None:
    """The real part of a rotation is that of the one the other way."""

    class Rotation(nn.Module):
        angle = 0.5

        def forward(self) -> torch.Tensor:
            return torch.polar(torch.ones(3), self.angle * torch.arange(3.0))

    model = nn.ModuleDict({"rope": Rotation(), "linear": nn.Linear(1, 1)})

    @contextmanager
    def off() -> Iterator[None]:
        model["rope"].angle = 0.5
        yield
        model["rope"].angle = angle

    def losses() -> torch.Tensor:
        return model["rope"]().real.sum() + model["linear"](torch.ones(2, 1)).flatten()

    model["rope"].angle = angle
    kernel = Fallback("k", "kernel", off, lambda: None, "stock")
    difference = find_first_difference(kernel, losses, model)
    assert (difference is not None) is (angle != 0.5)
