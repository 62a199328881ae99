"""A gradient check over two ranks: both take the same decisions, and a gradient that is not their mean is found."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
from launching import on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.gradient_check import cause
from dit_lora.guard.gradient_check.cause import (
    ReplayableStep,
    WrongGradientCause,
    check_ranks_are_equal,
    find_gradient_cause,
)
from dit_lora.guard.gradient_check.check import GradientReport, check_gradient
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.gradient_check.ranks import GradientCheckError, gather_or_raise, run_or_raise_on_all_ranks
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput


@dataclass(frozen=True, eq=False, kw_only=True)
class NetBatch(MicroBatch):
    model: nn.Module = field(default_factory=nn.Module)

    def forward(self) -> LossOutput:
        losses = (self.model(self.tensors["x"]) - self.tensors["y"]).square().mean(1)
        return LossOutput(losses, torch.zeros(len(losses), dtype=torch.int64))

    def select_sample(self, index: int) -> "NetBatch":
        raise NotImplementedError


class RankedStep:
    """A step of DDP on this rank, with two micro-batches of its own."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(rank)
        batches = [
            NetBatch(
                ids=("a", "b"),
                step=1,
                micro_step=number,
                rank=rank,
                tensors={"x": torch.randn(2, 6), "y": torch.randn(2, 3) + rank},
                model=self.model,
            )
            for number in range(2)
        ]
        self.step = ReplayableStep(batches, self.model, torch.float32)

    def run_backward(self, factor: float = 1.0, *, without_all_reduce: bool = False) -> None:
        self.model.zero_grad()
        first, last = self.step.micro_batches
        with self.ddp.no_sync():
            (factor * self._compute_loss(first)).backward()
            if without_all_reduce:
                self._compute_loss(last).backward()
        if not without_all_reduce:
            (factor * self._compute_loss(last)).backward()

    def _compute_loss(self, batch: MicroBatch) -> torch.Tensor:
        return (self.ddp(batch.tensors["x"]) - batch.tensors["y"]).square().mean() / 2

    def examine(self) -> tuple[GradientReport, WrongGradientCause]:
        unequal = check_ranks_are_equal(self.step)
        if unequal is not None:
            return unequal
        report = check_gradient(self.step.compute_terms, self.step.parameters)
        if report.result != "differs":
            return report, WrongGradientCause("unknown", "")
        return report, find_gradient_cause(self.step, report, DiagnosisContext(self.model))


Rank = tuple[dict[str, tuple[GradientReport, WrongGradientCause]], list[str], list[GradientReport]]
"""Results of checks, errors, and reports of steps in 16 bits."""


