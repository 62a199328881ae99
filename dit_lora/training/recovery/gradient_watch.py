"""Compares gradients of a run with the slope of its loss, as often as `guard.gradient_every` says."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Event
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.guard.gradient_check.cause import (
    ReplayableStep,
    WrongGradientCause,
    build_diagnosis_record,
    check_ranks_are_equal,
    find_gradient_cause,
    gather_loss_terms,
)
from dit_lora.guard.gradient_check.check import GradientReport
from dit_lora.guard.gradient_check.low_precision import check_step_gradient
from dit_lora.guard.gradient_check.ranks import GradientCheckError, gather_or_raise, run_or_raise_on_all_ranks
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.memory import is_out_of_memory
from dit_lora.numerics.ranks import get_process_index
from dit_lora.training.check_budget import count_steps_to_cover_check, estimate_gradient_evaluations
from dit_lora.training.checkpoints.files import checkpoint_path
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.distributed.context_parallel import ContextParallel
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.distributed.fsdp import ShardedEngine
from dit_lora.training.distributed.zero import Zero2
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.execution.activation_checkpointing import make_checkpointing_fallback
from dit_lora.training.execution.offload import make_offload_fallback
from dit_lora.training.loop import RolledBackError
from dit_lora.training.recovery.good_state import LastGoodSnapshot
from dit_lora.training.recovery.parity_batches import disable_for_run
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.task import AnySetup

GradientAction = Literal["report", "fallback", "rollback", "stop"]

_EVENT_KIND = "gradient_check"
_UNSUPPORTED_ENGINES = {
    ShardedEngine: "FSDP2: each rank has only a shard of the weights and gradients, and the check moves whole ones",
    ContextParallel: "train.context_parallel: in a replay, each rank has the gradient of its own tokens only",
}
"""Why an engine's gradients cannot be checked."""
_ADVICE = {
    "recomputation": "; set train.checkpointing=none",
    "offload": "; set train.offload=none",
    "accumulation": "; set train.accumulate=1",
    "ranks": "; train on one rank to rule out the connection between ranks",
}
"""What to do about causes that the guard does not switch off itself."""


