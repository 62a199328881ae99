"""The training loop: one function over a family's losses. No family can override the step, so none can skip the gate.

Order within a step (docs/design.md): losses noted -> backward -> pre-clip gradients noted -> clip -> one flag over all
ranks -> optimizer, gated on the device -> one gather of metrics and flags, the only values of a step the host reads.
The host reads them a step late: after the next step's forward and backward are queued, and before its optimizer.
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
# A third value of a row's `bad_data`, which is otherwise 0.0 or 1.0.
_UNREAD = 2.0
_MOST_WAIT = 10.0
"""Seconds to wait for metrics in transit: after an error they may never arrive, because the other rank has ended."""


class WentBackError(Exception):
    """Raised by `on_step` on every rank after the run was rolled back to an earlier step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step
        """The step after which training goes on."""


@dataclass
class _Step:
    """A step's losses, timesteps and gate, collected over its micro-steps."""

    number: int
    gate: Gate
    """One gate per step: its flags combine all micro-steps."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    timesteps: list[torch.Tensor] = field(default_factory=list)
    bad_data: list[float] = field(default_factory=list)
    """One value per micro-batch: 1.0 if it has a bad sample, 0.0 if not, `_UNREAD` if it could not be read."""
    unread: str = ""
    """Reason why this rank could not read its data; empty if it could."""
    data_seconds: float = 0.0
    seconds: float = 0.0
    """Wall time of this step's launch, update and wait. Work of other steps in between is not counted."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent inside the context to this step."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True)
class _Sent:
    """A step whose update is queued, and whose metrics are on their way to the host."""

    step: _Step
    rows: SentRows
    rates: dict[str, float]
    groups: tuple[str, ...]


@dataclass
class _Progress:
    """Training position: the last confirmed step, and the step whose metrics are still on the device."""

    done: int
    """The last step whose metrics were read and found healthy."""
    control: MicroBatch | None = None
    """A micro-batch of that step: a healthy one for comparison."""
    sent: _Sent | None = None
    """The following step, once its update is queued."""


def micro_batches_held(accumulate: int) -> int:
    """Upper bound on micro-batches resident on the device: two steps in flight plus one healthy batch kept for
    comparison.
    """
    return 2 * accumulate + 1


def _unreadable(step: int, why: str) -> NoReturn:
    raise UnreadableError(why or "another rank cannot read its data")


@dataclass(frozen=True)
class Loop:
    """Everything a step needs, constant for the whole run."""

    engine: Engine
    losses: LossFunction
    schedule: Schedule
    optim: OptimConfig
    accumulate: int
    seed: int
    recovery: RunRecovery
    watcher: StepWatcher
    unreadable: Callable[[int, str], NoReturn] = _unreadable
    """Ends the run on all ranks. Takes the last completed step and why this rank could not read its data, or ""."""
    copies: int = 1
    """Number of ranks that run each sample together (1 without context parallelism)."""
    norms: Norms | None = None
    """Computes gradient norms; None uses PyTorch."""
    note: Callable[[StepResult], None] = lambda result: None
    """Logs a step without collectives. Used when the next step crashed before `on_step` ran."""
    at_once: Callable[[int], bool] = lambda step: False
    """True if the host must read this step before the next is launched, because it needs the memory or more than the
    metrics. Equal on all ranks.
    """


def train(
    loop: Loop,
    batches: Callable[[int], Iterable[Batch]],
    *,
    start_step: int,
    steps: int,
    stop_asked: Callable[[], int],
    on_step: Callable[[StepResult], None],
) -> None:
    """Train the steps after `start_step` up to `steps`; `on_step` runs after each, with equal results on all ranks.

    `on_step` sees weights and optimizer as the step left them: at most the next forward and backward are queued.
    `batches(step)` yields the micro-batches of the steps after `step`. A failed step leaves weights and optimizer
    unchanged, and the queued part of the next step is dropped. `loop.recovery` then returns the step to continue from,
    or raises `NonFiniteError` on every rank. If `on_step` raises `WentBackError`, training continues from its step. If
    a rank cannot read a step's data, `loop.unreadable` ends the run.
    """
    # Once: code that evaluates in between restores the mode.
    loop.engine.model.train()
    loop.engine.warm_up(lambda: _first_loss(loop, batches(start_step), start_step + 1))
    # Two steps are in flight: while the host reads step n, forward and backward of step n + 1 are queued.
    progress, reader = _Progress(start_step), Reader[Batch]()
    while progress.done < steps:
        # A recovery may have rolled back or changed the order: request the batches again, from `done`.
        reader.begin(batches(progress.done))
        for number in range(progress.done + 1, steps + 1):
            step = _Step(number, Gate(loop.engine.accelerator))
            if not _launched(loop, progress, reader, step, on_step):
                break
            with step.timed():
                progress.sent = _update(loop, step, stop_asked())
            # The last step is read immediately too: there is no next step to launch first.
            if (number == steps or loop.at_once(number)) and not _settled(loop, progress, on_step):
                break


