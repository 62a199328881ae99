"""Check the gradients of each optimizer step of any training loop before it is taken, and skip bad steps.

backward        counts generations of gradients: records of cleared gradients are dropped
clipping        records which gradients were bad before one NaN spreads to all
optimizer.step  gradients finite?  no: diagnose, skip      yes: step, then are the weights finite?
                no: diagnose, restore the snapshot
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dit_lora.errors import join_first_items
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext, has_found_infinity
from dit_lora.guard.attach.calls.backward_passes import BackwardPasses
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.containment import try_or_warn, warn_on_error
from dit_lora.guard.attach.finite_checks import OptimizerChecks
from dit_lora.guard.attach.finite_values import find_bad_tensors, is_finite_tensor
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.loop_recovery import ALTERED_FROZEN, BAD_WEIGHTS, LoopFailure, LoopRecovery
from dit_lora.guard.attach.monitoring import HealthyStepChecks
from dit_lora.guard.attach.scheduler_gating import OptimizerStepCounter
from dit_lora.guard.attach.state_checks import StateChecks
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.finite_gate import ACCELERATED, NonFiniteError
from dit_lora.numerics.finite import is_finite
from dit_lora.patching import is_instance_of

# A scale below this has been halved more than 16 times from Accelerate's initial 2**16.
_MIN_SCALE = 1.0
_MAX_REPORTS = 10


class _SkipStepError(Exception):
    """Raised in an optimizer's closure to abort its step before it changes anything."""


