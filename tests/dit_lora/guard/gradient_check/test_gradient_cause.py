"""The cause of a wrong gradient is found by switching components off, or by its micro-batches' weights in it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.fallbacks import CHECKPOINTING, COMPILE, Fallback
from dit_lora.guard.gradient_check.cause import (
    ReplayableStep,
    WrongGradientCause,
    compute_loss_terms,
    find_gradient_cause,
    fit_micro_batch_weights,
    sample_gradient_elements,
)
from dit_lora.guard.gradient_check.check import check_gradient
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput


class Net(nn.Module):
    """Two layers; the backward of the second is `factor` times the right one, or alternates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.factor = 1.0
        self.is_detached = False
        self.alternates = False
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden.detach() if self.is_detached else hidden
        output = self.last(hidden)
        if not torch.is_grad_enabled():
            return output
        self.num_calls += 1
        factor = self.factor if not self.alternates or self.num_calls % 2 else 1.0
        return output.detach() + factor * (output - output.detach())

    @contextmanager
    def repair(self) -> Iterator[None]:
        before = self.factor
        self.factor = 1.0
        try:
            yield
        finally:
            self.factor = before


@dataclass(frozen=True, eq=False, kw_only=True)
class NetBatch(MicroBatch):
    model: Net = field(default_factory=Net)

    def forward(self) -> LossOutput:
        losses = (self.model(self.tensors["x"]) - self.tensors["y"]).square().mean(1)
        return LossOutput(losses, torch.zeros(len(losses), dtype=torch.int64))

    def select_sample(self, index: int) -> "NetBatch":
        return replace(self, ids=self.ids[index : index + 1])


def make_step(num_batches: int = 1, *, has_previous: bool = False) -> ReplayableStep:
    torch.manual_seed(7)
    model = Net()
    batches = []
    for number in range(num_batches + 1):
        tensors = {"x": torch.randn(3, 6), "y": torch.randn(3, 3) + number}
        batches.append(NetBatch(ids=("a", "b", "c"), step=4, micro_step=number, rank=0, tensors=tensors, model=model))
    return ReplayableStep(batches[1:], model, torch.float32, batches[0] if has_previous else None)


def run_backward(step: ReplayableStep, weights: Sequence[float], batches: Sequence[MicroBatch]) -> None:
    step.model.zero_grad()
    for weight, batch in zip(weights, batches, strict=True):
        (weight * batch.forward().losses.mean()).backward()


def find_cause(
    step: ReplayableStep, fallbacks: Sequence[Fallback] = (), extra: Sequence[Fallback] = ()
) -> WrongGradientCause:
    gradients = [None if p.grad is None else p.grad.clone() for p in step.parameters.values()]
    report = check_gradient(step.compute_terms, step.parameters)
    assert report.result == "differs"
    finding = find_gradient_cause(step, report, DiagnosisContext(step.model, [*fallbacks]), extra)
    for parameter, gradient in zip(step.parameters.values(), gradients, strict=True):
        if parameter.grad is None or gradient is None:
            assert parameter.grad is gradient
        else:
            assert torch.equal(parameter.grad, gradient)
    return finding


def make_fallback(name: str, net: nn.Module | None = None) -> Fallback:
    """A component that is at fault if it belongs to `net`, and has no effect without one."""

    @contextmanager
    def disable_temporarily() -> Iterator[None]:
        if isinstance(net, Net):
            with net.repair():
                yield
        else:
            yield

    return Fallback(name, "kernel", disable_temporarily, lambda: None, "slower code")


@pytest.mark.parametrize(
    ("name", "cause"), [("rope", "kernel"), (COMPILE, "compile"), (CHECKPOINTING, "recomputation")]
)
def test_the_component_without_which_it_agrees_is_the_cause(name: str, cause: str) -> None:
    step = make_step()
    step.model.factor = 1.1  # type: ignore[assignment]
    run_backward(step, [1.0], step.micro_batches)
    faulty = make_fallback(name, step.model)
    finding = find_cause(step, [make_fallback("norm")], [faulty])
    assert (finding.cause, finding.fallback) == (cause, faulty)
    assert finding.evidence["replays"] == ["differs"] * 3
    assert f"{name} off (slower code in its place)" in finding.message
    assert find_cause(step, [make_fallback("norm")]).cause == "unknown"


def test_no_component_causes_a_fault_that_comes_and_goes() -> None:
    step = make_step()
    step.model.factor, step.model.alternates = 1.1, True  # type: ignore[assignment]
    run_backward(step, [1.0], step.micro_batches)
    finding = find_cause(step, [make_fallback("rope", step.model)])
    assert (finding.cause, finding.fallback) == ("transient", None)


def test_parameters_that_no_replay_gives_a_gradient_are_detached() -> None:
    step = make_step()
    step.model.is_detached = True  # type: ignore[assignment]
    run_backward(step, [1.0], step.micro_batches)
    finding = find_cause(step, [make_fallback("rope", step.model)])
    assert (finding.cause, finding.evidence["switched_off_without_effect"]) == ("detached", ["rope"])


@pytest.mark.parametrize(
    ("weights", "cause", "relative"),
    [([0.5, 1.0], "accumulation", [1, 2]), ([1.0, 1.0], "accumulation", [2, 2]), ([0.5, 0.0], "accumulation", [1, 0])],
)
def test_wrong_weights_of_micro_batches_are_told(weights: list[float], cause: str, relative: list[float]) -> None:
    step = make_step(2)
    run_backward(step, weights, step.micro_batches)
    finding = find_cause(step)
    assert finding.cause == cause
    assert finding.evidence["micro_batch_weights"] == pytest.approx(relative, abs=1e-3)


def test_one_micro_batch_has_no_accumulation() -> None:
    step = make_step()
    run_backward(step, [0.5], step.micro_batches)
    finding = find_cause(step)
    assert (finding.cause, finding.message) == ("unknown", "; it counts its micro-batch 0.5 times")


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.0, 1.0)])
def test_the_gradient_of_the_step_before_is_stale(weights: tuple[float, float]) -> None:
    step = make_step(has_previous=True)
    assert step.previous_batch is not None
    run_backward(step, weights, [*step.micro_batches, step.previous_batch])
    assert find_cause(step).cause == "stale"
    # Without the micro-batch of the step before, nothing is known about it.
    assert find_cause(replace(step, previous_batch=None)).cause == "unknown"


def test_weights_are_not_fitted_to_parallel_or_foreign_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second, other = torch.randn(3, 500, generator=generator, dtype=torch.float64)
    assert fit_micro_batch_weights(2 * first - second, [first, second]) == pytest.approx([2, -1])
    assert fit_micro_batch_weights(first, [first, first + 1e-3 * second]) is None
    assert fit_micro_batch_weights(first + other, [first, second]) is None
    assert fit_micro_batch_weights(torch.zeros(500, dtype=torch.float64), [first]) is None


def test_sampled_gradients_take_missing_ones_as_zero() -> None:
    missing, present = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    present.grad = torch.tensor([4.0, 5.0])
    assert sample_gradient_elements([missing, present]).tolist() == [0, 0, 0, 4, 5]


def test_terms_sum_to_the_mean_over_micro_batches() -> None:
    terms = compute_loss_terms([torch.tensor([1.0, 3.0]), torch.tensor([6.0])])
    assert terms.tolist() == [0.25, 0.75, 3.0]
