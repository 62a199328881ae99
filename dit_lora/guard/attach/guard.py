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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dit_lora.config.ladder import LadderConfig, LoopConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.discover_models import ModelDiscovery
from dit_lora.guard.attach.containment import contain_error
from dit_lora.guard.attach.finite_checks import CHECKS, check_names
from dit_lora.guard.attach.guard_json import GuardFile, models_in_words, optimizers_in_words
from dit_lora.guard.attach.interception import Interceptions
from dit_lora.guard.attach.loop_events import EVENTS
from dit_lora.guard.attach.monitoring import Looks
from dit_lora.guard.attach.name_samples import SampleNamer
from dit_lora.guard.attach.recovery import PluginRecovery
from dit_lora.guard.attach.step_hooks import StepHooks
from dit_lora.guard.attach.training_state import Averages, LoopState
from dit_lora.guard.attach.watched_models import WatchedModels
from dit_lora.guard.gate import ACCELERATED, NonFiniteError
from dit_lora.guard.suspects import Suspects
from dit_lora.patching import is_a

if TYPE_CHECKING:  # the guard needs only torch
    from accelerate import Accelerator

_ANCHOR = "_dit_lora_guard"


class _Anchor:
    """Keeps a guard alive as long as its optimizer. Copies and pickles of the optimizer contain None instead."""

    def __init__(self, guard: "Guard") -> None:
        self.guard = guard

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _GatedMethod:
    """Wraps the `step` of a schedule or an average, which does nothing for a skipped step."""

    def __init__(self, owner: Any, is_shut: Callable[[Any], bool]) -> None:
        self._owner = weakref.ref(owner)
        self._is_shut = is_shut

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The schedule may be gone by the time that its step is called.
        owner = self._owner()
        is_shut = owner is not None and contain_error(
            lambda: self._is_shut(owner), "holding a schedule"
        )
        return None if is_shut else original(*args, **kwargs)


