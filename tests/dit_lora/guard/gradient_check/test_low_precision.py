"""Gradients of steps in bf16 are checked through replays in fp32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.gradient_check import low_precision
from dit_lora.guard.gradient_check.cause import ReplayableStep, find_gradient_cause
from dit_lora.guard.gradient_check.check import GradientReport
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.autocasts import restore_autocasts
from dit_lora.numerics.objectives import LossOutput


class Net(nn.Module):
    """A frozen layer in bf16 between two trained layers; the last one multiplies its gradient by `factors`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.middle.to(torch.bfloat16).requires_grad_(False)
        self.factors: dict[torch.dtype, Sequence[float]] = {}
        self.num_calls = 0
        self.refuses_fp32 = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        if self.refuses_fp32 and output.dtype == torch.float32:
            raise TypeError("a kernel for bf16 only")
        if not torch.is_grad_enabled():
            return output
        factors = self.factors.get(output.dtype, [1.0])
        self.num_calls += 1
        return output.detach() + factors[self.num_calls % len(factors)] * (output - output.detach())


@dataclass(frozen=True, eq=False, kw_only=True)
class NetBatch(MicroBatch):
    model: Net = field(default_factory=Net)

    def forward(self) -> LossOutput:
        with restore_autocasts((("cpu", torch.bfloat16),)):
            output = self.model(self.tensors["x"])
        losses = (output.float() - self.tensors["y"]).square().mean(1)
        return LossOutput(losses, torch.zeros(len(losses), dtype=torch.int64))

    def select_sample(self, index: int) -> "NetBatch":
        return replace(self, ids=self.ids[index : index + 1])


def make_step() -> tuple[ReplayableStep, Net]:
    torch.manual_seed(1)
    model = Net()
    batches = []
    for number in range(2):
        tensors = {"x": torch.randn(3, 6), "y": torch.randn(3, 4) + number}
        batches.append(NetBatch(ids=("a", "b", "c"), step=4, micro_step=number, rank=0, tensors=tensors, model=model))
    return ReplayableStep(batches, model, torch.bfloat16), model


def check(step: ReplayableStep) -> GradientReport:
    """Check a step, which must keep gradients, weights and their dtypes."""
    before = {name: (p.clone(), p.grad) for name, p in step.model.named_parameters()}
    report = check_step_gradient(step)
    for name, parameter in step.model.named_parameters():
        value, gradient = before[name]
        assert parameter.dtype == value.dtype
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
    return report


def test_a_right_gradient_agrees_with_the_narrow_bound_of_fp32() -> None:
    step, _ = make_step()
    step.run_backward()
    report = check(step)
    assert report.result == "agrees"
    assert report.is_in_fp32
    assert report.worst is not None
    assert report.worst.bound < 0.005
    assert report.fp32_distance is not None
    assert 0 < report.fp32_distance < 0.05
    assert "in fp32, and rounding moves the gradient by" in report.message


def test_an_error_in_the_passes_is_found_in_fp32_with_its_component() -> None:
    step, model = make_step()
    model.factors = {torch.bfloat16: [1.02], torch.float32: [1.02]}
    step.run_backward()
    report = check(step)
    assert report.result == "differs"
    assert report.is_in_fp32
    assert report.location is not None
    assert report.location.layer == "last"

    @contextmanager
    def repair() -> Iterator[None]:
        factors, model.factors = model.factors, {}
        yield
        model.factors = factors

    fallback = Fallback("rope", "kernel", repair, lambda: None, "slower code")
    finding = find_gradient_cause(step, report, DiagnosisContext(model, [fallback]))
    assert (finding.cause, finding.fallback) == ("kernel", fallback)


@pytest.mark.parametrize(("weights", "place"), [((1.0, 2.0), "all layers"), ((1.0, 1.0), "first")])
def test_an_error_of_the_loop_is_found_by_replays(weights: tuple[float, float], place: str) -> None:
    step, model = make_step()
    for weight, batch in zip(weights, step.micro_batches, strict=True):
        (weight * batch.forward().losses.mean() / 2).backward()
    if weights == (1.0, 1.0):
        model.first.weight.grad = None
    report = check(step)
    assert report.result == "differs"
    assert report.message.endswith(f"of its length, in {place}")
    finding = find_gradient_cause(step, report, DiagnosisContext(model, []))
    assert finding.cause == ("accumulation" if weights == (1.0, 2.0) else "unknown")


def test_an_error_in_bf16_only_is_found_by_slopes_in_bf16() -> None:
    step, model = make_step()
    model.factors = {torch.bfloat16: [2.0]}
    step.run_backward()
    report = check(step)
    assert report.result == "differs"
    assert not report.is_in_fp32
    assert report.worst is not None
    assert abs(report.worst.ratio - 0.5) < report.worst.bound


def test_a_model_that_cannot_run_in_fp32_is_checked_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = make_step()
    step.run_backward()
    in_fp32 = check(step)
    model.refuses_fp32 = True
    report = check(step)
    monkeypatch.setattr(low_precision, "has_memory_for_fp32", lambda _model, _bytes: False)
    model.refuses_fp32 = False
    assert not report.is_in_fp32
    assert report == check(step)
    # Its wide bound is no result, if an error of 5 % would not be seen.
    assert in_fp32.worst is not None
    assert report.worst is not None
    assert report.worst.bound > 10 * in_fp32.worst.bound
    assert report.result == ("agrees" if report.worst.bound < 0.05 else "cannot tell")


def test_replays_that_differ_prove_nothing() -> None:
    step, model = make_step()
    model.factors = {torch.bfloat16: [1.0, 1.0, 1.5, 1.5, 1.0, 1.0]}
    model.num_calls = -1
    step.run_backward()
    report = check(step)
    assert report.result == "cannot tell"
    assert "two replays" in report.message
