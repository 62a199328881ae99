"""Look at one optimizer step of a loop that is not ours, and take it or leave it out."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.call_recorder import CapturedCall
from dit_lora.guard.attach.finite_checks import StepChecks
from dit_lora.guard.attach.monitoring import Looks
from dit_lora.guard.attach.recovery import OF_FROZEN, WEIGHTS, PluginRecovery, PluginTrip
from dit_lora.guard.attach.scheduler_gating import Turns
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.attach.watched_models import Watched
from dit_lora.guard.gate import ACCELERATED, NonFiniteError, any_not_finite
from dit_lora.guard.state import altered_state, has_run_away, weight_peak
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import has_nan, is_finite
from dit_lora.patching import is_a

_LOG = logging.getLogger("dit_lora")
# Below this a gradient scaler has halved itself 16 times from Accelerate's start at 2**16.
_SCALE_FLOOR = 1.0

_OF_WHAT_IS_HELD = (WEIGHTS, "altered_state", "diverged_weights")


class _GateShutError(Exception):
    """Leaves an optimizer's step, from within its closure, before it changes anything."""


class Steps:
    """Stands between a loop and its `backward`, its clipping and its optimizers' `step`."""

    def __init__(
        self,
        host: Host,
        watched: Watched,
        recovery: PluginRecovery,
        checks: frozenset[str],
        looks: Looks,
    ) -> None:
        self.number = 1
        """The number of the optimizer step under way."""
        self.tripped = False
        self._host = host
        self._watched = watched
        self._state: LoopState = recovery.state
        self._recovery = recovery
        self._looks = looks
        watched.on_call = lambda: looks.call_begins(self.number)
        self._checks = StepChecks(host, checks)
        self._checks_weights = "weights" in checks
        self._controls: dict[int, CapturedCall] = {}
        self._stepped: set[int] = set()
        self._turns = Turns()
        self._reached = False
        """True once a gradient scaler of the loop has called an optimizer's step."""
        self._is_due = False
        self._was_loaded = False
        self._noted_in = 0
        """The step within which frozen weights and buffers were noted; 0 before the first."""

    def require_finite(self) -> None:
        """Recover if a trained weight, a moment or an average is not finite, altered or beyond use on any rank; stop
        if memory has altered a frozen weight or a buffer.
        """
        kind = self._wrong_state()
        if kind is None and self._is_frozen_damaged():
            kind = OF_FROZEN
        if kind is not None:
            self._recover(kind, between_steps=True)

    def before_save(self, saved: Any) -> None:
        """Go back where the last step has left weights that are not finite, which the next would have found.

        Of several ranks one alone may save: it goes back by itself, and the others at their next step.
        """
        if not self._checks_weights:
            return
        if self._host.ranks == 1:
            if self._has_bad_weights():
                self._recover(WEIGHTS, between_steps=True)
        elif any_not_finite(self._state.parameters.values(), self._host.device):
            self._recovery.put_back_alone(self.number)
        elif self._watched.lockstep and has_nan(saved):
            self._recovery.refuse_to_save(self.number)

    def _has_bad_weights(self) -> bool:
        bad = any_not_finite(self._state.parameters.values(), self._host.device)
        return self._host.any_rank(bad)

    def loaded(self, *_: Any) -> None:
        """Note that a checkpoint was loaded: what is held from before is of no use to go back to."""
        self._was_loaded = True

    def load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._was_loaded = True
        return result

    def backward(self, original: Callable[..., Any], loss: torch.Tensor, **kwargs: Any) -> Any:
        self._checks.loss(loss)
        if self._host.under_deepspeed and self._host.any_rank(self._checks.last_loss_is_bad()):
            # Its backward also steps: this is the last moment, and costs a read by the host.
            self._recover("non_finite_loss")
            self._close(taken=False)
            return None
        result = original(loss, **kwargs)
        if self._host.under_deepspeed:
            self._close(taken=True)
        return result

    def clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._host.syncs_gradients and not self._host.under_deepspeed:  # it has used them
            self._note()
        return original(*args, **kwargs)

    def before_clipping(self) -> None:
        """Look at the gradients of a plain loop that is about to clip them."""
        self._checks.forget_gradients()
        self._note()

    def scaled_step(
        self, scaler: Any, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Let a plain loop's own gradient scaler take a step, and judge one that it leaves out.

        Gradients beyond fp16 are the scaler's affair, by a lower scale; an output that is not finite is not.
        """
        self._reached = False
        result = original(optimizer, *args, **kwargs)
        if self._reached:
            return result
        self._look_at_models()
        outputs = (call.output for call in self._watched.calls)
        is_bad = any(output is not None and not is_finite(output) for output in outputs)
        if self._host.any_rank(is_bad):
            self._recover("non_finite_loss")
        elif scaler.get_scale() < _SCALE_FLOOR:
            self._stop_at_scale(scaler.get_scale())
        else:
            self.tripped = False  # the schedule moves, as it does without the guard
        self._close(taken=False)
        self._turns.count(optimizer, left_out=self.tripped)
        return result

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forget the calls of a plain loop that have had their backward: they are over, also where a scaler left
        the step out.
        """
        calls = self._watched.calls
        calls[:] = [call for call in calls if call.output_gradient is None]
        return original(*args, **kwargs)

    def step(self, optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reached = True
        if not self._host.syncs_gradients or self._host.under_deepspeed:
            return original(*args, **kwargs)
        # torch passes a closure first or by name, and None is none.
        closure, *rest = args or (kwargs.pop("closure", None),)
        if closure is not None:
            return self._step_with_closure(
                optimizer, lambda watched: original(watched, *rest, **kwargs), closure
            )
        if self._begins(optimizer):
            kind = self._tripped_by(optimizer)
            self.tripped = kind is not None
            if kind is not None:
                self._recover(kind)
                self._close(taken=False)
        self._turns.count(optimizer, left_out=self.tripped)
        return None if self.tripped else self._taken(optimizer, partial(original, *args, **kwargs))

    def _step_with_closure(
        self, optimizer: Any, original: Callable[..., Any], closure: Callable[[], Any]
    ) -> Any:
        """Take a step whose closure makes the gradients: they are looked at each time that it has run."""
        kind, loss, ran = "", None, False

        def watched() -> Any:
            nonlocal kind, loss, ran
            # What came before the first run is a part of the step: micro-batches that were accumulated or, where
            # the closure does nothing, as Lightning's may, all of it.
            if ran:
                self._forget()
            ran = True
            loss = closure()
            if isinstance(loss, torch.Tensor) and not self._checks.has_losses:
                self._checks.loss(loss)
            if self._begins(optimizer):
                kind = self._tripped_by(optimizer) or ""
                self.tripped = bool(kind)
            if self.tripped:
                raise _GateShutError
            return loss

        # An optimizer may call its closure several times and write in between, as LBFGS does.
        before = self._versions()
        try:
            return self._taken(optimizer, lambda: original(watched))
        except _GateShutError:
            if kind:  # else the step was left out at another optimizer's part of it
                self._recover(kind, moved=self._versions() != before)
                self._close(taken=False)
            return loss
        finally:
            if len(self._stepped) > 1:  # judged with another's: what was noted is no next step's
                self._checks.forget()
            self._turns.count(optimizer, left_out=self.tripped)

    def shuts(self, owner: Any) -> bool:
        """Return True if a schedule, or an average, moves for a step that was left out."""
        shut = self._turns.shuts(owner)
        return self.tripped if shut is None else shut  # an average has no optimizer

    def _versions(self) -> list[int]:
        """Return the counters that each write to a trained weight raises."""
        return [local(parameter)._version for parameter in self._state.parameters.values()]

    def _begins(self, optimizer: Any) -> bool:
        """Return True if this optimizer's step begins one of the loop's, and is not another optimizer's part of it."""
        begins = bool(
            not self._stepped
            or id(optimizer) in self._stepped
            or self._watched.calls
            or self._checks.has_losses
        )
        self._stepped = {id(optimizer)} if begins else {*self._stepped, id(optimizer)}
        return begins

    def _note(self, *, gradients: bool = True) -> None:
        """Note weights, and gradients but for those that Accelerate's gradient scaler has scaled: its own check decides."""
        gradients = gradients and self._host.scaler is None
        self._checks.note(self._state.parameters, gradients=gradients)
        if gradients:
            self._looks.gradients(self._state.parameters)

    def _tripped_by(self, optimizer: Any) -> str | None:
        """Return what is wrong with the step on any rank, or None; takes a snapshot that is due where the weights
        are good.
        """
        self._looks.step_begins()
        self._look_at_models()
        # Else torch's scaler decides, in the optimizer.
        self._note(gradients=vars(optimizer).get("found_inf") is None)
        kind = self._checks.tripped_by(self._asks_for_gradient)
        if kind != WEIGHTS and self._is_due:
            self._is_due = False
            # Bad weights must not take the place of a snapshot that is good.
            wrong = self._wrong_state() if self._checks_weights else None
            if wrong is None:
                self._state.take(self.number - 1)
            kind = wrong or kind
        if kind is None:
            self._looks.healthy(self.number, optimizer, self._state.parameters, self._checks.losses)
        return kind

    def _look_at_models(self) -> None:
        """Begin anew where other models are trained than before, or others are known."""
        if self._watched.has_changed():
            self._watched.survey()
            self._was_loaded = True
        # The first step shows which models the loss comes through.
        self._was_loaded |= self._watched.find_models()
        if self._was_loaded:
            self._start_from_here()

    def _wrong_state(self) -> str | None:
        """Return why what is trained must not take the place of the snapshot that is held, on any rank; None if it
        may.
        """
        together = self._watched.together
        peak = weight_peak(self._state.parameters.values())
        wrong = [
            not all(is_finite(local(tensor)) for tensor in self._state.tensors().values()),
            bool(altered_state(together)),
            has_run_away(peak, together.start_peak),
        ]
        flags = self._host.summed(torch.tensor(wrong, device=self._host.device).float())
        return next(
            (kind for kind, flag in zip(_OF_WHAT_IS_HELD, flags, strict=True) if flag), None
        )

    def _is_frozen_damaged(self) -> bool:
        record = self._watched.record
        # What a checkpoint loaded, or a loop froze since, is the next step's start.
        is_as_noted = not self._was_loaded and not self._watched.has_changed()
        return self._host.any_rank(record is not None and is_as_noted and record.is_damaged())

    def _start_from_here(self) -> None:
        self._was_loaded = self._is_due = False
        self._noted_in = self.number
        self._state.forget()
        self._state.take(self.number - 1)
        self._watched.suspect()

    def _asks_for_gradient(self) -> bool:
        """Return True if anything came back to a model's output: if not, the loss wants nothing changed."""
        gradients = [call.output_gradient for call in self._watched.calls]
        return any(bool(gradient.any()) for gradient in gradients if gradient is not None)

    def _taken(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        # The snapshot is copied beside the forward and backward; its weights are not to be overwritten before.
        self._state.snapshots.before_update()
        result = step()
        self._check_scaler(optimizer)
        # Of several optimizers the first ends the step; the others are parts of it.
        if len(self._stepped) == 1:
            self._close(taken=True)
        if self._state.ema is not None and self._checks_weights and self._has_bad_weights():
            self._recover(WEIGHTS)  # an average that took in NaN has it for good
        return result

    def _check_scaler(self, optimizer: Any) -> None:
        """Stop at a scaler that halves itself for ever: it never trains again and never says so."""
        scaler = self._host.scaler
        if scaler is None or not optimizer.step_was_skipped:
            return
        if (scale := scaler.get_scale()) < _SCALE_FLOOR:
            self._stop_at_scale(scale)

    def _stop_at_scale(self, scale: float) -> NoReturn:
        raise NonFiniteError(
            f"step {self.number}: gradients overflow fp16 at every loss scale down to {scale:g}; use bf16, or "
            "a lower learning rate",
            {"step": self.number, "kind": "loss_scale", "action": "stop"},
        )

    def _recover(self, kind: str, *, moved: bool = False, between_steps: bool = False) -> None:
        """Recover from the trip. Raises `NonFiniteError` on every rank if leaving the step out, or going back, is
        not enough.
        """
        self.tripped = True
        self._looks.left_out()
        gradients = self._checks.bad_gradients()
        calls, controls = list(self._watched.calls), dict(self._controls)
        trip = PluginTrip(self.number, kind, calls, gradients, controls)
        bad = self._checks.own_loss_is_bad()
        trip = replace(trip, moved=moved, between_steps=between_steps, own_loss_is_bad=bad)
        # No step may use the gradients of one that tripped.
        self._forget_gradients()
        with self._watched.unrecorded():  # replays are not to be recorded
            went_back = self._recovery.recover(trip)
        if went_back:
            self._is_due = False
        self._mark_optimizers()

    def _forget_gradients(self) -> None:
        for parameter in self._state.parameters.values():
            parameter.grad = None
        # What no optimizer holds, and so nothing clears, would spoil the clipping of every step to come.
        for model in self._watched.models.values():
            for parameter in model.parameters():
                if parameter.grad is not None and not is_finite(local(parameter.grad)):
                    parameter.grad = None
        scaler = self._host.scaler
        if scaler is not None and self._checks.has_losses:
            # It has unscaled gradients that no step will use: begin its next iteration, at the same scale.
            scaler.update(scaler.get_scale())

    def _close(self, *, taken: bool) -> None:
        """End the step, be it taken or not."""
        syncs = self._host.syncs_gradients  # DeepSpeed's micro-steps count as one
        if taken:
            self.tripped = False
            self._mark_optimizers()
            # To compare a failing call with; its output is memory that nobody needs.
            self._controls = {id(call.owner): call for call in self._watched.calls}
            for call in self._watched.calls:
                call.output = call.output_gradient = None
            if syncs:
                self._recovery.budget.take()
                self._settle()
                self._is_due |= self._state.due(self.number)
        self.number += int(syncs)
        self._forget()

    def _settle(self) -> None:
        """Leave out of the comparison what this step, which was healthy, has changed in frozen weights and buffers."""
        record = self._watched.record
        # A record that was made within a step has not seen the whole of it.
        if record is not None and not record.is_settled and self.number > self._noted_in:
            record.settle()

    def _mark_optimizers(self) -> None:
        """Say whether the step was taken by Accelerate's word for it, which its schedules obey; a scaler says so
        itself.
        """
        for optimizer in self._state.optimizers:
            if is_a(optimizer, ACCELERATED) and (self.tripped or self._host.scaler is None):
                optimizer._is_overflow = self.tripped

    def _forget(self) -> None:
        self._watched.forget_calls()
        self._checks.forget()