@dataclass
class PeriodicGradientCheck:
    """Checks gradients of a run's steps. Weights, gradients and random state are bitwise unchanged afterwards."""

    setup: AnySetup
    recovery: RunRecovery
    start_step: int
    ema: TrainedEMA | None = None
    """The run's moving average, which is rolled back with the weights."""
    _next_step: int = field(init=False)
    """The first step that an automatic interval allows to check."""
    _num_evaluations: int = field(init=False)
    """Evaluations of the loss that a check takes: an estimate until the first one."""
    _num_switched_off: int = field(init=False)
    _last_sound_step: int | None = None
    """The last step whose gradient agreed with the loss, in this process."""
    _good_state: LastGoodSnapshot | None = field(init=False, default=None)
    """The state before that step; None if the guard may not roll back, or has nothing to switch off."""

    def __post_init__(self) -> None:
        self._next_step = self.start_step + 1
        self._num_evaluations = estimate_gradient_evaluations(self.setup.dtype)
        self._num_switched_off = len(self.recovery.state.switched_off)
        # Without switching a component off, the steps after a rollback would have the same fault.
        if self.is_gradient_check_on and {"fallback", "rollback"} <= {*self.setup.recipe.guard.on_nonfinite}:
            self._good_state = LastGoodSnapshot(self.recovery, self.ema)

    @property
    def is_gradient_check_on(self) -> bool:
        return bool(self.setup.recipe.guard.gradient_every) and self.unsupported_reason is None

    @property
    def unsupported_reason(self) -> str | None:
        """Why this run's gradients cannot be checked; None if they can, or should not be."""
        recipe = self.setup.recipe
        if not recipe.guard.gradient_every:
            return None
        reason = None
        engine = type(self.setup.engine)
        if engine not in (Engine, Zero2):
            reason = _UNSUPPORTED_ENGINES.get(engine, f"{engine.__name__}: it is not one process, DDP or ZeRO-2")
        # Rounding of activations to fp8 is no part of the gradient, so the two differ in a healthy run.
        elif recipe.kernels.fp8 != "off":
            reason = f"kernels.fp8={recipe.kernels.fp8}: its rounding makes the loss uneven"
        return f"guard.gradient_every: gradients are not checked with {reason}" if reason else None

    @property
    def skipped_reason(self) -> str | None:
        """Why an automatic interval allows no check in this run; None if it allows one."""
        # With a number of steps, the first step is always checked.
        if (
            not self.is_gradient_check_on
            or self.setup.recipe.guard.gradient_every != "auto"
            or self._is_affordable(self._next_step)
        ):
            return None
        num_steps = count_steps_to_cover_check(self._num_evaluations)
        return (
            f"gradients are not checked: guard.gradient_every=auto needs a run of {num_steps} steps, of which a check "
            "costs 1%; set a number of steps instead"
        )

    def is_due(self, step: int) -> bool:
        """True if this step's gradient is to be checked."""
        if not self.is_gradient_check_on:
            return False
        interval = self.setup.recipe.guard.gradient_every
        if interval == "auto":
            return self._is_affordable(step) and (step >= self._next_step or self._has_new_fallback)
        # Whatever replaces a component that the guard has switched off has not been checked either.
        return step == self.start_step + 1 or step % interval == 0 or self._has_new_fallback

    @property
    def _has_new_fallback(self) -> bool:
        """True if the guard has switched off a component since the last check."""
        return len(self.recovery.state.switched_off) != self._num_switched_off

    def _is_affordable(self, step: int) -> bool:
        """True if the steps from this one to the last would pay for a check."""
        return self.setup.recipe.train.steps - step + 1 >= count_steps_to_cover_check(self._num_evaluations)

    def restart_after_step(self, step: int) -> None:
        """Note that training continues after `step`, which may be earlier than the last checked one."""
        if self._last_sound_step is not None:
            self._last_sound_step = min(self._last_sound_step, step)
        # The state of a step that the guard has undone.
        if self._good_state is not None and self._good_state.step is not None and self._good_state.step > step:
            self._good_state.drop_snapshot()

    def check_gradient_if_due(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        losses: Sequence[torch.Tensor],
        previous_batch: MicroBatch | None,
    ) -> None:
        """Check a step's gradient after accumulation and before clipping. See `LoopCallbacks.on_gradients`.

        A wrong gradient is logged and written to events.jsonl. After an error inside the check the run goes on.

        Raises:
            RolledBackError: A component at fault was switched off, and steps are to be taken again.
            NonFiniteError: The gradient is wrong, and `guard.on_nonfinite` has no `fallback`.
        """
        # On the unwrapped model, as all replays.
        replayable = ReplayableStep(micro_batches, self.setup.transformer, self.setup.dtype, previous_batch)
        # Until the bundle is written.
        with ExitStack() as whole_gradients:
            self._check_gradient_and_recover(step, replayable, losses, whole_gradients)

    def _check_gradient_and_recover(
        self, step: int, replayable: ReplayableStep, losses: Sequence[torch.Tensor], whole_gradients: ExitStack
    ) -> None:
        began = time.perf_counter()
        self._num_switched_off = len(self.recovery.state.switched_off)
        # The check is no part of training: whatever fails in it must not end the run.
        optional_work = self.setup.session.optional_work
        outcome = optional_work.run_optional_work(
            "gradient checks",
            step,
            lambda: self._check_and_diagnose_gradient(replayable, losses, whole_gradients),
            is_collective=self.setup.accelerator.num_processes > 1,
        )
        self._next_step = step + count_steps_to_cover_check(self._num_evaluations)
        # A loss or gradient that is not finite is for the step's gate.
        if outcome is None or not outcome[0].is_finite:
            return
        report, finding = outcome
        if report.result == "agrees":
            self._record_sound_step(step, report)
            return
        action, target = self._choose_action(step, report, finding)
        message = f"{report.message}{finding.message}{self._describe_action(step, finding, action, target)}"
        event = Event(
            step,
            _EVENT_KIND,
            build_diagnosis_record(report, finding, message),
            action=action,
            seconds=time.perf_counter() - began,
        )
        if report.result == "differs":
            # Before the component is off: a replay switches off what was off in the step.
            bundle = optional_work.run_optional_work(
                "bundles of wrong gradients",
                step,
                lambda: run_or_raise_on_all_ranks(
                    lambda: self._write_bundle(replayable.micro_batches, finding, event)
                ),
                is_collective=True,
            )
            event = replace(event, facts={"bundle": bundle} if bundle else {})
        self.recovery.files.write_event(event)
        if action == "stop":
            self._save_and_stop_run(step, message, event)
        self.recovery.files.say(f"guard: step {step}: {message}")
        if finding.fallback is not None and action in ("fallback", "rollback"):
            disable_for_run(self.recovery, finding.fallback)
            # Without the component, more may be kept for backward.
            choose_checkpointing(self.setup)
            if self._good_state is not None and action == "rollback":
                self._good_state.restore_snapshot(target)
            raise RolledBackError(target)

    def _choose_action(
        self, step: int, report: GradientReport, finding: WrongGradientCause
    ) -> tuple[GradientAction, int]:
        """The action for a gradient that does not agree, and the step after which training continues. Collective."""
        actions = self.setup.recipe.guard.on_nonfinite
        # As for a wrong kernel: the user has ruled out that a component is switched off.
        if report.result == "differs" and "fallback" not in actions:
            return "stop", step - 1
        # Without checkpointing or offload, larger samples of a later step might not fit into memory.
        if finding.fallback is None or finding.cause in _ADVICE:
            return "report", step
        target = self._good_state.find_finite_step() if self._good_state is not None else None
        return ("fallback", step - 1) if target is None or target == step - 1 else ("rollback", target)

    def _save_and_stop_run(self, step: int, message: str, event: Event) -> NoReturn:
        """Save the steps before this one, and end the run. Collective."""
        lines = [f"step {step}: {message}", "stopped, because guard.on_nonfinite has no fallback"]
        if step - 1 > self.recovery.files.find_newest_saved_step():
            try:
                self.recovery.files.save_run_checkpoint(step - 1, self.recovery.state_dict())
                lines.append(f"step {step - 1} is saved in {checkpoint_path(Path(), step - 1)}")
            # Such as a full disk: the run ends because of the gradient, which must still be said.
            except DitLoraError as error:
                lines.append(f"{error}")
        raise NonFiniteError("\n".join(lines), event.to_record())

    def _write_bundle(
        self, micro_batches: Sequence[MicroBatch], finding: WrongGradientCause, event: Event
    ) -> str | None:
        """Write a bundle of a step with a wrong gradient: if ranks have different ones, that of the first wrong rank.

        Returns its path on the main process, or None. Collective.
        """
        # The main process writes the bundle, and its own gradient may be right.
        source = (finding.evidence.get("ranks") or [0])[0]

        def copy_gradients() -> dict[str, torch.Tensor]:
            if get_process_index() != source:
                return {}
            parameters = self.setup.transformer.named_parameters()
            return {name: p.grad.cpu() for name, p in parameters if p.requires_grad and p.grad is not None}

        gradients = gather_or_raise("gradients", copy_gradients)[source]
        return self.recovery.files.write_gradient_bundle(micro_batches, gradients, event)

    def _check_and_diagnose_gradient(
        self, step: ReplayableStep, losses: Sequence[torch.Tensor], whole_gradients: ExitStack
    ) -> tuple[GradientReport, WrongGradientCause]:
        """Check a step's gradient, and find the cause if it differs from the loss's slope. Collective.

        `whole_gradients` keeps the gradients until it is closed.

        The result is `cannot tell` on all ranks after an error on one of them.
        """
        try:
            run_or_raise_on_all_ranks(
                lambda: whole_gradients.enter_context(self.setup.engine.keep_unsharded_gradients())
            )
            report, finding = run_or_raise_on_all_ranks(lambda: self._compare_with_ranks_and_loss(step, losses))
        except GradientCheckError as error:
            # Left out from here on.
            if is_out_of_memory(error):
                raise
            return GradientReport("cannot tell", (), 0, reason=str(error)), WrongGradientCause("unknown", "")
        if report.result != "differs" or finding is not None:
            return report, finding or WrongGradientCause("unknown", "")
        context, fallbacks = self.recovery.diagnosis_context, list_gradient_fallbacks(self.setup.transformer)
        try:
            return report, run_or_raise_on_all_ranks(lambda: find_gradient_cause(step, report, context, fallbacks))
        # That the gradient is wrong is known already, and must not be lost.
        except GradientCheckError as error:
            reason = "does not fit into memory" if is_out_of_memory(error) else f"failed: {error}"
            return report, WrongGradientCause("unknown", f"; a replay to find the cause {reason}")

    def _compare_with_ranks_and_loss(
        self, step: ReplayableStep, losses: Sequence[torch.Tensor]
    ) -> tuple[GradientReport, WrongGradientCause | None]:
        """Compare a step's gradient with those of other ranks, which are a cause if they differ, and with the loss."""
        # First: ranks with different gradients would take different decisions below.
        unequal = check_ranks_are_equal(step)
        if unequal is not None:
            return unequal
        report = check_step_gradient(
            step,
            groups={group["name"]: group["param_names"] for group in self.setup.optimizer.param_groups},
            step_loss=gather_loss_terms(lambda: losses).double().sum().item(),
            # Offload replaces the values of frozen weights itself.
            allow_fp32=make_offload_fallback(self.setup.transformer) is None,
        )
        return report, None

    def _record_sound_step(self, step: int, report: GradientReport) -> None:
        """Note that a step's gradient agrees with the loss, say so the first time, and keep the state before it."""
        if self._good_state is not None:
            self._good_state.take_snapshot(step - 1)
        if self._last_sound_step is None:
            is_dora = self.setup.recipe.lora.kind == "dora"
            # By design, its gradient leaves out how A and B change the norm of the weights.
            scope = " (of the magnitudes; that of A and B is no derivative in DoRA)" if is_dora else ""
            self.recovery.files.say(f"guard: step {step}: {report.message}{scope}")
        self._last_sound_step = step
        # The next check will cost about as much.
        self._num_evaluations = report.num_evaluations
        self._next_step = step + count_steps_to_cover_check(report.num_evaluations)

    def _describe_action(self, step: int, finding: WrongGradientCause, action: GradientAction, target: int) -> str:
        """The action taken for a cause, or advice for the user, as the end of a sentence."""
        # Steps that an earlier process trained have not been checked by this one.
        first_step = 1 + (self._last_sound_step or 0)
        span = f"step {first_step}" if first_step == step - 1 else f"steps {first_step} to {step - 1}"
        affected = f"; {span} may have been trained with it" if first_step < step else ""
        if action == "stop" or finding.fallback is None or action == "report":
            return _ADVICE.get(finding.cause, "") + (affected if action == "stop" else "")
        text = f"; {finding.fallback.name} stays off for this run, and "
        if action == "rollback":
            return f"{text}training goes back to step {target}: the next {step - target} are repeated"
        return f"{text}the step is repeated{affected}"


def list_gradient_fallbacks(model: nn.Module) -> list[Fallback]:
    """Fallbacks of components that change only how a gradient is computed: NaN is never diagnosed with them."""
    fallbacks = [make_offload_fallback(model) or make_checkpointing_fallback(model)]
    return [fallback for fallback in fallbacks if fallback is not None]
