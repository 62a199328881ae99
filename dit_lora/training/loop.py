"""The training loop. `_train_step` shows the whole step; no family can override it, so none can skip the gate.

Two steps are in flight: the host launches a step before it reads the metrics of the step before. So the device has
work while the host logs, and a healthy step never makes it wait. For steps 1 and 2, from left to right:

    host     launch 1 | update 1, send metrics 1 | launch 2 | read metrics 1, log | update 2, send metrics 2 | launch 3
    device   forward, backward 1 | update 1 | forward, backward 2 ............... | update 2 | forward, backward 3
    healthy  step 1 was taken: `on_step` sees the weights that it left, before step 2 updates them
    failed   step 1 was not taken, on any rank: the gradients of step 2 are dropped, and `recovery` decides where to
             continue; the batches are then requested again from there

"Launch" is a step's forward and backward. A failed step cannot harm the launched one, whose weights it left unchanged.

From a NaN loss to the quarantine of a clip:

1. `_train_step` records it in the step's `Gate` (guard/finite_gate.py), whose flag over all ranks skips the update.
2. `_finish_pending_step` reads the flags after the next launch, and passes a `RunFailure` to `RunRecovery`
   (recovery/run_recovery.py). `RecoveryHandler.diagnose_and_recover` (guard/recovery.py) calls its methods in order.
3. `diagnose` (guard/diagnose.py) runs on the ranks that failed. It checks the samples as they were read, then weights
   and optimizer state (guard/state_checks.py). Only if these are sound it replays the micro-batch (guard/replay.py,
   probe.py) and switches components off (guard/fallbacks.py).
4. On every rank, `Policy` (guard/recovery.py) chooses the same action for the `Diagnosis` (guard/diagnosis.py).
   `RunRecovery` adds the clip to the `Quarantine` (data/loading/quarantine.py), and `Journal`
   (journal.py) writes the event.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from dit_lora.config.optim import OptimConfig
from dit_lora.data.loading.batch import Batch, MicroBatchReader
from dit_lora.data.storage import UnreadableError
from dit_lora.errors import DitLoraError
from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.guard.finite_gate import BadStateError, Gate
from dit_lora.guard.replay import MicroBatch
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.optim.build import LearningRateSchedule, apply_schedule
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure, RunRecovery
from dit_lora.training.replayable_batch import BatchPosition, LossFunction, ReplayableBatch, forward
from dit_lora.training.step import StepResult
from dit_lora.training.step_metrics import PendingMetrics, StepMetrics, build_local_metrics

_ALL_GROUPS = "all groups"
# A third value of a row's `bad_data`, which is otherwise 0.0 or 1.0.
_UNREAD_DATA = 2.0
_MAX_WAIT_S = 10.0
"""Seconds to wait for metrics in transit: after an error they may never arrive, because the other rank has ended."""


class RolledBackError(Exception):
    """Raised by `on_step` or `on_gradients` on every rank if training continues from an earlier step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to step {step}")
        self.step = step
        """The step after which training goes on."""


