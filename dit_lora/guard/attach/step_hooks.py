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

from dit_lora.guard.attach.accelerator_adapter import Host, found_infinity
from dit_lora.guard.attach.calls.backward_passes import BackwardPasses
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.containment import contain_error, contained
from dit_lora.guard.attach.finite_checks import OptimizerChecks
from dit_lora.guard.attach.finite_values import (
    find_bad_tensors,
    is_finite_any,
    name_bad_tensors,
)
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.monitoring import Looks
from dit_lora.guard.attach.recovery import OF_FROZEN, WEIGHTS, PluginRecovery, StepFailure
from dit_lora.guard.attach.scheduler_gating import Turns
from dit_lora.guard.attach.state_checks import StateChecks
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.gate import ACCELERATED, NonFiniteError
from dit_lora.numerics.finite import is_finite
from dit_lora.patching import is_a

# A scale below this has been halved more than 16 times from Accelerate's initial 2**16.
_SCALE_FLOOR = 1.0
_MAX_REPORTS = 10


class _SkipStepError(Exception):
    """Aborts an optimizer's step from within its closure, before it changes anything."""


class WatchedOptimizer:
    """One optimizer of the loop, with the checks of its parameters."""

    def __init__(self, hooks: "StepHooks", optimizer: Any) -> None:
        self._hooks = hooks
        self.optimizer = optimizer
        self.is_accelerated = is_a(optimizer, ACCELERATED)
        self.inner = optimizer.optimizer if self.is_accelerated else optimizer
        """The optimizer without Accelerate's wrapper."""
        self.checks = OptimizerChecks([], optimizer)

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces `optimizer.step`."""
        return self._hooks.step(self, original, *args, **kwargs)

    def loaded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces `optimizer.load_state_dict`."""
        result = original(*args, **kwargs)
        self._hooks.loaded()
        return result