def run_rank() -> Rank:
    """Everything that is tried on this rank, in one launch."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    return examine_steps(rank), fail_on_one_rank(rank), check_in_16_bits(rank)


def examine_steps(rank: int) -> dict[str, tuple[GradientReport, WrongGradientCause]]:
    ranked = RankedStep(rank)
    results = {}

    def examine(name: str, change: Callable[[], None] = lambda: None) -> None:
        change()
        gradients = [p.grad for p in ranked.step.parameters.values()]
        copies = [g.clone() for g in gradients if g is not None]
        results[name] = run_or_raise_on_all_ranks(ranked.examine)
        assert all(p.grad is g for p, g in zip(ranked.step.parameters.values(), gradients, strict=True))
        assert all(g is not None and torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))

    examine("healthy", ranked.run_backward)
    examine("one rank counts twice", lambda: ranked.run_backward(2.0 if rank == 1 else 1.0))
    examine("a sum in place of the mean", lambda: ranked.run_backward(2.0))
    examine("no all-reduce", lambda: ranked.run_backward(without_all_reduce=True))

    def keep_local_gradient() -> None:
        ranked.run_backward(without_all_reduce=True)
        local_gradient = [p.grad.clone() for p in ranked.model[2].parameters() if p.grad is not None]
        ranked.run_backward()
        for parameter, gradient in zip(ranked.model[2].parameters(), local_gradient, strict=True):
            if rank == 1:
                parameter.grad = gradient

    examine("one rank keeps its own gradient of a layer", keep_local_gradient)
    ranked.run_backward()
    with torch.no_grad():
        ranked.model[0].weight[0, 0] += rank
    examine("other weights")
    return results


def check_in_16_bits(rank: int) -> list[GradientReport]:
    """Reports of two checks of a step in 16 bits. In the second, rank 1 cannot convert its weights."""
    ranked = RankedStep(rank)
    ranked.run_backward()
    step = replace(ranked.step, dtype=torch.bfloat16)
    reports = [run_or_raise_on_all_ranks(lambda: check_step_gradient(step))]
    error = RuntimeError("no memory left") if rank == 1 else None
    with patch.object(cause, "convert_to_fp32", side_effect=error, wraps=cause.convert_to_fp32):
        reports.append(run_or_raise_on_all_ranks(lambda: check_step_gradient(step)))
    return reports


def fail_on_one_rank(rank: int) -> list[str]:
    """The errors that this rank raises where rank 1 fails, or decides otherwise."""

    def fail(error: Exception) -> int:
        if rank == 1:
            raise error
        return rank

    def exchange() -> None:
        gather_or_raise("loss", lambda: fail(TypeError("no\nnumber")))

    def fail_outside() -> None:
        fail(RuntimeError("no memory left"))
        gather_or_raise("loss", lambda: rank)

    def fail_at_the_end() -> None:
        gather_or_raise("loss", lambda: rank)
        fail(ValueError("no such module"))

    def decide_otherwise() -> None:
        if rank == 1:
            gather_or_raise("loss", lambda: rank)

    errors = []
    for run in (exchange, fail_outside, fail_at_the_end, decide_otherwise):
        try:
            run_or_raise_on_all_ranks(run)
        except GradientCheckError as error:
            errors.append(str(error))
    return errors


@pytest.mark.slow
def test_two_ranks_find_the_same_and_name_what_is_not_the_mean_over_them() -> None:
    (first, first_errors, first_reports), (second, second_errors, second_reports) = on_ranks(2, run_rank)
    # Without fp32 on one rank, none uses it.
    assert first_reports == second_reports
    results = [(report.result, report.is_in_fp32) for report in first_reports]
    assert results == [("agrees", True), ("cannot tell", False)]  # in 16 bits, the bound is too wide
    for name, (report, finding) in first.items():
        assert (report, finding) == second[name], name
    report, _ = first["healthy"]
    assert report.result == "agrees"
    assert report.worst is not None
    assert abs(report.worst.ratio - 1) < 1e-3
    report, finding = first["one rank counts twice"]
    assert (report.result, finding.cause) == ("differs", "ranks")
    assert finding.evidence["micro_batch_weights"] == pytest.approx([1, 1, 2, 2], abs=1e-3)
    # Which of the two is wrong is not known: either explains a factor for all.
    report, finding = first["a sum in place of the mean"]
    assert (report.result, finding.cause) == ("differs", "accumulation")
    report, finding = first["no all-reduce"]
    assert (report.result, finding.cause) == ("differs", "ranks")
    assert report.message == "the gradients are not equal on all ranks, in 2 layers"
    by_rank = finding.evidence["micro_batch_weights_by_rank"]
    assert by_rank[0] == pytest.approx([2, 2, 0, 0], abs=1e-3)
    assert by_rank[1] == pytest.approx([0, 0, 2, 2], abs=1e-3)
    report, finding = first["one rank keeps its own gradient of a layer"]
    assert report.message == "the gradients are not equal on all ranks, in 2"
    assert finding.evidence["ranks"] == [1]
    assert finding.message == "; of all ranks' micro-batches, on rank 1 it counts 0, 0, 2, 2 times"
    assert first["other weights"][0].message == "the trained weights are not equal on all ranks, in 0"
    # An error of one rank is raised on all.
    assert first_errors == second_errors
    assert first_errors == [
        "TypeError: no number",
        "RuntimeError: no memory left",
        "ValueError: no such module",
        "the ranks do not take the same decisions in the gradient check",
    ]


def test_one_process_contains_errors_and_no_interrupt() -> None:
    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(GradientCheckError, match="TypeError: no number"):
        run_or_raise_on_all_ranks(lambda: fail(TypeError("no number")))
    with pytest.raises(KeyboardInterrupt):
        run_or_raise_on_all_ranks(lambda: fail(KeyboardInterrupt()))