def _first_loss(loop: Loop, batches: Iterable[Batch], number: int) -> torch.Tensor:
    """Mean loss of this rank's first micro-batch."""
    accelerator = loop.engine.accelerator
    reader = Reader[Batch]()
    reader.begin(batches)
    batch = reader.next()[0].to(accelerator.device)
    position = Place(loop.seed, number, 0, accelerator.process_index)
    return forward(loop.losses, loop.engine.model, batch, position).losses.mean()


def _launched(
    loop: Loop,
    progress: _Progress,
    reader: Reader[Batch],
    step: _Step,
    on_step: Callable[[StepResult], None],
) -> bool:
    """Queue a step's forward and backward, then finish the step before it. Returns False if batches must be requested
    again.
    """
    try:
        with step.timed():
            _launch(loop, reader, step)
    except (DitLoraError, OSError, RuntimeError):
        # The step before comes first: it was taken, or it failed and this one is repeated. Other ranks may be inside
        # this step's collectives, so neither a recovery nor `on_step` can run collectively.
        if loop.engine.accelerator.num_processes > 1:
            _tell_taken(loop, progress)
            raise
        if _settled(loop, progress, on_step):
            raise
        return False
    return _settled(loop, progress, on_step)


def _tell_taken(loop: Loop, progress: _Progress) -> None:
    """Read the pending step and log it if it was taken, without collectives: another rank may have ended."""
    pending, progress.sent = progress.sent, None
    # If the device itself has failed, its metrics are lost, and the error that ends the run has said so.
    with suppress(torch.AcceleratorError):
        if pending is not None and pending.rows.arrives(_MOST_WAIT):
            outcome = _read(loop, pending)
            if isinstance(outcome, StepResult):
                loop.note(outcome)


def _launch(loop: Loop, reader: Reader[Batch], step: _Step) -> None:
    with loop.watcher.forward(step.number):
        for micro_step in range(loop.accumulate):
            _micro_step(loop, reader, step, micro_step)


def _settled(loop: Loop, progress: _Progress, on_step: Callable[[StepResult], None]) -> bool:
    """Wait for the pending step's metrics and handle them. Returns False if batches must be requested again from
    `progress.done`.
    """
    pending, progress.sent = progress.sent, None
    if pending is None:
        return True
    outcome = _read(loop, pending)
    step = pending.step
    if isinstance(outcome, StepResult):
        try:
            on_step(outcome)
            progress.done, progress.control = step.number, step.micro_batches[-1]
            return True
        except PoisonedStateError as error:
            # The step was healthy, but the state that it led to is not worth keeping.
            outcome = Trip(step.number, error.kind, verdict=error.verdict)
        except WentBackError as back:
            # Late kernel parity has restored the state itself: there is no failed step to diagnose.
            loop.engine.discard()
            progress.done = back.step
            return False
    # The next step's gradients may exist: it was launched behind a step that was not taken.
    loop.engine.discard()
    # Neither weights nor data are at fault, the data could not be read: there is nothing to diagnose.
    if outcome.kind == "unread_data":
        loop.unreadable(step.number - 1, step.unread)
    progress.done = loop.recovery.recover(outcome, step.micro_batches, progress.control)
    return False