class Guard:
    """Watches the models and optimizers of a loop. Create it with `attach` or `watch`."""

    def __init__(
        self,
        host: Host,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        config: LoopConfig,
        folder: Path | None,
        checks: frozenset[str],
        discovery: ModelDiscovery | None = None,
    ) -> None:
        self._host = host
        self._interceptions = Interceptions()
        self._gated: list[_GatedMethod] = []
        # The watched models fill in the parameters.
        self._state = LoopState({}, optimizers, every=config.snapshot_every)
        if discovery is None:
            discovery = ModelDiscovery(CallLog(EVENTS.batches), dict)
        self._watched = WatchedModels(
            host, models, self._state, discovery, compares_frozen="frozen" in checks
        )
        self._state.models = lambda: self._watched.models
        self._file = GuardFile(host, folder)
        self._recovery = PluginRecovery(
            host,
            self._state,
            config,
            folder,
            self._watched,
            SampleNamer(EVENTS.batches),
            note=self._note,
            guard_id=self._file.id,
        )
        self._config, self._checks = config, checks
        self._looks = Looks(
            host,
            self._watched,
            config,
            folder,
            guard_id=self._file.id,
            write=self._recovery.write,
        )
        self._steps = StepHooks(host, self._watched, self._recovery, checks, self._looks)
        self._load_hooks: set[int] = set()
        self._has_closed = False

    @classmethod
    def attach(
        cls,
        accelerator: "Accelerator | None",
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        lr_scheduler: Any = None,
        ema: Averages | None = None,
        config: LadderConfig | None = None,
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
            config: A `LoopConfig`, or a `LadderConfig`, whose default ladder ends in a stop.
            folder: Receives guard.json, events.jsonl, bundles, statistics and, at a stop, the last good weights.
            checks: The checks to run, by default all of `CHECKS`.
            loader: No longer needed: every DataLoader of the process is followed.

        Raises:
            DitLoraError: If the optimizer holds no parameter of a model, or a setting is out of bounds.
        """
        models = _listed(model)
        if not models:
            raise DitLoraError("Guard.attach: model is a torch.nn.Module; got none")
        return cls.over(
            accelerator,
            models,
            _listed(optimizer),
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
        ema: Averages | None = None,
        config: LadderConfig | None = None,
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
                step that
                it skips because an output is not finite is diagnosed.
        """
        return cls.over(
            None,
            _listed(model),
            _listed(optimizer),
            lr_scheduler=lr_scheduler,
            ema=ema,
            config=config,
            folder=folder,
            checks=checks,
        )

    @classmethod
    def over(
        cls,
        accelerator: "Accelerator | None",
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        lr_scheduler: Any = None,
        ema: Averages | None = None,
        config: LadderConfig | None = None,
        folder: str | Path | None = None,
        checks: Collection[str] = CHECKS,
        discovery: ModelDiscovery | None = None,
    ) -> "Guard":
        """Guard a loop with or without an accelerator, and with or without named models.

        `discovery` may have searched for models before the guard existed.
        """
        wrong_types = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong_types:
            raise DitLoraError(f"Guard: model is a torch.nn.Module; got {', '.join(wrong_types)}")
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not parameters:
            raise DitLoraError("Guard: there is no optimizer that holds a parameter; got none")
        host = Host(accelerator, parameters[0].device)
        host.look_for_ranks(parameters)
        guard = cls(
            host,
            models,
            [host.prepared(optimizer) for optimizer in optimizers],
            config=LoopConfig.of(config or LoopConfig()),
            folder=host.own_folder(Path(folder)) if folder is not None else None,
            checks=check_names(checks),
            discovery=discovery,
        )
        guard._warn_of_narrow_weights()
        guard._watch(_listed(lr_scheduler), ema)
        return guard

    @property
    def step(self) -> int:
        """Number of the current optimizer step, from 1."""
        return self._steps.number

    @property
    def events(self) -> list[dict[str, Any]]:
        """The records of events.jsonl, one dict per line."""
        return self._recovery.events

    @property
    def suspects(self) -> Suspects:
        """The diagnosis context of the first model: the parts that a diagnosis may inspect and switch off."""
        return next(iter(self._watched.suspects.values()))

    @contextmanager
    def microbatch(
        self, ids: Sequence[str], generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Name the samples of the forward passes inside the context, in the order of their rows.

        A replay restores `generator` to its current state; torch's global generators are restored in any case. If an
        index exceeds a model's embedding table, the sample is named before the error is raised (on a CPU; a GPU ends
        the process).
        """
        self._watched.log.given_names = tuple(ids)
        self._watched.draw_from(generator)
        try:
            yield
        except IndexError:
            # PyTorch's error names neither the sample nor the table.
            offenders = contain_error(self._watched.find_out_of_range, "an index out of range")
            if offenders:
                self._recovery.say(
                    listed("guard: no table of the model has these indices", offenders)
                )
            raise
        finally:
            self._watched.log.given_names = ()
            self._watched.draw_from(None)

    def before_save(self, saved: Any = None) -> None:
        """Restore the last good state if trained weights are bad, and report values in `saved` that are not finite.

        `torch.save` and safetensors do this automatically while a guard lives; call it before saving in another way.
        Not collective: the rank that saves may call it without the others.
        """
        self._steps.saving(saved, "what is saved")

    def before_clipping(self) -> None:
        """Call this before clipping with a function other than `clip_grad_norm_`, so that the bad gradient is
        named.
        """
        self._steps.before_clipping()

    def add_schedule(self, schedule: Any) -> None:
        """Hold a learning rate schedule in skipped steps too, and restore it together with the weights."""
        self._state.schedules.append(schedule)
        self._gate(schedule)

    def trains_with(self, optimizer: Any) -> bool:
        """True if this guard watches the optimizer."""
        return any(watched.inner is optimizer for watched in self._steps.optimizers)

    def detach(self) -> None:
        """Stop guarding the loop, and report the number of steps that were not taken."""
        self._close()
        EVENTS.remove(self._steps)
        self._watched.stop()
        self._interceptions.undo()
        for optimizer in self._state.optimizers:
            # Without this reference the guard can be freed.
            vars(_inner(optimizer)).pop(_ANCHOR, None)

    def require_finite(self) -> None:
        """Check before saving that weights, optimizer state and averages are finite and unaltered. Collective.

        Restores the last good state if they are not.

        Raises:
            NonFiniteError: On every rank, if there is nothing good to restore, or if memory has altered a frozen
                weight or a
                buffer, which snapshots do not hold.
        """
        self._steps.require_finite()
        self._note()

    def check_state(self) -> None:
        """Check like `require_finite`, but only log what cannot be restored. Collective."""
        contain_error(
            lambda: self._steps.require_finite(may_raise=False),
            "looking at what is trained",
            passes=(NonFiniteError,),
        )
        self._note()

    def closing_line(self) -> str | None:
        """One line on the number of steps that were not taken; None if all were."""
        return self._recovery.budget.closing()

    def _watch(self, schedules: list[Any], ema: Averages | None) -> None:
        accelerator, interceptions, hooks = self._host.accelerator, self._interceptions, self._steps
        if accelerator is not None:
            interceptions.method(accelerator, "end_training", self._end)
            # A loaded checkpoint makes earlier snapshots invalid.
            interceptions.method(accelerator, "load_state", hooks.load)
            if self._host.under_deepspeed:
                interceptions.method(accelerator, "backward", hooks.deepspeed_backward)
        for watched in hooks.optimizers:
            interceptions.method(watched.optimizer, "step", watched.step)
            interceptions.method(watched.optimizer, "load_state_dict", watched.loaded)
            # A script may drop the guard object, so it has to live as long as the optimizer.
            setattr(watched.inner, _ANCHOR, _Anchor(self))
        self._watched.on_survey = self._survey
        self._survey()
        for owner in [*schedules, *_listed(ema)]:
            self._gate(owner)
        self._state.ema = ema
        self._state.schedules = [*(accelerator._schedulers if accelerator else []), *schedules]
        # Take a snapshot of the start, so that a failure in the first steps can be undone.
        if not self._host.under_deepspeed:  # its optimizer state is the engine's
            self._state.take(0)
        # Events of the process come only now, when everything that handles them exists.
        EVENTS.add(hooks)
        EVENTS.follow_accelerate()

    def _gate(self, owner: Any) -> None:
        """Make `owner.step` do nothing in a skipped step: neither the learning rate nor an average may move."""
        gated = _GatedMethod(owner, self._steps.is_gate_shut)
        self._gated.append(gated)
        self._interceptions.method(owner, "step", gated.step)

    def _survey(self) -> None:
        self._steps.survey()
        self._file.note(
            models=models_in_words(self._watched.models),
            optimizers=optimizers_in_words(self._state.optimizers),
            checks=sorted(self._checks),
            settings=asdict(self._config),
        )

    def _note(self, **facts: Any) -> None:
        """Write the number of steps taken and lost so far."""
        budget = self._recovery.budget
        disabled = sorted(self._watched.switched_off)
        self._file.note(taken=budget.taken, lost=budget.lost, switched_off=disabled, **facts)

    def _warn_of_narrow_weights(self) -> None:
        """Warn about fp16 weights, where AdamW's eps of 1e-8 is 0 and 0 / 0 is NaN, and about bf16 weights."""
        dtypes = {p.dtype for p in self._state.parameters.values()}
        if torch.float16 in dtypes:
            self._host.say(
                "guard: trained parameters are fp16, where AdamW turns a gradient of 0 into NaN; cast them to fp32"
            )
        if torch.bfloat16 in dtypes:
            self._host.say(
                "guard: trained parameters are bf16: small updates round to nothing; use fp32"
            )

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        contain_error(self._close, "closing the guard")
        return original(*args, **kwargs)

    def _close(self) -> None:
        """Log and write the number of steps that were not taken."""
        self._looks.end()
        self._note(ended=True)
        line = self.closing_line()
        # Log once: the end of training and `detach` may both call this.
        if line and not self._has_closed:
            self._has_closed = True
            self._host.say(f"guard: {line}")


def _inner(optimizer: Any) -> Any:
    """The optimizer without Accelerate's wrapper."""
    return optimizer.optimizer if is_a(optimizer, ACCELERATED) else optimizer


def _listed(value: Any) -> list[Any]:
    """The value as a list; None becomes an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
