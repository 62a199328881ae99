"""The loop: one function over a family's losses. No family can override the step, so none can lose the gate.

Order in a step (docs/design.md): losses noted -> backward -> pre-clip gradients noted -> clip -> one flag over all
ranks -> optimizer, gated on the device -> one gather of metrics and flags, which is all that the host reads of a step.
The host reads it a step late: after the next step's forward and backward are queued, and before its optimizer.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from dit_lora.config.optim import OptimConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.data.loading.reading import Reader
from dit_lora.data.storage import UnreadableError
from dit_lora.errors import DitLoraError
from dit_lora.fuse.gradient_norms import Norms
from dit_lora.guard.gate import Gate, PoisonedStateError, Trip
from dit_lora.guard.replay import MicroBatch
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.guarding.watch import StepWatcher
from dit_lora.training.micro_batch import LossFunction, Place, forward, replayable
from dit_lora.training.optim.build import Schedule, apply_schedule
from dit_lora.training.step import StepResult
from dit_lora.training.step_rows import SentRows, StepRows, own_row

_ALL = "all groups"
# Beside 0.0 and 1.0 in a row's `bad_data`.
_UNREAD = 2.0
_MOST_WAIT = 10.0
"""Seconds for a row that is on its way: after an error it may never come, from a rank that has ended."""


class WentBackError(Exception):
    """Raised by `on_step` on every rank once the run's state is that of an earlier step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step
        """The step after which training goes on."""


@dataclass
class _Step:
    """Collects what a step's micro-steps give, and what its update leaves."""

    number: int
    gate: Gate
    """A gate for each step: its flags are those of all micro-steps together."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    timesteps: list[torch.Tensor] = field(default_factory=list)
    bad_data: list[float] = field(default_factory=list)
    """A mark for each micro-batch: 1.0 if a sample of it is bad, 0.0 if none is, `_UNREAD` if it was not read."""
    unread: str = ""
    """The reason why this rank could not read its data; empty if it could."""
    data_seconds: float = 0.0
    seconds: float = 0.0
    """Seconds in which this step was launched, updated and waited for: what others are given in between is theirs."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what happens within it with this step."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True)
class _Sent:
    """A step whose update is queued, and whose row is on its way to the host."""

    step: _Step
    rows: SentRows
    rates: dict[str, float]
    groups: tuple[str, ...]


@dataclass
class _Progress:
    """The point that training has come to, and what of it the host does not know yet."""

    done: int
    """The last step that was read and found healthy."""
    control: MicroBatch | None = None
    """A micro-batch of it."""
    sent: _Sent | None = None
    """The step after it, once its update is queued."""


def micro_batches_held(accumulate: int) -> int:
    """Upper bound on micro-batches on the device: two steps in flight, and one healthy batch kept for comparison."""
    return 2 * accumulate + 1


def _unreadable(step: int, why: str) -> NoReturn:
    raise UnreadableError(why or "another rank cannot read its data")


@dataclass(frozen=True)
class Loop:
    """Everything that a step needs, for the whole run."""

    engine: Engine
    losses: LossFunction
    schedule: Schedule
    optim: OptimConfig
    accumulate: int
    seed: int
    recovery: RunRecovery
    watcher: StepWatcher
    unreadable: Callable[[int, str], NoReturn] = _unreadable
    """Ends the run on all ranks, given the last step taken and why this rank could not read its data, if so."""
    copies: int = 1
    """Number of ranks that run each sample together (1 without context parallelism)."""
    norms: Norms | None = None
    """Computes gradient norms; PyTorch does where it is None."""
    note: Callable[[StepResult], None] = lambda result: None
    """Writes a step down without other ranks, if the next step failed before `on_step` could be called."""
    at_once: Callable[[int], bool] = lambda step: False
    """True if the host must read this step before the next begins, because it needs the memory or more than the row.
    Equal on all ranks."""


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

    It finds weights and optimizer as the step left them: of the next one, forward and backward are queued at most.

    `batches(step)` gives the micro-batches of the steps after `step`. A failed step leaves weights and optimizer
    unchanged, and the queued part of the next step is dropped. `loop.recovery` then returns the step to go on from, or
    raises `NonFiniteError` on every rank. An `on_step` that raises `WentBackError` has the same effect. If a rank
    cannot read a step's data, `loop.unreadable` ends the run.
    """
    # Once: whoever evaluates in between puts the mode back.
    loop.engine.model.train()
    loop.engine.warm_up(lambda: _first_loss(loop, batches(start_step), start_step + 1))
    progress, reader = _Progress(start_step), Reader[Batch]()
    while progress.done < steps:
        # A recovery may have gone back or changed the order: batches are asked for anew from `done`.
        reader.begin(batches(progress.done))
        for number in range(progress.done + 1, steps + 1):
            step = _Step(number, Gate(loop.engine.accelerator))
            if not _launched(loop, progress, reader, step, on_step):
                break
            with step.timed():
                progress.sent = _update(loop, step, stop_asked())
            # The last is read at once too: there is nothing to launch before.
            if (number == steps or loop.at_once(number)) and not _settled(loop, progress, on_step):
                break


def _first_loss(loop: Loop, batches: Iterable[Batch], number: int) -> torch.Tensor:
    """Return the mean loss of this rank's first micro-batch."""
    accelerator = loop.engine.accelerator
    reader = Reader[Batch]()
    reader.begin(batches)
    batch = reader.next()[0].to(accelerator.device)
    place = Place(loop.seed, number, 0, accelerator.process_index)
    return forward(loop.losses, loop.engine.model, batch, place).losses.mean()