class StepHooks:
    """Follows the steps of a loop; also the guard's `LoopListener`."""

    def __init__(
        self,
        host: Host,
        watched: WatchedModels,
        recovery: PluginRecovery,
        checks: frozenset[str],
        looks: Looks,
    ) -> None:
        self.number = 1
        """Number of the current optimizer step, or of the next step once an optimizer has stepped."""
        self.tripped = False
        """True if the last step was skipped or undone."""
        self._host = host
        self._watched = watched
        self._state: LoopState = recovery.state
        self._recovery = recovery
        self._looks = looks
        watched.log.on_begin = self._call_begins
        self._checks = checks
        self._checks_weights = "weights" in checks
        self._judges_gradients = "gradient" in checks
        self.optimizers = [WatchedOptimizer(self, opt) for opt in self._state.optimizers]
        self._controls: dict[int, CapturedCall] = {}
        self._passes = BackwardPasses(
            lambda: (p for watched in self.optimizers for _, p in watched.checks.parameters),
            keeps_gradients=not host.under_deepspeed,
        )
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped since the last backward."""
        self._judged = 1
        """Number of the step whose optimizers are being checked."""
        self._has_failed = False
        """True once an optimizer of the current step had bad gradients: the other optimizers share the cause."""
        self._has_new_backward = False
        self._turns = Turns()
        self._scaler_has_skipped = False
        """True if a gradient scaler has skipped the current step, which is then closed already."""
        self._is_due = False
        self._was_loaded = False
        self._is_diagnosing = False
        self._noted_in = 0
        """The step in which frozen weights and buffers were recorded; 0 before the first."""
        self._num_reports = 0
        self._tolerated: set[str] = set()
        self._scalars: set[str] = set()
        self._thread = threading.current_thread()
        self._scaled: set[int] = set()
        self._num_held = 0
        self._state_checks = StateChecks(host, self._state, watched)

    def _call_begins(self) -> None:
        if self._looks.is_wanted:
            self._looks.call_begins(self.number)
        self._watched.call_begins()

    def survey(self) -> None:
        """Record the parameters of each optimizer, after the watched models have changed."""
        self._num_held = self._watched.num_held()
        self._state.note_infinite()
        names = {id(p): name for name, p in self._state.parameters.items()}
        self._tolerated = {name for names in self._watched.infinite.values() for name in names}
        self._scalars = {
            name
            for model in self._watched.all_models()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not tensor.ndim
        }
        for watched in self.optimizers:
            parameters = [p for group in watched.optimizer.param_groups for p in group["params"]]
            named = [(names[id(p)], p) for p in parameters if id(p) in names]
            known_unchecked = set(watched.checks.not_checked)
            checked = {id(p) for _, p in watched.checks.parameters}
            watched.checks = OptimizerChecks(named, watched.optimizer, checked)
            if any(p.grad is not None for _, p in watched.checks.parameters):
                # The guard started, or restarted, between a backward and its step.
                self._passes.num_backwards = max(1, self._passes.num_backwards)
            for name in set(watched.checks.not_checked) - known_unchecked:
                self._recovery.say(f"guard: {name} is not checked: it is not finite from the start")

    # Events of the loop

    @contained("looking at a loss")
    def backward_begins(self, tensors: Any) -> None:
        """Record a loss, and whether its backward starts new gradients."""
        if self._is_diagnosing:
            return
        self._has_new_backward = True
        if self._passes.begin(tensors):
            self._watched.log.renew_gradients()
            for watched in self.optimizers:
                watched.checks.forget()

    def backward_failed(self, error: RuntimeError) -> None:
        """Report the cause before anomaly mode's error ends the loop."""
        self._diagnose_before_error("non_finite_gradient")

    def gradient_norm(self) -> None:
        """Measure gradients that are about to be clipped."""
        if not self._is_diagnosing:
            self._looks.gradients(self._state.parameters)

    def norm_is_bad(self, *, raises: bool) -> None:
        """Record the gradients that make the norm infinite or NaN. If torch raises for it, log the cause now."""
        if self._is_diagnosing:
            return
        for watched in self.optimizers:
            watched.checks.note_bad_gradients()
        if raises and any(watched.checks.clipped_names for watched in self.optimizers):
            self._diagnose_before_error("non_finite_gradient")

    def before_clipping(self) -> None:
        """Record bad gradients, for loops that clip with their own functions."""
        self.gradient_norm()
        for watched in self.optimizers:
            if not watched.checks.gradients_are_healthy():
                watched.checks.note_bad_gradients()

    def loaded(self) -> None:
        """Handle a loaded checkpoint: earlier snapshots must no longer be restored."""
        self._was_loaded = True

    def weights_loaded(self, module: nn.Module) -> None:
        parameter_ids = {id(p) for p in self._state.parameters.values()}
        if any(id(p) in parameter_ids for p in module.parameters()):
            self.loaded()

    def load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._was_loaded = True
        return result

    def saving(self, value: Any, path: str) -> None:
        """Check the values that the loop saves. Bad trained weights are restored before they are saved."""
        if self._is_diagnosing or "weights" not in self._checks:
            return
        # A thread that saves while the loop trains must not write to weights.
        is_loop = threading.current_thread() is self._thread
        if is_loop and self._weights_are_bad() and not self._recovery.has_given_up:
            if self._host.ranks == 1:
                self._recover(self.optimizers[0], WEIGHTS, between_steps=True)
            elif not self._watched.lockstep:
                self._recovery.put_back_alone(self.number)
        bad = find_bad_tensors(value, self._tolerated | self._state.infinite, self._scalars)
        if bad:
            self._recovery.report_save(self.number, path, name_bad_tensors(bad))

    def require_finite(self, *, may_raise: bool = True) -> None:
        """Recover if any rank's trained state is bad; report changed frozen weights and buffers."""
        kind = self._state_checks.find_wrong()
        if kind is None and not self._was_loaded and self._state_checks.is_frozen_damaged():
            kind = OF_FROZEN
        if kind is not None:
            self._recover(self.optimizers[0], kind, between_steps=True, required=may_raise)

    def is_gate_shut(self, owner: Any) -> bool:
        """True if a schedule or an average is about to advance for a skipped step."""
        is_skipped = self._turns.shuts(owner)
        return self.tripped if is_skipped is None else is_skipped  # an average has no optimizer

    # One optimizer step

    def step(
        self, watched: WatchedOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Check a step of an optimizer, and take it or skip it."""
        if self._is_diagnosing:  # a hook called it inside a replay
            return None
        if self._host.accelerator is not None and not self._host.steps_now:
            return original(*args, **kwargs)
        # torch passes a closure as the first argument or by name; None means no closure.
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and callable(closure):
            return self._step_with_closure(watched, original, closure, args, kwargs)
        if self._is_bad(watched):
            self._turns.count(watched.inner, left_out=True)
            return None
        # The snapshot copy runs in parallel with forward and backward; wait for it before weights are overwritten.
        self._state.snapshots.before_update()
        self._scaler_has_skipped = False
        result = original(*args, **kwargs)
        if not self._scaler_has_skipped:
            self._after(watched)
        return result

    def _is_bad(self, watched: WatchedOptimizer) -> bool:
        """Check a step that is about to be taken. True if it was diagnosed and must be skipped."""
        if self._recovery.has_given_up:
            return False
        kind = self._judge(watched)
        self.tripped = kind is not None
        if kind is None:
            return False
        if self._has_failed:
            self._mark_optimizers()
            self._close(taken=False)
            return True
        self._has_failed = True
        # The step is skipped even if the diagnosis fails.
        contain_error(
            lambda: self._recover(watched, kind), "diagnosing a step", passes=(NonFiniteError,)
        )
        self._is_diagnosing = False
        if self._recovery.has_given_up:
            return False
        self.tripped = True
        scaler = self._host.scaler
        if scaler is not None:
            # It may have unscaled gradients that no step will use: start its next iteration with the same scale.
            scaler.update(scaler.get_scale())
        self._close(taken=False)
        return True

    @contained("judging a step", passes=(NonFiniteError,))
    def _judge(self, watched: WatchedOptimizer) -> str | None:
        self._begin(watched)
        return self._failure_kind(watched)

    def _begin(self, watched: WatchedOptimizer) -> None:
        """Start a new step of the loop, unless this optimizer's step is part of the current one."""
        key = id(watched.optimizer)
        # The first optimizer of a step has started it; a scaler reports its skip within a started step.
        begins = self._has_new_backward or not self._stepped or key in self._stepped
        self._has_new_backward = False
        self._stepped = {key} if begins else {*self._stepped, key}
        if not begins:
            return
        self._judged = self.number
        self._has_failed = False
        self._passes.step_begins()
        self._looks.step_begins()
        self._look_at_models()
        self._looks.gradients(self._state.parameters)

    def _failure_kind(self, watched: WatchedOptimizer) -> str | None:
        """The kind of failure that any rank's gradients show; None if they are good. Reads the device once."""
        bad_gradient, is_zero = False, False
        if self._judges_gradients and self._are_unscaled(watched):
            checks = watched.checks
            if not checks.gradients_are_healthy():
                peak = checks.gradient_peak()
                bad_gradient = checks.gradient_is_bad(peak)
                is_zero = peak == 0.0
            if not self._passes.has_witness and not is_zero:
                self._passes.choose_witness()
        is_in_backward = torch._C._current_graph_task_id() != -1
        if self._host.ranks > 1 and not is_in_backward:
            # Only the affected rank sees weights that its memory has damaged, but all ranks must restore together.
            bad_weights = self._checks_weights and not watched.checks.weights_are_finite()
            flags = torch.tensor([bad_gradient, bad_weights], device=self._host.device).float()
            bad_gradient, bad_weights = map(bool, self._host.summed(flags))
            if bad_weights:
                return WEIGHTS
        bad_loss = self._passes.has_bad_loss()
        if bad_gradient:
            return "non_finite_loss" if bad_loss else "non_finite_gradient"
        if bad_loss and not self._scaled and not self._has_failed and "loss" in self._checks:
            self._report_loss()
        if not is_zero:
            self._recovery.gradient_arrived()
        elif (
            "zero_gradient" in self._checks
            and not bad_loss
            and not self._has_failed
            and self._asks_for_gradient()
        ):
            self._recovery.report_zero_gradient(self._judged)
        if self._is_due and self._take_due_snapshot():
            return WEIGHTS
        if self._looks.is_wanted:
            self._looks.healthy(
                self._judged, watched.optimizer, self._state.parameters, self._passes.losses
            )
        return None

    @contained("looking at weights", passes=(NonFiniteError,))
    def _after(self, watched: WatchedOptimizer) -> None:
        """Check the weights after a step, before the loop copies, averages or saves them."""
        is_good = True
        if self._checks_weights and self._host.ranks == 1 and not self._recovery.has_given_up:
            is_good = watched.checks.weights_are_finite()
        if is_good:
            self._close(taken=True)
        else:
            self._recover(watched, WEIGHTS)
            self._close(taken=False)
        if watched.is_accelerated:
            self._check_accelerate_scaler(watched)
        self._turns.count(watched.inner, left_out=not is_good)

    def _step_with_closure(
        self,
        watched: WatchedOptimizer,
        original: Callable[..., Any],
        closure: Callable[[], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take a step whose closure computes the gradients; those of its first run are checked.

        Optimizers that run the closure more than once, such as LBFGS, handle a bad trial themselves.
        """
        loss, num_runs = None, 0

        def judged() -> Any:
            nonlocal loss, num_runs
            num_runs += 1
            loss = closure()
            if num_runs == 1 and self._is_bad(watched):
                raise _SkipStepError
            return loss

        if args:
            args = (judged, *args[1:])
        else:
            kwargs = {**kwargs, "closure": judged}
        self._state.snapshots.before_update()
        try:
            result = original(*args, **kwargs)
        except _SkipStepError:
            self._turns.count(watched.inner, left_out=True)
            return loss
        self._after(watched)
        return result

    # Gradient scalers

    def scaler_step(
        self, scaler: Any, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Let a gradient scaler take a step, and diagnose a step that it skips because an output is not finite.

        Gradients beyond fp16 are left to the scaler, which lowers its scale.
        """
        watched = next((w for w in self.optimizers if w.inner is optimizer), None)
        if watched is None:
            return NotImplemented
        self._scaled.add(id(optimizer))
        result = original(scaler, optimizer, *args, **kwargs)
        if found_infinity(scaler, optimizer):
            self._scaler_has_skipped = True
            contain_error(
                lambda: self._after_scaler_skip(watched, scaler.get_scale()),
                "looking at a step that the scaler skipped",
                passes=(NonFiniteError,),
            )
        return result

    def _after_scaler_skip(self, watched: WatchedOptimizer, scale: float) -> None:
        self._begin(watched)
        calls = [call for call in self._watched.log.current() if call.outputs]
        # A scaled loss may overflow to Inf, but it is NaN only if an earlier value was bad.
        is_bad = any(not call.output_is_finite for call in calls) or any(
            bool(loss.isnan()) for loss in self._passes.losses
        )
        if self._host.any_rank(is_bad):
            self._recover(watched, "non_finite_loss")
        elif scale < _SCALE_FLOOR:
            self._recovery.report_loss_scale(self.number, scale)
        else:
            self.tripped = False  # the schedule moves, as it does without the guard
        self._close(taken=False)
        self._turns.count(watched.inner, left_out=self.tripped)

    def _check_accelerate_scaler(self, watched: WatchedOptimizer) -> None:
        scaler = self._host.scaler
        if scaler is None or not watched.optimizer.step_was_skipped:
            return
        if scaler.get_scale() < _SCALE_FLOOR:
            self._recovery.report_loss_scale(self.number, scaler.get_scale())

    def _are_unscaled(self, watched: WatchedOptimizer) -> bool:
        """False if a gradient scaler is responsible: gradients are scaled, or the scaler has found infinity itself."""
        if self._host.scaler is not None:
            return False
        return vars(watched.inner).get("found_inf") is None

    # DeepSpeed

    def deepspeed_backward(
        self, original: Callable[..., Any], loss: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Run DeepSpeed's backward, which also steps, unless the loss is bad. Costs one read by the host."""
        self._judged = self.number
        self._passes.losses[:] = [loss.detach()]
        if self._host.any_rank(not is_finite(loss.detach())):
            self._recover(self.optimizers[0], "non_finite_loss")
            self._close(taken=False)
            return None
        result = original(loss, **kwargs)
        self._close(taken=True)
        return result

    # State

    def _asks_for_gradient(self) -> bool:
        """True if a nonzero gradient reached a model's output since the last step."""
        calls = [] if self._passes.is_idle else self._watched.log.current()
        return any(bool(g.any()) for call in calls for g in call.output_gradients if g is not None)

    def _weights_are_bad(self) -> bool:
        return any(not watched.checks.weights_are_finite() for watched in self.optimizers)

    def _look_at_models(self) -> None:
        """Take a new snapshot if other models are trained, new models were found, or weights were loaded."""
        has_new = self._num_held != self._watched.num_held()
        if has_new or any(watched.checks.has_unfrozen for watched in self.optimizers):
            self._watched.survey()
            self._was_loaded = True
        # The first step shows which models the loss comes through.
        self._was_loaded |= self._watched.find_models()
        if self.number == 2:  # the first step made the optimizers' state
            self._state.note_infinite()
        if self.number == 1:  # a model may have been wrapped in DDP since the guard started
            self._host.look_for_ranks(list(self._state.parameters.values()))
        if self._was_loaded:
            self._was_loaded = self._is_due = False
            self._noted_in = self.number
            self._state.forget()
            self._state.take(self.number - 1)
            self._watched.suspect()

    def _take_due_snapshot(self) -> bool:
        """Take a snapshot unless the state is bad; True if optimizer state is not finite. Collective.

        Weights that are only large may be intended.
        """
        self._is_due = False
        is_bad = "weights" in self._checks and self._state_checks.is_suspect()
        if not self._host.any_rank(is_bad):
            self._state.take(self.number - 1)
            return False
        return self._host.any_rank(self._state_checks.has_bad_moment())

    def _diagnose_before_error(self, kind: str) -> None:
        """Log the cause of a failed step for which torch is about to raise an error."""
        self._begin(self.optimizers[0])
        self._recover(self.optimizers[0], kind, raised_by_torch=True)
        self._close(taken=False)

    def _report_loss(self) -> None:
        # Ranks diagnose together, but each rank would report its loss separately here.
        if self._num_reports < _MAX_REPORTS and self._host.ranks == 1:
            self._num_reports += 1
            failure = self._failure(self.optimizers[0], "non_finite_loss")
            with self._diagnosing():
                self._recovery.report_loss(failure)

    def _failure(self, watched: WatchedOptimizer, kind: str) -> StepFailure:
        gradients = watched.checks.clipped_names or watched.checks.bad_gradients()
        # If all are bad, clipping or a bad loss has spread one NaN to all of them, so none is named.
        is_named = bool(watched.checks.clipped_names) or len(gradients) < len(
            watched.checks.parameters
        )
        return StepFailure(
            self._judged,
            kind,
            self._watched.log.current(),
            tuple(gradients) if is_named or len(gradients) == 1 else (),
            dict(self._controls),
            weights_are_bad="weights" in self._checks and self._weights_are_bad(),
        )

    def _recover(self, watched: WatchedOptimizer, kind: str, **how: Any) -> None:
        """Diagnose a failed step and recover. Raises `NonFiniteError` on every rank if the recovery is a stop."""
        self.tripped = True
        self._looks.left_out()
        failure = replace(self._failure(watched, kind), **how)
        if failure.between_steps:
            failure = replace(failure, step=self.number)
        with self._diagnosing():
            decision = self._recovery.recover(failure)
        self.tripped = decision.is_skipped
        if decision.went_back:
            self._is_due = False
        self._clear_unheld_gradients()
        self._mark_optimizers()

    @contextmanager
    def _diagnosing(self) -> Iterator[None]:
        """Mark steps, backward passes and saves inside the context as the guard's and not the loop's."""
        self._is_diagnosing = True
        try:
            with self._watched.unrecorded(), EVENTS.own_save():
                yield
        finally:
            self._is_diagnosing = False

    def _clear_unheld_gradients(self) -> None:
        """Zero bad gradients outside every optimizer: nothing else clears them, and clipping would spread them."""
        owned = {id(p) for p in self._state.parameters.values()}
        for model in self._watched.models.values():
            for parameter in model.parameters():
                grad = parameter.grad
                if grad is not None and id(parameter) not in owned and not is_finite_any(grad):
                    grad.zero_()

    def _close(self, *, taken: bool) -> None:
        """End the current step of the loop for one optimizer."""
        syncs = self._host.syncs_gradients  # DeepSpeed's micro-steps count as one
        is_first = len(self._stepped) <= 1
        self._watched.log.is_closed = self._passes.are_used = True
        if taken:
            self.tripped = False
            self._mark_optimizers()
            for call in self._watched.log.current():
                if call.is_intact:  # to compare a failing call with
                    self._controls[id(call.owner)] = call
            if syncs and is_first:
                self._recovery.budget.take(self._judged)
                self._settle()
                self._is_due |= self._state.due(self.number)
        if is_first:
            self.number += int(syncs)

    def _settle(self) -> None:
        """Exclude the frozen weights and buffers that this healthy step has changed from later comparisons."""
        record = self._watched.record
        # A record created during a step has not seen all of that step.
        if record is not None and not record.is_settled and self.number > self._noted_in:
            record.settle()

    def _mark_optimizers(self) -> None:
        """Tell Accelerate's schedules whether the step was taken; a scaler does so itself."""
        if self._host.accelerator is None:
            return
        for watched in self.optimizers:
            if watched.is_accelerated and (self.tripped or self._host.scaler is None):
                watched.optimizer._is_overflow = self.tripped
