"""The loop: one function over a family's losses. No family can override the step, so none can lose the gate.

Order in a step (docs/design.md): losses noted -> backward -> pre-clip gradients noted -> clip -> one flag over all
ranks -> optimizer, gated on the device -> one gather of metrics and flags, the step's only read by the host.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from dit_lora.data.loader import Batch
from dit_lora.data.media import UnreadableError
from dit_lora.data.reading import Reader
from dit_lora.numerics.gate import Gate, PoisonedStateError, Trip
from dit_lora.numerics.replay import MicroBatch
from dit_lora.numerics.shards import local
from dit_lora.train_config import OptimConfig
from dit_lora.training.engine import Engine
from dit_lora.training.optimizer import Schedule, apply_schedule
from dit_lora.training.replay import LossFunction, Place, forward, replayable

_ALL = "all groups"
_UNREAD = 2.0


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


class WentBackError(Exception):
    """What `on_step` raises, on every rank, once the run's state is that of an earlier step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step
        """After which training goes on."""


class Recovery(Protocol):
    """What is done about a step that tripped."""

    def recover(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> int:
        """The step after which training goes on, one before the tripped one or earlier; or raise.

        `control` is a micro-batch of the last healthy step.
        """


class Watcher(Protocol):
    """What looks at a step without changing it."""

    def forward(self, step: int) -> Any:
        """A context around a step's micro-steps."""

    def gradients(self, step: int, norms: Mapping[str, torch.Tensor]) -> None:
        """After backward, before clipping."""

    def before_update(self, step: int) -> None: ...

    def after_update(self, step: int) -> None: ...

    def clip(self, group: str) -> float | None:
        """A bound on the gradient norm, known before this step, or None."""


@dataclass
class _Step:
    """What is collected while a step's micro-steps run."""

    number: int
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    timesteps: list[torch.Tensor] = field(default_factory=list)
    bad_data: list[float] = field(default_factory=list)
    """Tells of each micro-batch whether a sample of it is bad, or `_UNREAD`."""
    unread: str = ""
    """Why this rank could not read its data."""
    data_seconds: float = 0.0


def _unreadable(step: int, why: str) -> NoReturn:
    raise UnreadableError(why or "another rank cannot read its data")


@dataclass(frozen=True)
class Loop:
    """What every step needs."""

    engine: Engine
    losses: LossFunction
    schedule: Schedule
    optim: OptimConfig
    accumulate: int
    seed: int
    recovery: Recovery
    watcher: Watcher
    unreadable: Callable[[int, str], NoReturn] = _unreadable
    """Ends the run on all ranks, given the last step taken and why this rank could not read its data, if so."""
    copies: int = 1
    """Ranks that run each sample together."""

    @cached_property
    def bare(self) -> nn.Module:
        """The model as replays run it, without DDP."""
        return self.engine.bare


def train(
    loop: Loop,
    batches: Callable[[int], Iterable[Batch]],
    *,
    start_step: int,
    steps: int,
    stop_asked: Callable[[], int],
    on_step: Callable[[StepResult], None],
) -> None:
    """Take the steps after `start_step` up to `steps`; `on_step` runs after each with equal results on all ranks.

    `batches(step)` gives the micro-batches of the steps after `step`. A step that trips leaves weights and
    optimizer as they were; `loop.recovery` says where to go on, or raises `NonFiniteError` on every rank. So does an
    `on_step` that raises `WentBackError`. A step whose data some rank could not read ends the run, by
    `loop.unreadable`.
    """
    loop.engine.model.train()
    loop.engine.warm_up(lambda: _first_loss(loop, batches(start_step), start_step + 1))
    done, control, reader = start_step, None, Reader[Batch]()
    while done < steps:
        reader.begin(batches(done))
        for number in range(done + 1, steps + 1):
            outcome, step = _take(loop, reader, number, stop_asked)
            if isinstance(outcome, Trip):
                if outcome.kind == "unread_data":
                    loop.unreadable(number - 1, step.unread)
                done = loop.recovery.recover(outcome, step.micro_batches, control)
                break
            try:
                on_step(outcome)
            except PoisonedStateError as error:
                # The step was healthy, and what it led to is not worth keeping.
                trip = Trip(number, error.kind, verdict=error.verdict)
                done = loop.recovery.recover(trip, step.micro_batches, control)
                break
            except WentBackError as back:
                done = back.step
                break
            done, control = number, step.micro_batches[-1]


def _first_loss(loop: Loop, batches: Iterable[Batch], number: int) -> torch.Tensor:
    """Of this rank's first micro-batch."""
    accelerator = loop.engine.accelerator
    reader = Reader[Batch]()
    reader.begin(batches)
    batch = reader.next()[0].to(accelerator.device)
    place = Place(loop.seed, number, 0, accelerator.process_index)
    return forward(loop.losses, loop.engine.model, batch, place).losses.mean()


def _take(
    loop: Loop, reader: Reader[Batch], number: int, stop_asked: Callable[[], int]
) -> tuple[StepResult | Trip, _Step]:
    began = time.perf_counter()
    step, gate = _Step(number), Gate(loop.engine.accelerator)
    with loop.watcher.forward(number):
        for micro_step in range(loop.accumulate):
            _micro_step(loop, gate, reader, step, micro_step)
    rates, norms, norm, poisoned = _update(loop, gate, number)
    rows = _gather(loop, step, {**norms, _ALL: norm}, poisoned, stop_asked())
    trip = _trip(rows, step, loop.accumulate, loop.copies)
    if trip is not None:
        return trip, step
    return _result(rows, step, rates, [*norms], began, loop.copies), step


def _micro_step(
    loop: Loop, gate: Gate, reader: Reader[Batch], step: _Step, micro_step: int
) -> None:
    waiting = time.perf_counter()
    accelerator = loop.engine.accelerator
    batch, step.unread = reader.next()
    batch = batch.to(accelerator.device)
    bad_data = _UNREAD if step.unread else float(bool(batch.faults))
    step.data_seconds += time.perf_counter() - waiting
    place = Place(loop.seed, step.number, micro_step, accelerator.process_index)
    step.micro_batches.append(replayable(loop.losses, loop.bare, batch, place))
    with loop.engine.micro_step():
        output = forward(loop.losses, loop.engine.model, batch, place)
        gate.losses(output.losses, bad_data=bad_data > 0)
        loop.engine.backward(output.losses.mean())
    step.losses.append(output.losses.detach())
    step.timesteps.append(output.timesteps)
    step.bad_data.append(bad_data)


def _update(
    loop: Loop, gate: Gate, number: int
) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Clip and step, unless the gate is shut; what comes back is still on the device."""
    engine = loop.engine
    norms = engine.gradient_norms()
    gate.gradients(norms)
    loop.watcher.gradients(number, norms)
    norm = engine.clip(norms, loop.optim, loop.watcher.clip)
    rates = apply_schedule(engine.optimizer.param_groups, loop.schedule, number)
    loop.watcher.before_update(number)
    engine.step(gate.agreed())
    loop.watcher.after_update(number)
    return rates, norms, norm, engine.weights_are_bad()


def _gather(
    loop: Loop,
    step: _Step,
    norms: Mapping[str, torch.Tensor],
    poisoned: torch.Tensor,
    stop: int,
) -> torch.Tensor:
    """One gather and one copy to the host carry everything that ranks share: a row of doubles a rank."""
    losses = torch.cat(step.losses).double()
    stacked = torch.stack([local(norm) for norm in norms.values()])
    flags = [(~torch.isfinite(stacked)).any(), (stacked == 0).all(), poisoned]
    known = torch.tensor([*step.bad_data, step.data_seconds, float(stop)], dtype=torch.float64)
    row = [
        losses,
        torch.cat(step.timesteps).double(),
        torch.stack(flags).double(),
        stacked.double(),
        known.to(losses.device, non_blocking=True),
    ]
    return loop.engine.accelerator.gather(torch.cat(row)[None]).cpu()


def _trip(rows: torch.Tensor, step: _Step, accumulate: int, copies: int) -> Trip | None:
    """What tripped, from the gathered rows, equal on all ranks; None for a healthy step."""
    count = sum(len(losses) for losses in step.losses)
    bad_losses = ~torch.isfinite(rows[:, :count]).view(len(rows), accumulate, -1).all(2)
    bad_data = rows[:, -2 - accumulate : -2] > 0
    if (rows[:, -2 - accumulate : -2] == _UNREAD).any():
        return Trip(step.number, "unread_data")
    gradient, zero, weights = (rows[:, 2 * count : 2 * count + 3] > 0).any(0).tolist()
    # The first of the ranks that share a sample stands for them.
    found = (bad_losses | bad_data).view(-1, copies, accumulate).any(1)
    where = [(copies * rank, micro) for rank, micro in found.nonzero().tolist()]
    if where:
        kind = "non_finite_loss" if bad_losses.any() else "bad_data"
        return Trip(step.number, kind, tuple(where))
    kinds = {
        "non_finite_gradient": gradient,
        "zero_gradient": zero,
        "non_finite_weights": weights,
    }
    return next((Trip(step.number, kind) for kind, is_so in kinds.items() if is_so), None)


def _result(
    rows: torch.Tensor,
    step: _Step,
    rates: dict[str, float],
    groups: Sequence[str],
    began: float,
    copies: int,
) -> StepResult:
    count = sum(len(losses) for losses in step.losses)
    losses = rows[::copies, :count].flatten()
    first = 2 * count + 3  # the norms are those of all ranks, on each
    norms = dict(
        zip([*groups, _ALL], rows[0, first : first + len(groups) + 1].tolist(), strict=True)
    )
    return StepResult(
        step=step.number,
        loss=losses.mean().item(),
        grad_norm=norms.pop(_ALL),
        grad_norm_groups=norms,
        lr_groups=rates,
        losses=losses.tolist(),
        timesteps=rows[::copies, count : 2 * count].flatten().long().tolist(),
        seconds=time.perf_counter() - began,
        data_seconds=rows[:, -2].max().item(),
        stop_code=int(rows[:, -1].max().item()),
    )