@dataclass
class _Step:
    """State of the step in progress: its losses, timesteps and gate, collected over its micro-steps."""

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
        """Add the time spent inside the context to the duration of the current step."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def read_batch(self, reader: MicroBatchReader[Batch], device: torch.device) -> Batch:
        """Read the next micro-batch to the device.

        The step records whether it is good, and how long the host waited for it.
        """
        began = time.perf_counter()
        # A rank whose data failed gets its last batch again: it must meet the collectives of this step first.
        batch, self.read_error = reader.read_next()
        batch = batch.to(device)
        self.bad_data.append(_UNREAD_DATA if self.read_error else float(bool(batch.faults)))
        self.data_seconds += time.perf_counter() - began
        return batch


@dataclass(frozen=True)
class _PendingStep:
    """A step whose update is queued, and whose metrics are on their way to the host."""

    step: _Step
    metrics: PendingMetrics
    learning_rates: dict[str, float]
    group_names: tuple[str, ...]


@dataclass
class _LoopState:
    """Training position: the last confirmed step, and the step whose metrics are still on the device."""

    confirmed_step: int
    """The last step whose metrics were read and found healthy."""
    last_step: int
    """The step at which training ends. A callback may bring it forward to the confirmed step."""
    previous_batch: MicroBatch | None = None
    """The last micro-batch of the step that was confirmed last, which a rollback does not change."""
    pending: _PendingStep | None = None
    """The following step, once its update is queued."""
    reader: MicroBatchReader[Batch] = field(default_factory=MicroBatchReader)

    def pop_pending_step(self) -> _PendingStep | None:
        """Take the step whose metrics are still on the device out of the training position; None if there is none."""
        pending = self.pending
        self.pending = None
        return pending


def max_resident_micro_batches(accumulate: int) -> int:
    """Upper bound on micro-batches on the device: two steps in flight and one healthy batch kept for comparison."""
    return 2 * accumulate + 1


class LoopCallbacks(ABC):
    """Base class for what a training loop asks of its run, and what the run does between steps."""

    @abstractmethod
    def load_batches(self, start_step: int) -> Iterable[Batch]:
        """This rank's micro-batches of the steps after `start_step`."""

    def on_gradients(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        losses: Sequence[torch.Tensor],
        previous_batch: MicroBatch | None,
    ) -> None:
        """Called before clipping and the update, with the step's gradients in place. It must leave them unchanged.

        Args:
            step: The step's number.
            micro_batches: This rank's micro-batches.
            losses: The losses of each, (B,), on the device.
            previous_batch: The last micro-batch of the step that was confirmed last: the step before, or after a
                rollback a later one. None in the first step of a process.

        Raises:
            RolledBackError: The gradients are wrong, and the step is to be taken again.
        """
        return

    def on_step(self, result: StepResult) -> None:
        """Called after each step that was taken, with equal results on all ranks.

        Weights and optimizer are as the step left them: at most the next forward and backward are queued.

        Raises:
            BadStateError: The step led to a state that is not worth keeping; the loop recovers from it.
            RolledBackError: The run was rolled back to an earlier step, from which training continues.
        """
        return

    def log_step(self, result: StepResult) -> None:
        """Log a step without collectives. Called instead of `on_step` if the next step crashed on several ranks."""
        return

    def get_stop_code(self) -> int:
        """The exit code with which this rank was asked to stop (such as 130 for Ctrl-C), or 0."""
        return 0

    def should_sync_after(self, step: int) -> bool:
        """True if the host must read this step's metrics before the next step is launched. Equal on all ranks."""
        return False

    def should_end_after(self, step: int) -> bool:
        """True if training ends after this step, which was synced, before the last one. Equal on all ranks."""
        return False

    def end_unreadable_run(self, step: int, reason: str) -> NoReturn:
        """End the run on all ranks after `step`, because a rank cannot read its data.

        `reason` says why; "" if it is another rank.
        """
        raise UnreadableError(reason or "another rank cannot read its data")


@dataclass(frozen=True)
class TrainingLoopComponents:
    """Everything that the training loop needs in a step, constant for the whole run."""

    engine: Engine
    loss_function: LossFunction
    schedule: LearningRateSchedule
    optim: OptimConfig
    accumulate: int
    seed: int
    recovery: RunRecovery
    watcher: StepMonitor
    callbacks: LoopCallbacks
    ranks_per_sample: int = 1
    """Number of ranks that run each sample together (1 without context parallelism)."""
    compute_norms: NormFunction | None = None
    """Computes gradient norms; None uses PyTorch."""


def train(loop: TrainingLoopComponents, *, start_step: int, steps: int) -> None:
    """Train the steps after `start_step` up to `steps`. Collective.

    A failed step leaves weights and optimizer unchanged. `loop.recovery` then returns the step to continue from, or
    raises `NonFiniteError` on every rank. If a rank cannot read a step's data, `end_unreadable_run` ends the run.
    """
    callbacks = loop.callbacks
    # Once: code that evaluates in between restores the mode.
    loop.engine.model.train()
    loop.engine.fix_ddp_bucket_order(
        lambda: _compute_first_batch_loss(loop, callbacks.load_batches(start_step), start_step + 1)
    )
    state = _LoopState(start_step, steps)
    while state.confirmed_step < state.last_step:
        # A recovery may have rolled back or changed the order: request the batches again, from `confirmed_step`.
        state.reader.start(callbacks.load_batches(state.confirmed_step))
        for number in range(state.confirmed_step + 1, steps + 1):
            if not _train_step(loop, state, number):
                break


