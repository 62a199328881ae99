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
from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.guard.finite_gate import BadStateError, Gate, StepFailure
from dit_lora.guard.replay import MicroBatch
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.optim.build import Schedule, apply_schedule
from dit_lora.training.recovery.monitoring import StepWatcher
from dit_lora.training.recovery.recovery import RunRecovery
from dit_lora.training.replayable_batch import BatchPosition, LossFunction, forward, make_replayable
from dit_lora.training.step import StepResult
from dit_lora.training.step_metrics import PendingMetrics, StepMetrics, build_local_metrics

_ALL_GROUPS = "all groups"
# A third value of a row's `bad_data`, which is otherwise 0.0 or 1.0.
_UNREAD_DATA = 2.0
_MAX_WAIT_S = 10.0
"""Seconds to wait for metrics in transit: after an error they may never arrive, because the other rank has ended."""


class RolledBackError(Exception):
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
    """One value per micro-batch: 1.0 if it has a bad sample, 0.0 if not, `_UNREAD_DATA` if it could not be read."""
    read_error: str = ""
    """Reason why this rank could not read its data; empty if it could."""
    data_seconds: float = 0.0
    seconds: float = 0.0
    """Wall time of this step's launch, update and wait. Work of other steps in between is not counted."""

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        """Add the time spent inside the context to this step."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True)
class _PendingStep:
    """A step whose update is queued, and whose metrics are on their way to the host."""

    step: _Step
    metrics: PendingMetrics
    learning_rates: dict[str, float]
    group_names: tuple[str, ...]


@dataclass
class _Progress:
    """Training position: the last confirmed step, and the step whose metrics are still on the device."""

    confirmed_step: int
    """The last step whose metrics were read and found healthy."""
    control: MicroBatch | None = None
    """A micro-batch of that step: a healthy one for comparison."""
    pending: _PendingStep | None = None
    """The following step, once its update is queued."""


def max_resident_micro_batches(accumulate: int) -> int:
    """Upper bound on micro-batches on the device: two steps in flight and one healthy batch kept for comparison."""
    return 2 * accumulate + 1


def _raise_unreadable(step: int, reason: str) -> NoReturn:
    raise UnreadableError(reason or "another rank cannot read its data")


@dataclass(frozen=True)
class Loop:
    """Everything a step needs, constant for the whole run."""

    engine: Engine
    loss_function: LossFunction
    schedule: Schedule
    optim: OptimConfig
    accumulate: int
    seed: int
    recovery: RunRecovery
    watcher: StepWatcher
    on_unreadable: Callable[[int, str], NoReturn] = _raise_unreadable
    """Ends the run on all ranks. Takes the last completed step and why this rank could not read its data, or ""."""
    ranks_per_sample: int = 1
    """Number of ranks that run each sample together (1 without context parallelism)."""
    compute_norms: NormFunction | None = None
    """Computes gradient norms; None uses PyTorch."""
    log_step: Callable[[StepResult], None] = lambda result: None
    """Logs a step without collectives. Used when the next step crashed before `on_step` ran."""
    sync_after: Callable[[int], bool] = lambda step: False
    """True if the host must read this step before the next is launched. Equal on all ranks."""


def train(
    loop: Loop,
    batches: Callable[[int], Iterable[Batch]],
    *,
    start_step: int,
    steps: int,
    get_stop_code: Callable[[], int],
    on_step: Callable[[StepResult], None],
) -> None:
    """Train the steps after `start_step` up to `steps`; `on_step` runs after each, with equal results on all ranks.

    `on_step` sees weights and optimizer as the step left them: at most the next forward and backward are queued.
    `batches(step)` yields the micro-batches of the steps after `step`. A failed step leaves weights and optimizer
    unchanged, and the queued part of the next step is dropped. `loop.recovery` then returns the step to continue from,
    or raises `NonFiniteError` on every rank. If `on_step` raises `RolledBackError`, training continues from its step.
    If a rank cannot read a step's data, `loop.on_unreadable` ends the run.
    """
    # Once: code that evaluates in between restores the mode.
    loop.engine.model.train()
    loop.engine.fix_ddp_bucket_order(lambda: _compute_first_loss(loop, batches(start_step), start_step + 1))
    # Two steps are in flight: while the host reads step n, forward and backward of step n + 1 are queued.
    progress, reader = _Progress(start_step), Reader[Batch]()
    while progress.confirmed_step < steps:
        # A recovery may have rolled back or changed the order: request the batches again, from `confirmed_step`.
        reader.start(batches(progress.confirmed_step))
        for number in range(progress.confirmed_step + 1, steps + 1):
            step = _Step(number, Gate(loop.engine.accelerator))
            if not _launch_step(loop, progress, reader, step, on_step):
                break
            with step.measure_time():
                progress.pending = _update_weights(loop, step, get_stop_code())
            # The last step is read immediately too: there is no next step to launch first.
            if (number == steps or loop.sync_after(number)) and not _finish_pending_step(loop, progress, on_step):
                break


def _compute_first_loss(loop: Loop, batches: Iterable[Batch], number: int) -> torch.Tensor:
    accelerator, reader = loop.engine.accelerator, Reader[Batch]()
    reader.start(batches)
    batch = reader.read_next()[0].to(accelerator.device)
    position = BatchPosition(loop.seed, number, 0, accelerator.process_index)
    return forward(loop.loss_function, loop.engine.model, batch, position).losses.mean()


def _launch_step(
    loop: Loop, progress: _Progress, reader: Reader[Batch], step: _Step, on_step: Callable[[StepResult], None]
) -> bool:
    """Queue a step's forward and backward, then finish the step before: False if batches must be requested again."""
    try:
        with step.measure_time():
            _run_micro_steps(loop, reader, step)
    except (DitLoraError, OSError, RuntimeError):
        # The step before comes first: it was taken, or it failed and this one is repeated. Other ranks may be inside
        # this step's collectives, so neither a recovery nor `on_step` can run collectively.
        if loop.engine.accelerator.num_processes > 1:
            _record_if_taken(loop, progress)
            raise
        if _finish_pending_step(loop, progress, on_step):
            raise
        return False
    return _finish_pending_step(loop, progress, on_step)