def _launched(
    loop: Loop,
    progress: _Progress,
    reader: Reader[Batch],
    step: _Step,
    on_step: Callable[[StepResult], None],
) -> bool:
    """Queue a step's forward and backward, then settle the step before it; return whether training goes on with it."""
    try:
        with step.timed():
            _launch(loop, reader, step)
    except (DitLoraError, OSError, RuntimeError):
        # The step before comes first: it was taken, or it tripped and this one is taken anew. Other ranks may be in
        # the middle of this step's collectives, and cannot be asked for a recovery, nor for what may follow a step.
        if loop.engine.accelerator.num_processes > 1:
            _tell_taken(loop, progress)
            raise
        if _settled(loop, progress, on_step):
            raise
        return False
    return _settled(loop, progress, on_step)


def _tell_taken(loop: Loop, progress: _Progress) -> None:
    """Read the step that was sent and note it, if it was taken, without other ranks: one of them may have ended."""
    sent, progress.sent = progress.sent, None
    # Where the device itself has failed, its rows cannot be had, and the error that ends the run has said so.
    with suppress(torch.AcceleratorError):
        if sent is not None and sent.rows.arrives(_MOST_WAIT):
            outcome = _read(loop, sent)
            if isinstance(outcome, StepResult):
                loop.note(outcome)


def _launch(loop: Loop, reader: Reader[Batch], step: _Step) -> None:
    with loop.watcher.forward(step.number):
        for micro_step in range(loop.accumulate):
            _micro_step(loop, reader, step, micro_step)


def _settled(loop: Loop, progress: _Progress, on_step: Callable[[StepResult], None]) -> bool:
    """Read the step that was sent, if there is one, and act on it; return whether training goes on after it."""
    sent, progress.sent = progress.sent, None
    if sent is None:
        return True
    outcome = _read(loop, sent)
    step = sent.step
    if isinstance(outcome, StepResult):
        try:
            on_step(outcome)
            progress.done, progress.control = step.number, step.micro_batches[-1]
            return True
        except PoisonedStateError as error:
            # The step was healthy, and what it led to is not worth keeping.
            outcome = Trip(step.number, error.kind, verdict=error.verdict)
        except WentBackError as back:
            # Late kernel parity has put back the state itself: there is no trip to diagnose.
            loop.engine.discard()
            progress.done = back.step
            return False
    # Gradients of the next step may be there: it comes after one that was not taken.
    loop.engine.discard()
    # No weight is at fault and the data cannot be had: there is nothing to diagnose.
    if outcome.kind == "unread_data":
        loop.unreadable(step.number - 1, step.unread)
    progress.done = loop.recovery.recover(outcome, step.micro_batches, progress.control)
    return False


def _read(loop: Loop, sent: _Sent) -> StepResult | Trip:
    """Wait for a step's row, all that the host reads of a step."""
    with sent.step.timed():
        rows = sent.rows.read()
    trip = _trip(rows, sent.step.number, loop.copies)
    return _result(rows, sent, loop.copies) if trip is None else trip


