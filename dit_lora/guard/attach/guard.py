"""The guard in somebody else's loop: two lines make it safe.

    guard = dit_lora.Guard.attach(accelerator, model, optimizer)     # after accelerator.prepare
    guard = dit_lora.Guard.watch(model, optimizer)                   # in plain PyTorch

The loop stays as it is. Each optimizer step is judged by the gradients that it is about to use; a step with a bad one
is skipped, and `lr_scheduler.step` after it does nothing. Only then the micro-batch is run again, and the cause named.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dit_lora.config.recovery_settings import LoopConfig, RecoveryConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext, unwrap_optimizer
from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.discover_models import ModelDiscovery
from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.find_models import describe_models
from dit_lora.guard.attach.finite_checks import CHECKS, validate_check_names
from dit_lora.guard.attach.guard_json import GuardJsonFile
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.loop_recovery import LoopRecovery
from dit_lora.guard.attach.monitoring import HealthyStepChecks
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.step_hooks import StepHooks
from dit_lora.guard.attach.training_state import LoopState, MovingAverage
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.finite_gate import NonFiniteError

if TYPE_CHECKING:  # the guard needs only torch
    from accelerate import Accelerator

_GUARD_ATTRIBUTE = "_dit_lora_guard"


class _GuardReference:
    """Attribute of an optimizer that keeps its guard alive.

    Copies and pickles of the optimizer contain None instead.
    """

    def __init__(self, guard: "Guard") -> None:
        self.guard = guard

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _SkippableStepMethod:
    """Replacement for the `step` of a schedule or moving average, which does nothing for a skipped step."""

    def __init__(self, owner: Any, should_skip: Callable[[Any], bool]) -> None:
        self._owner = weakref.ref(owner)
        self._should_skip = should_skip

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The schedule may be gone by the time that its step is called.
        owner = self._owner()
        is_shut = owner is not None and try_or_warn(lambda: self._should_skip(owner), "holding a schedule")
        return None if is_shut else original(*args, **kwargs)


class Guard:
    """Watches the models and optimizers of a training loop, and skips or repairs steps with NaN or Inf.

    Create it with `attach` or `watch`.
    """

    def __init__(
        self,
        host: LoopProcessContext,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        config: LoopConfig,
        folder: Path | None,
        checks: frozenset[str],
        discovery: ModelDiscovery | None = None,
    ) -> None:
        self._host = host
        self._interceptions = MethodInterceptions()
        self._gated_methods: list[_SkippableStepMethod] = []
        # The watched models fill in the parameters.
        self._state = LoopState({}, optimizers, interval_steps=config.snapshot_every)
        if discovery is None:
            discovery = ModelDiscovery(CallLog(EVENTS.batches), dict)
        self._watched = WatchedModels(host, models, self._state, discovery, compares_frozen="frozen" in checks)
        self._state.get_models = lambda: self._watched.models
        self._file = GuardJsonFile(host, folder)
        self._recovery = LoopRecovery(
            host,
            self._state,
            config,
            folder,
            self._watched,
            SampleNamer(EVENTS.batches),
            on_event=self._write_step_counts,
            guard_id=self._file.id,
        )
        self._config, self._checks = config, checks
        self._healthy_checks = HealthyStepChecks(
            host,
            self._watched,
            config,
            folder,
            guard_id=self._file.id,
            write=self._recovery.write_event,
            write_gradient_bundle=self._recovery.write_gradient_bundle,
        )
        self._step_hooks = StepHooks(host, self._watched, self._recovery, checks, self._healthy_checks)
        self._has_logged_summary = False

    @classmethod
    def attach(
        cls,
        accelerator: "Accelerator | None",
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        lr_scheduler: Any = None,
        ema: MovingAverage | None = None,
        config: RecoveryConfig | None = None,
        folder: str | Path | None = None,
        checks: Collection[str] = CHECKS,
        loader: Any = None,
    ) -> "Guard":
        """Guard a loop whose model and optimizer `accelerator.prepare` has returned; for plain PyTorch see `watch`.

        Guards every parameter of the optimizer, and every model that the loss of the first step passes through. The
        samples of a skipped step are not repeated before the next epoch, and a bad sample stays in the loop's dataset.

        Args:
            accelerator: The loop's `Accelerator`.
            model: The prepared model, or a list of models.
            optimizer: The prepared optimizer, or a list.
            lr_scheduler: A schedule that Accelerate has not prepared, or a list: a skipped step does not advance it.
            ema: An average with a `step` method, as Diffusers' `EMAModel`: a skipped step does not advance it.
            config: A `LoopConfig`, or a `RecoveryConfig`, whose default recovery actions end in a stop.
            folder: Receives guard.json, events.jsonl, bundles, statistics and, at a stop, the last good weights.
            checks: The checks to run, by default all of `CHECKS`.
            loader: No longer needed: every DataLoader of the process is followed.

        Raises:
            DitLoraError: If the optimizer holds no parameter of a model, or a setting is out of bounds.
        """
        models = _to_list(model)
        if not models:
            raise DitLoraError("Guard.attach: model must be a torch.nn.Module; got none")
        return cls.create(
            accelerator,
            models,
            _to_list(optimizer),
            lr_scheduler=lr_scheduler,
            ema=ema,
            config=config,
            folder=folder,
            checks=checks,
        )

    @classmethod
    def watch(
        cls,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: Any,
        *,
        lr_scheduler: Any = None,
        ema: MovingAverage | None = None,
        config: RecoveryConfig | None = None,
        folder: str | Path | None = None,
        checks: Collection[str] = CHECKS,
        loader: Any = None,
        scaler: Any = None,
    ) -> "Guard":
        """Guard a loop in plain PyTorch: its `optimizer.step`, with or without a closure or a gradient scaler.

        In a process group, as with DDP, all ranks take the same decision for each step. The arguments not listed here
        are those of `attach`.

        Args:
            model: The model or a list; None for the models that the loss of the first step passes through.
            optimizer: The optimizer or a list.
            scaler: No longer needed: a `torch.amp.GradScaler` is followed automatically. It keeps its own check; a
                step that it skips because an output is not finite is diagnosed.
        """
        return cls.create(
            None,
            _to_list(model),
            _to_list(optimizer),
            lr_scheduler=lr_scheduler,
            ema=ema,
            config=config,
            folder=folder,
            checks=checks,
        )

    @classmethod
    def create(
        cls,
        accelerator: "Accelerator | None",
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        lr_scheduler: Any = None,
        ema: MovingAverage | None = None,
        config: RecoveryConfig | None = None,
        folder: str | Path | None = None,
        checks: Collection[str] = CHECKS,
        discovery: ModelDiscovery | None = None,
    ) -> "Guard":
        """Create a guard for a loop with or without an accelerator, and with or without named models.

        `discovery` may have searched for models before the guard existed.
        """
        wrong_types = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong_types:
            raise DitLoraError(f"Guard: model must be a torch.nn.Module; got {', '.join(wrong_types)}")
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not parameters:
            raise DitLoraError("Guard: give an optimizer with parameters; got none")
        host = LoopProcessContext(accelerator, parameters[0].device)
        host.detect_distributed_training(parameters)
        guard = cls(
            host,
            models,
            [host.find_prepared_optimizer(optimizer) for optimizer in optimizers],
            config=LoopConfig.from_recovery_config(config or LoopConfig()),
            folder=host.get_process_folder(Path(folder)) if folder is not None else None,
            checks=validate_check_names(checks),
            discovery=discovery,
        )
        dtypes = {p.dtype for p in guard._state.parameters.values()}
        if torch.float16 in dtypes:  # AdamW's eps of 1e-8 is 0 in fp16, and 0 / 0 is NaN
            host.log(
                "guard: trained parameters are fp16, where AdamW turns a gradient of 0 into NaN; cast them to fp32"
            )
        if torch.bfloat16 in dtypes:
            host.log("guard: trained parameters are bf16: small updates round to nothing; use fp32")
        guard._install_hooks(_to_list(lr_scheduler), ema)
        return guard

    @property
    def step(self) -> int:
        """Number of the training loop's current optimizer step, from 1."""
        return self._step_hooks.number

    @property
    def events(self) -> list[dict[str, Any]]:
        """Records of events.jsonl that this guard has written, one dict per line."""
        return self._recovery.events

    @property
    def diagnosis_context(self) -> DiagnosisContext:
        """Context for diagnosing the first watched model: the parts that a diagnosis may inspect and switch off."""
        return next(iter(self._watched.contexts.values()))

    @contextmanager
    def microbatch(self, ids: Sequence[str], generator: torch.Generator | None = None) -> Iterator[None]:
        """Name the samples of the forward passes inside the context, in the order of their rows.

        A replay restores `generator` to its current state; torch's global generators are restored in any case. If an
        index exceeds a model's embedding table, the sample is named before the error is raised (on a CPU; a GPU ends
        the process).
        """
        log = self._watched.log
        log.sample_names, log.generator = tuple(ids), generator
        try:
            yield
        except IndexError:
            # PyTorch's error names neither the sample nor the table.
            offenders = try_or_warn(self._watched.find_out_of_range_ids, "an index out of range")
            if offenders:
                self._recovery.log(format_list("guard: no table of the model has these indices", offenders))
            raise
        finally:
            log.sample_names, log.generator = (), None

    def before_save(self, saved: Any = None) -> None:
        """Check values that are about to be saved: restore bad trained weights, and report other bad values.

        `torch.save` and safetensors do this automatically while a guard lives; call it before saving in another way.
        Not collective: the rank that saves may call it without the others.
        """
        self._step_hooks.before_save(saved, "what is saved")

    def before_clipping(self) -> None:
        """Record bad gradients before clipping with a function other than `clip_grad_norm_`, to have them named."""
        self._step_hooks.before_clipping()

    def add_schedule(self, schedule: Any) -> None:
        """Hold a learning rate schedule in skipped steps too, and restore it together with the weights."""
        self._state.schedules.append(schedule)
        self._make_step_skippable(schedule)

    def is_watching(self, optimizer: Any) -> bool:
        """True if this guard watches the optimizer."""
        return any(watched.inner is optimizer for watched in self._step_hooks.optimizers)

    def detach(self) -> None:
        """Stop guarding the training loop, and report the number of steps that were not taken."""
        self._log_summary()
        EVENTS.unregister_loop_listener(self._step_hooks)
        self._watched.stop_recording_calls()
        self._interceptions.restore_originals()
        for watched in self._step_hooks.optimizers:
            # Without this reference the guard can be freed.
            vars(watched.inner).pop(_GUARD_ATTRIBUTE, None)

    def require_finite(self) -> None:
        """Check before saving that weights, optimizer state and averages are finite and unaltered. Collective.

        Restores the last good state if they are not.

        Raises:
            NonFiniteError: On every rank, if there is nothing good to restore, or if memory has altered a frozen
                weight or a buffer, which snapshots do not hold.
        """
        self._step_hooks.require_finite()
        self._write_step_counts()

    def check_state(self) -> None:
        """Check like `require_finite`, but only log what cannot be restored. Collective."""
        check = partial(self._step_hooks.require_finite, may_raise=False)
        try_or_warn(check, "looking at what is trained", reraised=(NonFiniteError,))
        self._write_step_counts()

    def format_summary(self) -> str | None:
        """Summary of the steps that were not taken, on one line; None if all were taken."""
        return self._recovery.budget.format_summary()

    def _install_hooks(self, schedules: list[Any], ema: MovingAverage | None) -> None:
        accelerator, interceptions, hooks = (self._host.accelerator, self._interceptions, self._step_hooks)
        if accelerator is not None:
            interceptions.intercept_method(accelerator, "end_training", self._end_training)
            # A loaded checkpoint makes earlier snapshots invalid.
            interceptions.intercept_method(accelerator, "load_state", hooks.load_state)
            if self._host.uses_deepspeed:
                interceptions.intercept_method(accelerator, "backward", hooks.deepspeed_backward)
        for watched in hooks.optimizers:
            interceptions.intercept_method(watched.optimizer, "step", watched.step)
            interceptions.intercept_method(watched.optimizer, "load_state_dict", hooks.load_state)
            # A script may drop the guard object, so it has to live as long as the optimizer.
            setattr(watched.inner, _GUARD_ATTRIBUTE, _GuardReference(self))
        self._watched.on_refresh = self._refresh_watched_models
        self._refresh_watched_models()
        for owner in [*schedules, *_to_list(ema)]:
            self._make_step_skippable(owner)
        self._state.ema = ema
        self._state.schedules = [*(accelerator._schedulers if accelerator else []), *schedules]
        # Take a snapshot of the start, so that a failure in the first steps can be undone.
        if not self._host.uses_deepspeed:  # its optimizer state is the engine's
            self._state.take_snapshot(0)
        # Events of the process come only now, when everything that handles them exists.
        EVENTS.register_loop_listener(hooks)
        EVENTS.follow_accelerate_loaders()

    def _make_step_skippable(self, owner: Any) -> None:
        """Make the `step` of a learning rate schedule or moving average do nothing in a skipped step."""
        gated = _SkippableStepMethod(owner, self._step_hooks.should_skip_update)
        self._gated_methods.append(gated)
        self._interceptions.intercept_method(owner, "step", gated.step)

    def _refresh_watched_models(self) -> None:
        self._step_hooks.refresh_optimizer_parameters()
        self._file.write_guard_entry(
            models=describe_models(self._watched.models),
            optimizers=[type(unwrap_optimizer(optimizer)).__name__ for optimizer in self._state.optimizers],
            checks=sorted(self._checks),
            settings=asdict(self._config),
        )

    def _write_step_counts(self, **facts: Any) -> None:
        budget = self._recovery.budget
        disabled = sorted(self._watched.disabled_names)
        self._file.write_guard_entry(taken=budget.num_taken, lost=budget.num_lost, switched_off=disabled, **facts)

    def _end_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try_or_warn(self._log_summary, "closing the guard")
        return original(*args, **kwargs)

    def _log_summary(self) -> None:
        self._healthy_checks.close()
        self._write_step_counts(ended=True)
        line = self.format_summary()
        # Log once: the end of training and `detach` may both call this.
        if line and not self._has_logged_summary:
            self._has_logged_summary = True
            self._host.log(f"guard: {line}")


def _to_list(value: Any) -> list[Any]:
    """Wrap a single value in a list; None becomes an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