def _record_if_taken(loop: Loop, progress: _Progress) -> None:
    """Read the pending step and log it if it was taken, without collectives: another rank may have ended."""
    pending, progress.pending = progress.pending, None
    # If the device itself has failed, its metrics are lost, and the error that ends the run has said so.
    with suppress(torch.AcceleratorError):
        if pending is not None and pending.metrics.wait_until_arrived(_MAX_WAIT_S):
            outcome = _read_metrics(loop, pending)
            if isinstance(outcome, StepResult):
                loop.log_step(outcome)


def _run_micro_steps(loop: Loop, reader: Reader[Batch], step: _Step) -> None:
    with loop.watcher.watch_forward(step.number):
        for micro_step in range(loop.accumulate):
            _run_micro_step(loop, reader, step, micro_step)


def _finish_pending_step(loop: Loop, progress: _Progress, on_step: Callable[[StepResult], None]) -> bool:
    """Handle the pending step's metrics: False if batches must be requested again from `progress.confirmed_step`."""
    pending, progress.pending = progress.pending, None
    if pending is None:
        return True
    outcome = _read_metrics(loop, pending)
    step = pending.step
    if isinstance(outcome, StepResult):
        try:
            on_step(outcome)
            progress.confirmed_step, progress.control = step.number, step.micro_batches[-1]
            return True
        except BadStateError as error:
            # The step was healthy, but the state that it led to is not worth keeping.
            outcome = StepFailure(step.number, error.kind, diagnosis=error.diagnosis)
        except RolledBackError as back:
            # Late kernel parity has restored the state itself: there is no failed step to diagnose.
            loop.engine.discard_gradients()
            progress.confirmed_step = back.step
            return False
    # The next step's gradients may exist: it was launched behind a step that was not taken.
    loop.engine.discard_gradients()
    # Neither weights nor data are at fault, the data could not be read: there is nothing to diagnose.
    if outcome.kind == "unread_data":
        loop.on_unreadable(step.number - 1, step.read_error)
    progress.confirmed_step = loop.recovery.recover(outcome, step.micro_batches, progress.control)
    return False


def _read_metrics(loop: Loop, pending: _PendingStep) -> StepResult | StepFailure:
    """Wait for a step's metrics. The host reads nothing else from a step."""
    with pending.step.measure_time():
        rows = pending.metrics.read()
    failure = _find_failure(rows, pending.step.number, loop.ranks_per_sample)
    return _build_result(rows, pending, loop.ranks_per_sample) if failure is None else failure