def _compute_first_batch_loss(loop: TrainingLoopComponents, batches: Iterable[Batch], number: int) -> torch.Tensor:
    accelerator = loop.engine.accelerator
    reader = MicroBatchReader[Batch]()
    reader.start(batches)
    batch = reader.read_next()[0].to(accelerator.device)
    position = BatchPosition(loop.seed, number, 0, accelerator.process_index)
    return forward(loop.loss_function, loop.engine.model, batch, position).losses.mean()


def _train_step(loop: TrainingLoopComponents, state: _LoopState, number: int) -> bool:
    """Launch a step, finish the step before it, update the weights. False if batches must be requested again."""
    engine = loop.engine
    watcher = loop.watcher
    accelerator = engine.accelerator
    step = _Step(number, Gate(accelerator))
    try:
        with step.measure_time(), watcher.record_forward_outputs(number):
            for micro_step in range(loop.accumulate):
                batch = step.read_batch(state.reader, accelerator.device)
                position = BatchPosition(loop.seed, number, micro_step, accelerator.process_index)
                # Keeps the batch and no activations: a replay costs memory only while it runs, and draws noise again.
                stored_batch = replace(batch, random_inputs=None)
                replayable = ReplayableBatch.from_batch(
                    loop.loss_function, engine.unwrapped_model, stored_batch, position
                )
                step.micro_batches.append(replayable)
                with engine.micro_step():
                    output = forward(loop.loss_function, engine.model, batch, position)
                    # Recorded and not acted on: reading a flag here would make the host wait in every micro-step.
                    step.gate.record_losses(output.losses, bad_data=step.bad_data[-1] > 0)
                    engine.backward(output.losses.mean())
                step.losses.append(output.losses.detach())
                step.timesteps.append(output.timesteps)
                # Frees the graph and the noise before the next forward, and before anything that `on_step` loads.
                del batch, output
    except (DitLoraError, OSError, RuntimeError):
        # The step before comes first: it was taken, or it failed and this one is repeated. Other ranks may be inside
        # this step's collectives, so neither a recovery nor `on_step` can run collectively.
        if accelerator.num_processes > 1:
            _log_if_taken(loop, state)
            raise
        if _finish_pending_step(loop, state):
            raise
        return False
    # The step before: its metrics are read while the device runs the forward and backward queued above.
    if not _finish_pending_step(loop, state):
        return False
    with step.measure_time():
        stop_code = loop.callbacks.get_stop_code()
        # Before anything of this step is recorded: it may be taken again.
        try:
            loop.callbacks.on_gradients(number, step.micro_batches, step.losses, state.previous_batch)
        except RolledBackError as back:
            engine.discard_gradients()
            state.confirmed_step = back.step
            return False
        # fp64: finite exactly if every element is, where an fp32 sum of squares overflows or loses tiny ones.
        norms = engine.compute_gradient_norms(loop.compute_norms)
        # Before clipping, which multiplies by 1 / norm and would spread one NaN to every gradient.
        step.gate.record_gradient_norms(norms)
        watcher.collect_gradient_statistics(number)
        norm = engine.clip_gradients(norms, loop.optim, watcher.get_clip_bound)
        # A function of the step and not a scheduler: a step that is taken again cannot advance it.
        lr_scale = loop.recovery.lr_scale
        rates = apply_schedule(engine.optimizer.param_groups, loop.schedule, number, scale=lr_scale)
        # The update overwrites tensors that a snapshot's copy may still read, so the watcher comes first.
        watcher.before_update(number)
        # One all-reduce of the flag, which every rank meets: all take this step or, if it is set, none does.
        engine.step(step.gate.reduce_flags())
        watcher.after_update(number)
        # Queued behind the update: losses, flags and norms stay on the device until the gather.
        metrics = build_local_metrics(
            step.losses,
            step.timesteps,
            {**norms, _ALL_GROUPS: norm},
            step.gate.local_flags,
            engine.has_nonfinite_weights(),
            step.bad_data,
            step.data_seconds,
            stop_code,
        )
        state.pending = _PendingStep(step, metrics.start_gather(accelerator), rates, tuple(norms))
    # The last step is read immediately too: there is no next step to launch first.
    if number == state.last_step or loop.callbacks.should_sync_after(number):
        return _finish_pending_step(loop, state)
    return True