class WatchedOptimizer:
    """One optimizer of the training loop, with the finiteness checks of its parameters."""

    def __init__(self, hooks: "StepHooks", optimizer: Any) -> None:
        self._hooks = hooks
        self.optimizer = optimizer
        self.is_accelerated = is_instance_of(optimizer, ACCELERATED)
        self.inner = optimizer.optimizer if self.is_accelerated else optimizer
        """The optimizer without Accelerate's wrapper."""
        self.checks = OptimizerChecks([], optimizer)

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replacement for `optimizer.step`: takes the step only if gradients are finite, and recovers otherwise."""
        return self._hooks.step(self, original, *args, **kwargs)


class StepHooks:
    """Checks each step of a loop before it is taken. The loop's events (backward, clipping, saving) are reported to
    it.
    """

    def __init__(
        self,
        host: LoopProcessContext,
        watched: WatchedModels,
        recovery: LoopRecovery,
        checks: frozenset[str],
        healthy_checks: HealthyStepChecks,
    ) -> None:
        self.number = 1
        """Number of the current optimizer step, or of the next step once an optimizer has stepped."""
        self.was_skipped = False
        """True if the last step was skipped or undone."""
        self._host = host
        self._watched = watched
        self._state: LoopState = recovery.state
        self._recovery = recovery
        self._healthy_checks = healthy_checks
        watched.log.on_begin = self._before_call
        self._checks = checks
        self._checks_weights = "weights" in checks
        self._checks_gradients = "gradient" in checks
        self.optimizers = [WatchedOptimizer(self, opt) for opt in self._state.optimizers]
        self._controls: dict[int, CapturedCall] = {}
        self._passes = BackwardPasses(
            lambda: (p for watched in self.optimizers for _, p in watched.checks.parameters),
            keeps_gradients=not host.uses_deepspeed,
        )
        self._stepped_ids: set[int] = set()
        """Ids of the optimizers that have stepped since the last backward."""
        self._checked_step = 1
        """Number of the step whose optimizers are being checked."""
        self._has_failed = False
        """True once an optimizer of the current step had bad gradients: the other optimizers share the cause."""
        self._has_new_backward = False
        self._step_counter = OptimizerStepCounter()
        self._scaler_has_skipped = False
        """True if a gradient scaler has skipped the current step, which is then closed already."""
        self._is_snapshot_due = False
        self._was_loaded = False
        """True if the loop has loaded a checkpoint: earlier snapshots must no longer be restored."""
        self._is_diagnosing = False
        self._recorded_step = 0
        """The step in which frozen weights and buffers were recorded; 0 before the first."""
        self._num_reports = 0
        self._tolerated: set[str] = set()
        self._scalars: set[str] = set()
        self._thread = threading.current_thread()
        self._scaled_ids: set[int] = set()
        self._num_parameters = 0
        self._state_checks = StateChecks(host, self._state, watched)

    def _before_call(self) -> None:
        if self._healthy_checks.is_enabled:
            self._healthy_checks.before_call(self.number)
        self._watched.before_call()

    def refresh_optimizer_parameters(self) -> None:
        """Update the recorded parameters of each optimizer, after the watched models have changed."""
        self._num_parameters = self._watched.count_parameters()
        self._state.record_infinite_state()
        names = {id(p): name for name, p in self._state.parameters.items()}
        self._tolerated = {name for names in self._watched.infinities.values() for name in names}
        self._scalars = {
            name
            for model in self._watched.all_models()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not tensor.ndim
        }
        for watched in self.optimizers:
            parameters = [p for group in watched.optimizer.param_groups for p in group["params"]]
            named = [(names[id(p)], p) for p in parameters if id(p) in names]
            known_unchecked = set(watched.checks.unchecked_names)
            checked = {id(p) for _, p in watched.checks.parameters}
            watched.checks = OptimizerChecks(named, watched.optimizer, checked)
            if any(p.grad is not None for _, p in watched.checks.parameters):
                # The guard started, or restarted, between a backward and its step.
                self._passes.num_backwards = max(1, self._passes.num_backwards)
            for name in set(watched.checks.unchecked_names) - known_unchecked:
                self._recovery.log(f"guard: {name} is not checked: it is not finite from the start")

    # Events of the loop

    @warn_on_error("looking at a loss")
    def before_backward(self, tensors: Any) -> None:
        """Handle a backward pass that begins: record its losses, and note if it starts new gradients."""
        if self._is_diagnosing:
            return
        self._has_new_backward = True
        if self._passes.record_backward_start(tensors):
            self._watched.log.record_gradient_reset()
            for watched in self.optimizers:
                watched.checks.bad_before_clipping = []

    def on_backward_error(self, error: RuntimeError) -> None:
        """Report the cause of a non-finite gradient before the error of PyTorch's anomaly mode ends the loop."""
        self._diagnose_before_error("non_finite_gradient")

    def before_gradient_norm(self) -> None:
        """Measure gradients whose norm is about to be computed for clipping."""
        if not self._is_diagnosing:
            self._healthy_checks.measure_gradient_norms(self._state.parameters)

    def on_bad_norm(self, *, raises: bool) -> None:
        """Record the bad gradients after their norm was Inf or NaN. If torch raises for it, log the cause now."""
        if self._is_diagnosing:
            return
        for watched in self.optimizers:
            watched.checks.bad_before_clipping = watched.checks.find_bad_gradients()
        if raises and any(watched.checks.bad_before_clipping for watched in self.optimizers):
            self._diagnose_before_error("non_finite_gradient")

    def before_clipping(self) -> None:
        """Record non-finite gradients, for loops that clip with their own functions."""
        self.before_gradient_norm()
        for watched in self.optimizers:
            if not watched.checks.has_healthy_gradients():
                watched.checks.bad_before_clipping = watched.checks.find_bad_gradients()

    def after_weights_loaded(self, module: nn.Module) -> None:
        parameter_ids = {id(p) for p in self._state.parameters.values()}
        if any(id(p) in parameter_ids for p in module.parameters()):
            self._was_loaded = True

    def load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replacement for `load_state_dict` of an optimizer and Accelerate's `load_state`."""
        result = original(*args, **kwargs)
        self._was_loaded = True
        return result

    def before_save(self, value: Any, path: str) -> None:
        """Check values that the loop is about to save. Bad trained weights are restored first."""
        if self._is_diagnosing or "weights" not in self._checks:
            return
        # A thread that saves while the loop trains must not write to weights.
        is_loop = threading.current_thread() is self._thread
        if is_loop and self._has_bad_weights() and not self._recovery.has_given_up:
            if self._host.num_ranks == 1:
                self._recover(self.optimizers[0], BAD_WEIGHTS, between_steps=True)
            elif not self._watched.collective_forward:
                self._recovery.restore_snapshot_on_this_rank(self.number)
        bad = find_bad_tensors(value, self._tolerated | self._state.infinite_names, self._scalars)
        if bad:
            self._recovery.report_nonfinite_save(self.number, path, join_first_items(bad, 5))

    def require_finite(self, *, may_raise: bool = True) -> None:
        """Recover if any rank's trained state is bad; report changed frozen weights and buffers."""
        kind = self._state_checks.find_failure_kind()
        if kind is None and not self._was_loaded and self._state_checks.has_damaged_frozen_tensor():
            kind = ALTERED_FROZEN
        if kind is not None:
            self._recover(self.optimizers[0], kind, between_steps=True, required=may_raise)

    def should_skip_update(self, owner: Any) -> bool:
        """True if a learning rate schedule or moving average is about to advance for a skipped step."""
        is_skipped = self._step_counter.should_skip_schedule_step(owner)
        return self.was_skipped if is_skipped is None else is_skipped  # an average has no optimizer

    # One optimizer step

    def step(self, watched: WatchedOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the gradients of an optimizer's step, and take the step or skip it."""
        if self._is_diagnosing:  # a hook called it inside a replay
            return None
        if self._host.accelerator is not None and not self._host.is_step_due:
            return original(*args, **kwargs)
        # torch passes a closure as the first argument or by name; None means no closure.
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and callable(closure):
            return self._step_with_closure(watched, original, closure, args, kwargs)
        if self._should_skip(watched):
            self._step_counter.count_optimizer_step(watched.inner, skipped=True)
            return None
        # The snapshot copy runs in parallel with forward and backward; wait for it before weights are overwritten.
        self._state.snapshots.before_update()
        self._scaler_has_skipped = False
        result = original(*args, **kwargs)
        if not self._scaler_has_skipped:
            self._after_step(watched)
        return result

    def _should_skip(self, watched: WatchedOptimizer) -> bool:
        """Check an optimizer's step before it is taken. True if it failed, was diagnosed and must be skipped."""
        if self._recovery.has_given_up:
            return False
        kind = self._check_step(watched)
        self.was_skipped = kind is not None
        if kind is None:
            return False
        if self._has_failed:
            self._report_step_to_accelerate()
            self._end_step(is_taken=False)
            return True
        self._has_failed = True
        # The step is skipped even if the diagnosis fails.
        try_or_warn(lambda: self._recover(watched, kind), "diagnosing a step", reraised=(NonFiniteError,))
        self._is_diagnosing = False
        if self._recovery.has_given_up:
            return False
        self.was_skipped = True
        scaler = self._host.scaler
        if scaler is not None:
            # It may have unscaled gradients that no step will use: start its next iteration with the same scale.
            scaler.update(scaler.get_scale())
        self._end_step(is_taken=False)
        return True

    def _begin_step(self, watched: WatchedOptimizer) -> None:
        """Start counting a new step of the loop, unless this optimizer's step belongs to the current one."""
        key = id(watched.optimizer)
        # The first optimizer of a step has started it; a scaler reports its skip within a started step.
        begins = self._has_new_backward or not self._stepped_ids or key in self._stepped_ids
        self._has_new_backward = False
        self._stepped_ids = {key} if begins else {*self._stepped_ids, key}
        if not begins:
            return
        self._checked_step = self.number
        self._has_failed = False
        self._passes.is_idle = self._passes.has_stepped
        self._healthy_checks.before_step()
        self._refresh_snapshot_if_changed()
        self._healthy_checks.measure_gradient_norms(self._state.parameters)

    @warn_on_error("judging a step", reraised=(NonFiniteError,))
    def _check_step(self, watched: WatchedOptimizer) -> str | None:
        """Kind of failure that any rank's gradients show; None if they are good. Reads the device once."""
        self._begin_step(watched)
        bad_gradient, is_zero = False, False
        # A gradient scaler is responsible if gradients are scaled, or if it has found infinity itself.
        if self._checks_gradients and self._host.scaler is None and vars(watched.inner).get("found_inf") is None:
            checks = watched.checks
            if not checks.has_healthy_gradients():
                peak = checks.compute_gradient_peak()
                bad_gradient = checks.is_bad_gradient(peak)
                is_zero = peak == 0.0
            if not self._passes.is_tracking and not is_zero:
                self._passes.track_parameter()
        is_in_backward = torch._C._current_graph_task_id() != -1
        bad_loss = self._passes.has_bad_loss()
        # Ranks diagnose a loss together.
        any_bad_loss = bad_loss and self._host.num_ranks == 1
        if self._host.num_ranks > 1 and not is_in_backward:
            # Only the affected rank sees weights that its memory has damaged, but all ranks must restore together.
            bad_weights = self._checks_weights and not watched.checks.has_finite_weights()
            flags = torch.tensor([bad_gradient, bad_weights, bad_loss], device=self._host.device).float()
            bad_gradient, bad_weights, any_bad_loss = map(bool, self._host.sum_flags(flags))
            if bad_weights:
                return BAD_WEIGHTS
        if bad_gradient:
            return "non_finite_loss" if bad_loss else "non_finite_gradient"
        if (
            any_bad_loss
            and "loss" in self._checks
            and not self._scaled_ids
            and not self._has_failed
            and self._num_reports < _MAX_REPORTS
        ):
            self._num_reports += 1
            failure = self._make_failure(self.optimizers[0], "non_finite_loss")
            with self._mark_guard_activity():
                self._recovery.report_nonfinite_loss(failure, is_on_this_rank=bad_loss)
        if not is_zero:
            self._recovery.reset_zero_gradients()
        elif "zero_gradient" in self._checks and not bad_loss and not self._has_failed and not self._passes.is_idle:
            calls = self._watched.log.get_current_calls()
            # The loss asks for a change if a nonzero gradient reached a model's output.
            if any(bool(g.any()) for call in calls for g in call.output_gradients if g is not None):
                self._recovery.report_zero_gradient(self._checked_step)
        if self._is_snapshot_due and self._take_due_snapshot():
            return BAD_WEIGHTS
        if self._healthy_checks.is_enabled:
            self._healthy_checks.check_step(
                self._checked_step, watched.optimizer, self._state.parameters, self._passes.losses
            )
        gradient_check = self._healthy_checks.gradient_check
        # Several optimizers of a step share its model calls.
        if gradient_check is not None and len(self._stepped_ids) == 1:
            with self._mark_guard_activity():
                # With several optimizers, as in a GAN, gradients of one may stay during the other's steps.
                cleared_names = [name for name, _ in watched.checks.parameters] if len(self.optimizers) == 1 else []
                gradient_check.check_step(self._checked_step, self._watched.log.get_current_calls(), cleared_names)
        return None

    @warn_on_error("looking at weights", reraised=(NonFiniteError,))
    def _after_step(self, watched: WatchedOptimizer) -> None:
        """Check the weights after an optimizer's step, before the loop copies, averages or saves them."""
        is_good = True
        if self._checks_weights and self._host.num_ranks == 1 and not self._recovery.has_given_up:
            is_good = watched.checks.has_finite_weights()
        if is_good:
            self._end_step(is_taken=True)
        else:
            self._recover(watched, BAD_WEIGHTS)
            self._end_step(is_taken=False)
        if watched.is_accelerated:
            scaler = self._host.scaler
            if scaler is not None and watched.optimizer.step_was_skipped and scaler.get_scale() < _MIN_SCALE:
                self._recovery.report_low_loss_scale(self.number, scaler.get_scale())
        self._step_counter.count_optimizer_step(watched.inner, skipped=not is_good)

    def _step_with_closure(
        self,
        watched: WatchedOptimizer,
        original: Callable[..., Any],
        closure: Callable[[], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take an optimizer's step whose closure computes the gradients; those of its first run are checked.

        Optimizers that run the closure more than once, such as LBFGS, handle a bad trial themselves.
        """
        loss, num_runs = None, 0

        def checked_closure() -> Any:
            nonlocal loss, num_runs
            num_runs += 1
            loss = closure()
            if num_runs == 1 and self._should_skip(watched):
                raise _SkipStepError
            return loss

        if args:
            args = (checked_closure, *args[1:])
        else:
            kwargs = {**kwargs, "closure": checked_closure}
        self._state.snapshots.before_update()
        try:
            result = original(*args, **kwargs)
        except _SkipStepError:
            self._step_counter.count_optimizer_step(watched.inner, skipped=True)
            return loss
        self._after_step(watched)
        return result

    # Gradient scalers

    def take_scaler_step(
        self, scaler: Any, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Let a gradient scaler take a step, and diagnose a step that it skips because an output is not finite.

        Gradients beyond fp16 are left to the scaler, which lowers its scale.
        """
        watched = next((w for w in self.optimizers if w.inner is optimizer), None)
        if watched is None:
            return NotImplemented
        self._scaled_ids.add(id(optimizer))
        result = original(scaler, optimizer, *args, **kwargs)
        if has_found_infinity(scaler, optimizer):
            self._scaler_has_skipped = True
            try_or_warn(
                lambda: self._after_scaler_skip(watched, scaler.get_scale()),
                "looking at a step that the scaler skipped",
                reraised=(NonFiniteError,),
            )
        return result

    def _after_scaler_skip(self, watched: WatchedOptimizer, scale: float) -> None:
        self._begin_step(watched)
        calls = [call for call in self._watched.log.get_current_calls() if call.outputs]
        # A scaled loss may overflow to Inf, but it is NaN only if an earlier value was bad.
        is_bad = any(not call.has_finite_output for call in calls) or any(
            bool(loss.isnan()) for loss in self._passes.losses
        )
        if self._host.is_true_on_any_rank(is_bad):
            self._recover(watched, "non_finite_loss")
        elif scale < _MIN_SCALE:
            self._recovery.report_low_loss_scale(self.number, scale)
        else:
            self.was_skipped = False  # the schedule moves, as it does without the guard
        self._end_step(is_taken=False)
        self._step_counter.count_optimizer_step(watched.inner, skipped=self.was_skipped)

    # DeepSpeed

    def deepspeed_backward(self, original: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> Any:
        """Run DeepSpeed's backward, which also steps, unless the loss is bad. Costs one read by the host."""
        self._checked_step = self.number
        self._passes.losses[:] = [loss.detach()]
        if self._host.is_true_on_any_rank(not is_finite(loss.detach())):
            self._recover(self.optimizers[0], "non_finite_loss")
            self._end_step(is_taken=False)
            return None
        result = original(loss, **kwargs)
        self._end_step(is_taken=True)
        return result

    # State

    def _has_bad_weights(self) -> bool:
        return any(not watched.checks.has_finite_weights() for watched in self.optimizers)

    def _refresh_snapshot_if_changed(self) -> None:
        """Take a new snapshot if other models are trained, new models were found, or weights were loaded."""
        has_new = self._num_parameters != self._watched.count_parameters()
        if has_new or any(watched.checks.has_unfrozen_parameter for watched in self.optimizers):
            self._watched.refresh_trained_models()
            self._was_loaded = True
        # The first step shows which models the loss comes through.
        self._was_loaded |= self._watched.find_newly_trained_models()
        if self.number == 2:  # the first step made the optimizers' state
            self._state.record_infinite_state()
        if self.number == 1:  # a model may have been wrapped in DDP since the guard started
            self._host.detect_distributed_training(list(self._state.parameters.values()))
        if self._was_loaded:
            self._was_loaded = self._is_snapshot_due = False
            self._recorded_step = self.number
            self._state.drop_snapshots()
            self._state.take_snapshot(self.number - 1)
            self._watched.rebuild_contexts()

    def _take_due_snapshot(self) -> bool:
        """Take a snapshot unless the trained state is bad; True if optimizer state is not finite. Collective.

        Weights that are only large may be intended.
        """
        self._is_snapshot_due = False
        is_bad = "weights" in self._checks and self._state_checks.has_damaged_state()
        if not self._host.is_true_on_any_rank(is_bad):
            self._state.take_snapshot(self.number - 1)
            return False
        return self._host.is_true_on_any_rank(self._state_checks.has_nonfinite_moment())

    def _diagnose_before_error(self, kind: str) -> None:
        """Log the cause of a failed step for which torch is about to raise an error."""
        self._begin_step(self.optimizers[0])
        self._recover(self.optimizers[0], kind, raised_by_torch=True)
        self._end_step(is_taken=False)

    def _make_failure(self, watched: WatchedOptimizer, kind: str) -> LoopFailure:
        # Looks at gradients and weights again, in failed steps only: the check of a step joins tensors and ranks to be
        # quick, and knows neither the names of bad gradients nor whether this rank's own weights are bad.
        gradients = watched.checks.bad_before_clipping or watched.checks.find_bad_gradients()
        # If all are bad, clipping or a bad loss has spread one NaN to all of them, so none is named.
        is_named = bool(watched.checks.bad_before_clipping) or len(gradients) < len(watched.checks.parameters)
        return LoopFailure(
            self._checked_step,
            kind,
            self._watched.log.get_current_calls(),
            tuple(gradients) if is_named or len(gradients) == 1 else (),
            dict(self._controls),
            has_nonfinite_weights="weights" in self._checks and self._has_bad_weights(),
        )

    def _recover(self, watched: WatchedOptimizer, kind: str, **changes: Any) -> None:
        """Diagnose a failed step and recover. Raises `NonFiniteError` on every rank if the recovery is a stop."""
        self.was_skipped = True
        self._healthy_checks.discard_step_statistics()
        failure = replace(self._make_failure(watched, kind), **changes)
        if failure.between_steps:
            failure = replace(failure, step=self.number)
        with self._mark_guard_activity():
            has_restored = self._recovery.recover(failure)
        # If nothing could be restored, the loop goes on as without a guard.
        self.was_skipped = not self._recovery.has_given_up
        if has_restored:
            self._is_snapshot_due = False
        # Zero bad gradients outside every optimizer: nothing else clears them, and clipping would spread them.
        owned = {id(p) for p in self._state.parameters.values()}
        for model in self._watched.models.values():
            for parameter in model.parameters():
                grad = parameter.grad
                if grad is not None and id(parameter) not in owned and not is_finite_tensor(grad):
                    grad.zero_()
        self._report_step_to_accelerate()

    @contextmanager
    def _mark_guard_activity(self) -> Iterator[None]:
        """Mark steps, backward passes and saves inside the context as the guard's and not the loop's."""
        self._is_diagnosing = True
        try:
            with self._watched.pause_recording(), EVENTS.pause_save_checks():
                yield
        finally:
            self._is_diagnosing = False

    def _end_step(self, *, is_taken: bool) -> None:
        syncs = self._host.syncs_gradients  # DeepSpeed's micro-steps count as one
        is_first = len(self._stepped_ids) <= 1
        self._watched.log.is_step_over = self._passes.has_stepped = True
        if is_taken:
            self.was_skipped = False
            self._report_step_to_accelerate()
            for call in self._watched.log.get_current_calls():
                if call.has_unmodified_arguments:  # to compare a failing call with
                    self._controls[id(call.owner)] = call
            if syncs and is_first:
                self._recovery.budget.count_taken_step(self._checked_step)
                record = self._watched.frozen_record
                # A record created during a step has not seen all of that step.
                if record is not None and not record.is_calibrated and self.number > self._recorded_step:
                    record.exclude_changed_tensors()
                self._is_snapshot_due |= self._state.is_snapshot_due(self.number)
        if is_first:
            self.number += int(syncs)

    def _report_step_to_accelerate(self) -> None:
        """Tell Accelerate's schedules whether the optimizer's step was taken; a scaler does so itself."""
        if self._host.accelerator is None:
            return
        for watched in self.optimizers:
            if watched.is_accelerated and (self.was_skipped or self._host.scaler is None):
                watched.optimizer._is_overflow = self.was_skipped