def _run_micro_step(loop: Loop, reader: Reader[Batch], step: _Step, micro_step: int) -> None:
    waiting = time.perf_counter()
    accelerator = loop.engine.accelerator
    # A rank whose data failed gets its last batch again: it must meet the collectives of this step first.
    batch, step.read_error = reader.read_next()
    batch = batch.to(accelerator.device)
    bad_data = _UNREAD_DATA if step.read_error else float(bool(batch.faults))
    step.data_seconds += time.perf_counter() - waiting
    position = BatchPosition(loop.seed, step.number, micro_step, accelerator.process_index)
    # A closure over the batch, not activations: a replay costs memory only while it runs, and draws its noise again.
    replayed = replace(batch, random_inputs=None)
    step.micro_batches.append(make_replayable(loop.loss_function, loop.engine.unwrapped_model, replayed, position))
    with loop.engine.micro_step():
        output = forward(loop.loss_function, loop.engine.model, batch, position)
        # Noted and not acted on: reading the flag here would synchronize the host in every micro-step.
        step.gate.record_losses(output.losses, bad_data=bad_data > 0)
        loop.engine.backward(output.losses.mean())
    step.losses.append(output.losses.detach())
    step.timesteps.append(output.timesteps)
    step.bad_data.append(bad_data)


def _update_weights(loop: Loop, step: _Step, stop_code: int) -> _PendingStep:
    """Clip, run the gated optimizer step, and send the metrics. The host knows only the learning rates by then."""
    engine, number = loop.engine, step.number
    # fp64: finite exactly if every element is, where an fp32 sum of squares overflows or loses tiny ones.
    norms = engine.compute_gradient_norms(loop.compute_norms)
    # Before clipping, which multiplies by 1 / norm and would spread one NaN to every gradient.
    gradient_flags = step.gate.record_gradient_norms(norms)
    loop.watcher.collect_gradients(number)
    norm = engine.clip_gradients(norms, loop.optim, loop.watcher.get_clip_bound)
    # A function of the step and not a scheduler: a step that is taken again cannot advance it.
    rates = apply_schedule(engine.optimizer.param_groups, loop.schedule, number)
    # The update overwrites tensors that a snapshot's copy may still read, so the watcher comes first.
    loop.watcher.before_update(number)
    # One all-reduce of the flag, which every rank meets: all take this step or none does.
    engine.step(step.gate.reduce_flags())
    loop.watcher.after_update(number)
    # Queued behind the update: flags and norms stay on the device until the gather.
    row = build_local_metrics(
        step.losses,
        step.timesteps,
        {**norms, _ALL_GROUPS: norm},
        gradient_flags,
        engine.has_nonfinite_weights(),
        step.bad_data,
        step.data_seconds,
        stop_code,
    )
    return _PendingStep(step, row.start_gather(engine.accelerator), rates, tuple(norms))


def _find_failure(metrics: StepMetrics, step: int, ranks_per_sample: int) -> StepFailure | None:
    """The failure of this step, equal on all ranks; None if it is healthy."""
    # One column per micro-step, one row per rank.
    ranks, accumulate = metrics.bad_data.shape
    # First: the repeated micro-batch that stood in for unread data says nothing about the model.
    if (metrics.bad_data == _UNREAD_DATA).any():
        return StepFailure(step, "unread_data")
    bad_losses = ~torch.isfinite(metrics.losses).view(ranks, accumulate, -1).all(2)
    bad_data = metrics.bad_data > 0
    # (samples' ranks, micro-steps): with context parallelism the first rank stands for all that share a sample.
    bad = (bad_losses | bad_data).view(-1, ranks_per_sample, accumulate).any(1)
    failed_positions = [(ranks_per_sample * rank, micro_step) for rank, micro_step in bad.nonzero().tolist()]
    if failed_positions:
        return StepFailure(step, "non_finite_loss" if bad_losses.any() else "bad_data", tuple(failed_positions))
    # In the order of causes: a bad gradient makes bad weights too.
    kinds = ("non_finite_gradient", "zero_gradient", "non_finite_weights")
    raised = (metrics.flags > 0).any(0).tolist()
    return next((StepFailure(step, kind) for kind, is_raised in zip(kinds, raised, strict=True) if is_raised), None)


def _build_result(metrics: StepMetrics, pending: _PendingStep, ranks_per_sample: int) -> StepResult:
    # Ranks that share a sample report the same loss: one row of each group of `ranks_per_sample` is counted.
    losses = metrics.losses[::ranks_per_sample].flatten()
    # Norms are equal on all ranks; the last one is over all groups.
    *norms, norm = metrics.norms[0].tolist()
    return StepResult(
        step=pending.step.number,
        loss=losses.mean().item(),
        grad_norm=norm,
        grad_norm_groups=dict(zip(pending.group_names, norms, strict=True)),
        lr_groups=pending.learning_rates,
        losses=losses.tolist(),
        timesteps=metrics.timesteps[::ranks_per_sample].flatten().long().tolist(),
        seconds=pending.step.seconds,
        data_seconds=metrics.data_seconds.max().item(),
        stop_code=int(metrics.stop_codes.max().item()),
    )