def _micro_step(loop: Loop, reader: Reader[Batch], step: _Step, micro_step: int) -> None:
    waiting = time.perf_counter()
    accelerator = loop.engine.accelerator
    # A rank whose data failed gets its last batch again: it must meet the collectives of this step first.
    batch, step.unread = reader.next()
    batch = batch.to(accelerator.device)
    bad_data = _UNREAD if step.unread else float(bool(batch.faults))
    step.data_seconds += time.perf_counter() - waiting
    place = Place(loop.seed, step.number, micro_step, accelerator.process_index)
    # A closure over the batch, not a copy of activations: replays cost memory only when one runs, and draw anew.
    again = replace(batch, ahead=None)
    step.micro_batches.append(replayable(loop.losses, loop.engine.bare, again, place))
    with loop.engine.micro_step():
        output = forward(loop.losses, loop.engine.model, batch, place)
        # Noted and not acted on: to look at the flag here would cost a read by the host in every micro-step.
        step.gate.losses(output.losses, bad_data=bad_data > 0)
        loop.engine.backward(output.losses.mean())
    step.losses.append(output.losses.detach())
    step.timesteps.append(output.timesteps)
    step.bad_data.append(bad_data)


def _update(loop: Loop, step: _Step, stop_code: int) -> _Sent:
    """Clip, take the step unless the gate is shut, and send the row. Only learning rates are on the host by then."""
    engine, number = loop.engine, step.number
    # fp64: finite exactly if every element is, where an fp32 sum of squares overflows or loses tiny ones.
    norms = engine.gradient_norms(loop.norms)
    # Before clipping, which multiplies by 1 / norm and would spread one NaN to every gradient.
    gradient_flags = step.gate.gradients(norms)
    loop.watcher.gradients(number)
    norm = engine.clip(norms, loop.optim, loop.watcher.clip)
    # A function of the step and not a scheduler: a step that is taken again cannot advance it.
    rates = apply_schedule(engine.optimizer.param_groups, loop.schedule, number)
    # The update overwrites what a snapshot's copy may still read, so that the watcher comes first.
    loop.watcher.before_update(number)
    # One all-reduce of the flag, which every rank meets: all take this step or none does.
    engine.step(step.gate.agreed())
    loop.watcher.after_update(number)
    row = own_row(
        step.losses,
        step.timesteps,
        {**norms, _ALL: norm},
        gradient_flags,
        engine.weights_are_bad(),
        step.bad_data,
        step.data_seconds,
        stop_code,
    )
    return _Sent(step, row.gather(engine.accelerator), rates, tuple(norms))


def _trip(rows: StepRows, step: int, copies: int) -> Trip | None:
    """Return what tripped, equal on all ranks; None for a healthy step."""
    ranks, accumulate = rows.bad_data.shape
    # First: the repeated micro-batch that stood in for unread data says nothing about the model.
    if (rows.bad_data == _UNREAD).any():
        return Trip(step, "unread_data")
    bad_losses = ~torch.isfinite(rows.losses).view(ranks, accumulate, -1).all(2)
    bad_data = rows.bad_data > 0
    # The first of the ranks that share a sample stands for them.
    bad = (bad_losses | bad_data).view(-1, copies, accumulate).any(1)
    where = [(copies * rank, micro_step) for rank, micro_step in bad.nonzero().tolist()]
    if where:
        return Trip(step, "non_finite_loss" if bad_losses.any() else "bad_data", tuple(where))
    # In the order of causes: a bad gradient makes bad weights too.
    kinds = ("non_finite_gradient", "zero_gradient", "non_finite_weights")
    raised = (rows.flags > 0).any(0).tolist()
    return next(
        (Trip(step, kind) for kind, is_raised in zip(kinds, raised, strict=True) if is_raised), None
    )


def _result(rows: StepRows, sent: _Sent, copies: int) -> StepResult:
    # Ranks that share a sample report the same loss: one row of each group of `copies` is counted.
    losses = rows.losses[::copies].flatten()
    *norms, norm = rows.norms[0].tolist()
    return StepResult(
        step=sent.step.number,
        loss=losses.mean().item(),
        grad_norm=norm,
        grad_norm_groups=dict(zip(sent.groups, norms, strict=True)),
        lr_groups=sent.rates,
        losses=losses.tolist(),
        timesteps=rows.timesteps[::copies].flatten().long().tolist(),
        seconds=sent.step.seconds,
        data_seconds=rows.data_seconds.max().item(),
        stop_code=int(rows.stop_codes.max().item()),
    )