def _finish_pending_step(loop: TrainingLoopComponents, state: _LoopState) -> bool:
    """Read the pending step's metrics and handle them, if there is a pending step.

    Returns False if batches must be requested again from `state.confirmed_step`.
    """
    pending = state.pop_pending_step()
    if pending is None:
        return True
    step = pending.step
    outcome = _read_metrics(loop, pending)
    if isinstance(outcome, StepResult):
        try:
            loop.callbacks.on_step(outcome)
            state.confirmed_step = step.number
            state.previous_batch = step.micro_batches[-1]
            if loop.callbacks.should_end_after(step.number):
                state.last_step = step.number
                return False
            return True
        except BadStateError as error:
            # The step was healthy, but the state that it led to is not worth keeping.
            outcome = RunFailure(step.number, error.kind, diagnosis=error.diagnosis)
        except RolledBackError as back:
            # Late kernel parity has restored the state itself: there is no failed step to diagnose.
            loop.engine.discard_gradients()
            state.confirmed_step = back.step
            return False
    # The next step's gradients may exist: it was launched behind a step that was not taken.
    loop.engine.discard_gradients()
    # Neither weights nor data are at fault, the data could not be read: there is nothing to diagnose.
    if outcome.kind == "unread_data":
        loop.callbacks.end_unreadable_run(step.number - 1, step.read_error)
    failure = replace(outcome, micro_batches=step.micro_batches, control=state.previous_batch)
    state.confirmed_step = loop.recovery.recover(failure)
    return False


def _log_if_taken(loop: TrainingLoopComponents, state: _LoopState) -> None:
    """Read the pending step and log it if it was taken, without collectives: another rank may have ended."""
    pending = state.pop_pending_step()
    # If the device itself has failed, its metrics are lost, and the error that ends the run has said so.
    with suppress(torch.AcceleratorError):
        if pending is not None and pending.metrics.wait_until_arrived(_MAX_WAIT_S):
            outcome = _read_metrics(loop, pending)
            if isinstance(outcome, StepResult):
                loop.callbacks.log_step(outcome)


def _read_metrics(loop: TrainingLoopComponents, pending: _PendingStep) -> StepResult | RunFailure:
    """Wait for a step's metrics. The host reads nothing else from a step."""
    with pending.step.measure_time():
        metrics = pending.metrics.read_gathered_metrics()
    failure = _find_failure(metrics, pending.step.number, loop.ranks_per_sample)
    return failure or _build_result(metrics, pending, loop.ranks_per_sample)


def _find_failure(metrics: StepMetrics, step: int, ranks_per_sample: int) -> RunFailure | None:
    """The failure of a step, equal on all ranks; None if the step is healthy."""
    # One column per micro-step, one row per rank.
    _, accumulate = metrics.bad_data.shape
    # First: the repeated micro-batch that stood in for unread data says nothing about the model.
    if (metrics.bad_data == _UNREAD_DATA).any():
        return RunFailure(step, "unread_data")
    # The flags that gated the optimizer: each micro-step's loss, then gradients and weights.
    flags = metrics.flags > 0
    bad_losses = flags[:, :accumulate]
    bad_data = metrics.bad_data > 0
    # (samples' ranks, micro-steps): with context parallelism the first rank stands for all that share a sample.
    bad = (bad_losses | bad_data).view(-1, ranks_per_sample, accumulate).any(1)
    failed_positions = [(ranks_per_sample * rank, micro_step) for rank, micro_step in bad.nonzero().tolist()]
    if failed_positions:
        return RunFailure(step, "non_finite_loss" if bad_losses.any() else "bad_data", tuple(failed_positions))
    # In the order of causes: a bad gradient makes bad weights too.
    kinds = ("non_finite_gradient", "zero_gradient", "non_finite_weights")
    raised = flags[:, accumulate:].any(0).tolist()
    return next((RunFailure(step, kind) for kind, is_raised in zip(kinds, raised, strict=True) if is_raised), None)


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
