"""The loop: one function over a family's losses. No family can override the step, so none can lose the gate.

Order in a step (docs/design.md): losses checked -> backward -> pre-clip gradients checked -> clip ->
optimizer. Every check is agreed over all ranks.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.config import OptimConfig
from dit_lora.data.loader import Batch
from dit_lora.numerics.gate import Gate
from dit_lora.numerics.streams import Streams, fold
from dit_lora.objectives import LossOutput
from dit_lora.training.optimizer import (
    Schedule,
    apply_schedule,
    clip_gradients,
    gradient_norms,
)

LossFunction = Callable[[nn.Module, Batch, Streams], LossOutput]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping, over all groups."""
    grad_norm_groups: dict[str, float]
    lr_groups: dict[str, float]
    losses: list[float]
    """Every sample's loss."""
    timesteps: list[int]
    seconds: float
    data_seconds: float
    stop_code: int
    """The exit code with which some rank was asked to stop, or 0."""


@dataclass
class _Step:
    """What is collected while a step's micro-steps run."""

    number: int
    ids: list[str] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    timesteps: list[torch.Tensor] = field(default_factory=list)
    data_seconds: float = 0.0


@dataclass(frozen=True)
class Loop:
    """What every step needs."""

    accelerator: Accelerator
    model: nn.Module
    losses: LossFunction
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    optim: OptimConfig
    accumulate: int
    seed: int


def train(
    loop: Loop,
    batches: Iterable[Batch],
    *,
    start_step: int,
    steps: int,
    stop_asked: Callable[[], int],
    on_step: Callable[[StepResult], None],
) -> None:
    """Take the steps after `start_step` up to `steps`; `on_step` runs after each with equal results on all ranks.

    Raises `NonFiniteError` on every rank, with weights and optimizer as after the step before, if a loss
    or a gradient is not finite.
    """
    stream = iter(batches)
    loop.model.train()
    for number in range(start_step + 1, steps + 1):
        began = time.perf_counter()
        step = _Step(number)
        for micro_step in range(loop.accumulate):
            _micro_step(loop, stream, step, micro_step)
        rates, norms, norm = _update(loop, step)
        result = _result(loop, step, rates, norms, norm, began, stop_asked())
        on_step(result)


def _micro_step(loop: Loop, stream: Iterator[Batch], step: _Step, micro_step: int) -> None:
    waiting = time.perf_counter()
    batch = next(stream).to(loop.accelerator.device)
    step.data_seconds += time.perf_counter() - waiting
    step.ids.extend(batch.ids)
    # Dropout inside the model draws from torch's own generator: folded with step, micro-step and rank.
    rank = loop.accelerator.process_index
    torch.manual_seed(fold(loop.seed, "dropout", step.number, micro_step, rank))
    # A module, never a list: a list disables no_sync and all-reduces in every micro-step.
    with loop.accelerator.accumulate(loop.model):
        output = loop.losses(loop.model, batch, Streams(loop.seed, batch.positions))
        Gate(loop.accelerator).check_losses(
            output.losses, batch.ids, batch.faults, step=step.number, micro_step=micro_step
        )
        loop.accelerator.backward(output.losses.mean())
    step.losses.append(output.losses.detach())
    step.timesteps.append(output.timesteps)


def _update(
    loop: Loop, step: _Step
) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    groups = loop.optimizer.param_groups
    norms = gradient_norms(groups)
    Gate(loop.accelerator).check_gradients(norms, step.ids, step=step.number)
    norm = clip_gradients(groups, norms, loop.optim)
    rates = apply_schedule(groups, loop.schedule, step.number)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)
    return rates, norms, norm


def _result(
    loop: Loop,
    step: _Step,
    rates: dict[str, float],
    norms: dict[str, torch.Tensor],
    norm: torch.Tensor,
    began: float,
    stop: int,
) -> StepResult:
    """One gather carries everything that ranks share."""
    losses = torch.cat(step.losses).double()
    count = len(losses)
    extra = torch.tensor([step.data_seconds, float(stop)], dtype=torch.float64)
    row = torch.cat([losses, torch.cat(step.timesteps).double(), extra.to(losses.device)])
    rows = loop.accelerator.gather(row[None]).cpu()
    all_losses = rows[:, :count].flatten()
    return StepResult(
        step=step.number,
        loss=all_losses.mean().item(),
        grad_norm=norm.item(),
        grad_norm_groups={name: value.item() for name, value in norms.items()},
        lr_groups=rates,
        losses=all_losses.tolist(),
        timesteps=rows[:, count : 2 * count].flatten().long().tolist(),
        seconds=time.perf_counter() - began,
        data_seconds=rows[:, -2].max().item(),
        stop_code=int(rows[:, -1].max().item()),
    )