def _read(loop: Loop, sent: _Sent) -> StepResult | Trip:
    """Wait for a step's metrics. The host reads nothing else from a step."""
    with sent.step.timed():
        rows = sent.rows.read()
    failure = _trip(rows, sent.step.number, loop.copies)
    return _result(rows, sent, loop.copies) if failure is None else failure


def _micro_step(loop: Loop, reader: Reader[Batch], step: _Step, micro_step: int) -> None:
    waiting = time.perf_counter()
    accelerator = loop.engine.accelerator
    # A rank whose data failed gets its last batch again: it must meet the collectives of this step first.
    batch, step.unread = reader.next()
    batch = batch.to(accelerator.device)
    bad_data = _UNREAD if step.unread else float(bool(batch.faults))
    step.data_seconds += time.perf_counter() - waiting
    position = Place(loop.seed, step.number, micro_step, accelerator.process_index)
    # A closure over the batch, not a copy of activations: a replay costs memory only while it runs, and draws its
    # noise again.
    batch_to_replay = replace(batch, ahead=None)
    step.micro_batches.append(replayable(loop.losses, loop.engine.bare, batch_to_replay, position))
    with loop.engine.micro_step():
        output = forward(loop.losses, loop.engine.model, batch, position)
        # Noted and not acted on: reading the flag here would synchronize the host in every micro-step.
        step.gate.losses(output.losses, bad_data=bad_data > 0)
        loop.engine.backward(output.losses.mean())
    step.losses.append(output.losses.detach())
    step.timesteps.append(output.timesteps)
    step.bad_data.append(bad_data)


def _update(loop: Loop, step: _Step, stop_code: int) -> _Sent:
    """Clip, run the gated optimizer step, and send the metrics. The host knows only the learning rates at this
    point.
    """
    engine, number = loop.engine, step.number
    # fp64: finite exactly if every element is, where an fp32 sum of squares overflows or loses tiny ones.
    norms = engine.gradient_norms(loop.norms)
    # Before clipping, which multiplies by 1 / norm and would spread one NaN to every gradient.
    gradient_flags = step.gate.gradients(norms)
    loop.watcher.gradients(number)
    norm = engine.clip(norms, loop.optim, loop.watcher.clip)
    # A function of the step and not a scheduler: a step that is taken again cannot advance it.
    rates = apply_schedule(engine.optimizer.param_groups, loop.schedule, number)
    # The update overwrites tensors that a snapshot's copy may still read, so the watcher comes first.
    loop.watcher.before_update(number)
    # One all-reduce of the flag, which every rank meets: all take this step or none does.
    engine.step(step.gate.agreed())
    loop.watcher.after_update(number)
    # Queued behind the update: flags and norms stay on the device until the gather.
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
    """The failure of this step, equal on all ranks; None if it is healthy."""
    # One column per micro-step, one row per rank.
    ranks, accumulate = rows.bad_data.shape
    # First: the repeated micro-batch that stood in for unread data says nothing about the model.
    if (rows.bad_data == _UNREAD).any():
        return Trip(step, "unread_data")
    bad_losses = ~torch.isfinite(rows.losses).view(ranks, accumulate, -1).all(2)
    bad_data = rows.bad_data > 0
    # With context parallelism the first of the ranks that share a sample stands for them: (samples' ranks,
    # micro-steps).
    bad = (bad_losses | bad_data).view(-1, copies, accumulate).any(1)
    failed_positions = [(copies * rank, micro_step) for rank, micro_step in bad.nonzero().tolist()]
    if failed_positions:
        return Trip(
            step, "non_finite_loss" if bad_losses.any() else "bad_data", tuple(failed_positions)
        )
    # In the order of causes: a bad gradient makes bad weights too.
    kinds = ("non_finite_gradient", "zero_gradient", "non_finite_weights")
    raised = (rows.flags > 0).any(0).tolist()
    return next(
        (Trip(step, kind) for kind, is_raised in zip(kinds, raised, strict=True) if is_raised), None
    )


def _result(rows: StepRows, sent: _Sent, copies: int) -> StepResult:
    # Ranks that share a sample report the same loss: one row of each group of `copies` is counted.
    losses = rows.losses[::copies].flatten()
    # Norms are equal on all ranks; the last one is over all groups.
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
