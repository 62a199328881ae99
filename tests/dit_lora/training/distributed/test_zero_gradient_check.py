"""Gradient checks under ZeRO-2 on two ranks: wrong parts are found, and a rank that cannot gather ends nothing."""

import importlib.util
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from launching import on_ranks
from torch import nn

from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.ranks import gather_object
from dit_lora.training.distributed.zero import Zero2
from dit_lora.training.recovery.gradient_watch import PeriodicGradientCheck
from dit_lora.training.session.optional_work import OptionalWorkRunner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"),
]


@dataclass(frozen=True, eq=False, kw_only=True)
class NetBatch(MicroBatch):
    model: nn.Module = field(default_factory=nn.Module)

    def forward(self) -> LossOutput:
        losses = (self.model(self.tensors["x"]) - self.tensors["y"]).square().mean(1)
        return LossOutput(losses, torch.zeros(len(losses), dtype=torch.int64))

    def select_sample(self, index: int) -> "NetBatch":
        raise NotImplementedError


class ZeroRun:
    """A model under ZeRO-2 on this rank, with the watch of a run."""

    def __init__(self) -> None:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        names = [name for name, _ in self.model.named_parameters()]
        group = {"params": list(self.model.parameters()), "name": "adapter", "param_names": names}
        self.engine = Zero2(accelerator, self.model, torch.optim.AdamW([group], lr=1e-3, fused=True))
        torch.manual_seed(accelerator.process_index)
        tensors = {"x": torch.randn(2, 6), "y": torch.randn(2, 3)}
        ids = ("a", "b")
        rank = accelerator.process_index
        self.batch = NetBatch(ids=ids, step=1, micro_step=0, rank=rank, tensors=tensors, model=self.model)
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        guard = SimpleNamespace(gradient_every=1, on_nonfinite=["fallback"])
        settings = {"kernels": SimpleNamespace(fp8="off"), "lora": SimpleNamespace(kind="lora")}
        setup: Any = SimpleNamespace(
            recipe=SimpleNamespace(guard=guard, train=SimpleNamespace(steps=9), **settings),
            accelerator=accelerator,
            engine=self.engine,
            optimizer=self.engine.optimizer,
            transformer=self.model,
            dtype=torch.float32,
            session=SimpleNamespace(optional_work=OptionalWorkRunner(lambda v: gather_object([v]), self.lines.append)),
        )
        files = SimpleNamespace(
            say=self.lines.append,
            write_event=lambda event: self.events.append(event.diagnosis),
            write_gradient_bundle=lambda *_: None,
        )
        state = SimpleNamespace(switched_off=[])
        context = DiagnosisContext(self.model)
        recovery: Any = SimpleNamespace(state=state, files=files, diagnosis_context=context)
        self.watch = PeriodicGradientCheck(setup, recovery, 0)

    def run_backward(self) -> torch.Tensor:
        self.engine.discard_gradients()
        with self.engine.micro_step():
            losses = self.batch.forward().losses
            self.engine.backward(losses.mean())
        return losses.detach()

    def check(self, step: int, losses: torch.Tensor) -> None:
        self.watch.check_gradient_if_due(step, [self.batch], [losses], None)
        assert all(parameter.grad is None for parameter in self.model.parameters())


def run_rank() -> tuple[list[str], list[dict[str, Any]], list[float]]:
    """Lines and events of a healthy step, a wrong part on rank 1, and rank 1 out of memory twice."""
    run = ZeroRun()
    rank = run.batch.rank
    run.check(1, run.run_backward())
    losses = run.run_backward()
    if rank == 1:
        for gradient in run.engine._zero_optimizer.averaged_gradients[0]:
            gradient.mul_(0.5)
    run.check(2, losses)
    flatten = run.engine._flatten_gradient
    errors = [TypeError("no such tensor"), torch.OutOfMemoryError("out of memory")]

    def fail(*args: Any) -> torch.Tensor:
        if rank == 1:
            raise errors.pop(0)
        return flatten(*args)

    for step in (3, 4, 5):
        losses = run.run_backward()
        run.engine._flatten_gradient = fail  # type: ignore[method-assign]
        # In step 5 nothing is gathered any more.
        run.check(step, losses)
        run.engine._flatten_gradient = flatten  # type: ignore[method-assign]
    # Training goes on.
    norms = run.engine.compute_gradient_norms(None)
    run.engine.step(torch.tensor(0.0))
    return run.lines, run.events, [norm.item() for norm in norms.values()]


def test_a_wrong_part_is_found_and_a_rank_without_memory_ends_no_run() -> None:
    first, second = on_ranks(2, run_rank)
    assert first == second
    lines, events, (norm,) = first
    assert lines[0].startswith("guard: step 1: the gradient agrees with the loss")
    assert lines[1].startswith("guard: step 2: the gradient is wrong: along the gradient, the slope of the loss is 1.")
    assert lines[2:] == [
        "guard: step 3: the gradient could not be checked against the loss: TypeError: no such tensor",
        "warning: step 4: gradient checks are skipped from here on: out of memory; training continues",
    ]
    assert [event["evidence"]["result"] for event in events] == ["differs", "cannot tell"]
    # Parts follow the order of the parameters: the first rank has most of the first layer.
    assert events[0]["module"] == "2"
    assert norm > 0
