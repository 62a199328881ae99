"""The guard as a plugin: two lines make a loop safe that somebody else wrote.

    guard = dit_lora.Guard.attach(accelerator, model, optimizer)     # after accelerator.prepare
    guard = dit_lora.Guard.watch(model, optimizer)                   # in plain PyTorch

The loop stays as it is. Its `accelerator.backward`, `accelerator.clip_grad_norm_` and `optimizer.step` are watched;
a step whose loss or gradient is not finite on any rank is not taken, and `lr_scheduler.step` after it does nothing.
Only then the micro-batch is replayed, and the cause named.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dit_lora.config.ladder import LadderConfig, LoopConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.finite_checks import CHECKS, checked
from dit_lora.guard.attach.guard_json import GuardFile, models_in_words, optimizers_in_words
from dit_lora.guard.attach.monitoring import Looks
from dit_lora.guard.attach.recovery import PluginRecovery
from dit_lora.guard.attach.sample_ids import Names
from dit_lora.guard.attach.step_hooks import Steps
from dit_lora.guard.attach.training_state import Averages, LoopState
from dit_lora.guard.attach.watched_models import Watched
from dit_lora.guard.suspects import Suspects
from dit_lora.patching import Patches

if TYPE_CHECKING:  # the guard needs torch alone
    from accelerate import Accelerator

_LOG = logging.getLogger("dit_lora")


class Guard:
    """Watches the models and optimizers of a loop. Make it with `attach`."""

    def __init__(
        self,
        host: Host,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        config: LoopConfig,
        folder: Path | None,
        checks: frozenset[str],
        names: Names | None = None,
    ) -> None:
        self._host = host
        self._patches = Patches()
        self._names = names or Names()
        self._state = LoopState({}, optimizers, every=config.snapshot_every)
        self._watched = Watched(
            host, models, self._state, self._names, compares_frozen="frozen" in checks
        )
        self._file = GuardFile(host, folder)
        self._recovery = PluginRecovery(
            host,
            self._state,
            config,
            folder,
            self._watched,
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
        self._steps = Steps(host, self._watched, self._recovery, checks, self._looks)
        self._load_hooks: set[int] = set()
        self._said = False

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
        """Guard a loop whose model and optimizer `accelerator.prepare` has returned; `watch` is for plain PyTorch.

        Everything that the optimizer holds is guarded, and every model that a loss of the first step comes through.
        Several models, optimizers or schedulers are a list.

        A learning rate scheduler that Accelerate prepared needs nothing; give another one, and an EMA with a
        `step` method, so that a tripped step does not advance them either. `folder` gets guard.json, events.jsonl,
        bundles and, at a stop, the last good weights; with `config` a `LoopConfig`, statistics too. `checks` are those to make, of `CHECKS`. `loader` is one that Accelerate has
        not prepared: verdicts then name samples by their index in its dataset. In a loop that is not ours a
        skipped step is gone: its other samples wait for the next epoch, and `quarantine` cannot take a sample
        out of the loop's dataset: it skips, and names it.
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
            loader=loader,
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
        """Guard a loop in plain PyTorch: its `optimizer.step`, with a closure or a gradient scaler too.

        Over a process group, as in DDP, all ranks agree. `model` may be None: then the models are those that a loss of
        the first step comes through.
        `scaler` is the loop's `torch.amp.GradScaler`: it keeps its own check, but a step that it leaves out for an
        output which is not finite is diagnosed, and a scale below 1 stops the loop. Everything else is as in `attach`.
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
            loader=loader,
            scaler=scaler,
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
        loader: Any = None,
        scaler: Any = None,
        names: Names | None = None,
    ) -> "Guard":
        """Guard a loop with an accelerator or without, and models that are named or not; `names` knows its loaders."""
        wrong = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong:
            raise DitLoraError(f"Guard: model is a torch.nn.Module; got {', '.join(wrong)}")
        held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        if not held:
            raise DitLoraError("Guard: there is no optimizer that holds a parameter; got none")
        host = Host(accelerator, held[0].device)
        guard = cls(
            host,
            models,
            [host.prepared(each) for each in optimizers],
            config=LoopConfig.of(config or LoopConfig()),
            folder=Path(folder) if folder is not None else None,
            checks=checked(checks),
            names=names,
        )
        guard._require_wide_weights()
        guard._watch(_listed(lr_scheduler), ema, _listed(loader))
        for each in _listed(scaler):
            guard._patches.method(each, "step", partial(guard._steps.scaled_step, each))
        return guard

    @property
    def step(self) -> int:
        """The optimizer step under way, counted from 1."""
        return self._steps.number

    @property
    def events(self) -> list[dict[str, Any]]:
        """The records of events.jsonl, one dict a line."""
        return self._recovery.events

    @property
    def suspects(self) -> Suspects:
        """The part of the first model that a diagnosis may look at and switch off."""
        return next(iter(self._watched.suspects.values()))

    @contextmanager
    def microbatch(
        self, ids: Sequence[str], generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Name the samples of the forward passes within, in the order of their rows.

        A replay puts `generator` back where it is now; torch's own are put back anyway. An index that no
        embedding table of the model has raises `DitLoraError` with the sample's name (on a CPU; a GPU ends
        the process).
        """
        self._names.given = tuple(ids)
        self._watched.draw_from(generator)
        try:
            yield
        except IndexError as error:
            offenders = self._watched.out_of_range()
            if not offenders:
                raise
            raise DitLoraError(
                listed("no table of the model has these indices", offenders)
            ) from error
        finally:
            self._names.given = ()
            self._watched.draw_from(None)

    def before_save(self, saved: Any = None) -> None:
        """Put the last good state back if the last step has spoiled the weights; cheaper than `require_finite`.

        Not collective: of several ranks, the one that saves may call it alone. `saved` is what it is about to write: where
        weights are sharded, copies were gathered before, and NaN among them raises `NonFiniteError`.
        """
        self._steps.before_save(saved)

    def before_clipping(self) -> None:
        """Call it before a loop in plain PyTorch clips gradients, which spreads one NaN to all: it is named then."""
        self._steps.before_clipping()

    def detach(self) -> None:
        """Give the loop its own methods back, and say how many steps were not taken."""
        self._close()
        self._watched.stop()
        self._patches.undo()

    def require_finite(self) -> None:
        """Call it before saving: what is trained, moments and averages must be finite, unaltered and of use on every rank.

        Puts the last good state back where it is not. Raises `NonFiniteError` on every rank where none is held, or
        where memory has altered a frozen weight or a buffer, of which no copy is held.
        """
        self._steps.require_finite()
        self._note()

    def _watch(self, schedules: list[Any], ema: Averages | None, loaders: list[Any]) -> None:
        accelerator, patches, steps = self._host.accelerator, self._patches, self._steps
        if accelerator is not None:
            patches.method(accelerator, "backward", steps.backward)
            patches.method(accelerator, "end_training", self._end)
            patches.method(accelerator, "clip_grad_norm_", steps.clip)
            patches.method(accelerator, "clip_grad_value_", steps.clip)
            patches.method(accelerator, "load_state", steps.load)
            patches.method(accelerator, "skip_first_batches", self._skip_batches)
        for optimizer in self._state.optimizers:
            patches.method(optimizer, "step", partial(steps.step, optimizer))
            patches.method(optimizer, "load_state_dict", steps.load)
            # In plain PyTorch nothing else says that a backward has been used up.
            if accelerator is None:
                patches.method(optimizer, "zero_grad", steps.zero_grad)
        self._watched.on_survey = self._survey
        self._survey()
        for owner in [*schedules, *_listed(ema)]:
            # A step that is not taken must not move the learning rate or the average.
            patches.gated_step(owner, partial(steps.shuts, owner))
        prepared = accelerator._dataloaders if accelerator is not None else []
        for data_loader in [*prepared, *loaders]:
            self._names.watch(data_loader, patches)
        self._state.ema = ema
        self._state.schedules = [*(accelerator._schedulers if accelerator else []), *schedules]
        # The start is held, so that a fault in the first steps has something to go back to.
        if not self._host.under_deepspeed:  # its optimizer state is the engine's
            self._state.take(0)

    def _survey(self) -> None:
        self._watch_loads()
        self._file.note(
            models=models_in_words(self._watched.models),
            optimizers=optimizers_in_words(self._state.optimizers),
            checks=sorted(self._checks),
            settings=asdict(self._config),
        )

    def _note(self, **facts: Any) -> None:
        """Write how many steps were taken and lost so far."""
        budget = self._recovery.budget
        off = sorted(self._watched.switched_off)
        self._file.note(taken=budget.taken, lost=budget.lost, switched_off=off, **facts)

    def _watch_loads(self) -> None:
        # Weights may be loaded past Accelerate: what is held from before is then of no use.
        for module in self._watched.owners():
            if id(module) not in self._load_hooks:
                self._load_hooks.add(id(module))
                hook = module.register_load_state_dict_post_hook(self._steps.loaded)
                self._patches.handle(hook)

    def _require_wide_weights(self) -> None:
        """Refuse fp16 weights, which cannot be trained: AdamW's eps of 1e-8 is 0 there, and 0 / 0 is NaN."""
        dtypes = {name: p.dtype for name, p in self._state.parameters.items()}
        if torch.float16 in dtypes.values():
            names = [name for name, dtype in dtypes.items() if dtype is torch.float16]
            raise DitLoraError(
                listed(
                    f"{len(names)} trained parameters are fp16, where AdamW turns a gradient of 0 into NaN; cast "
                    "them to fp32 before accelerator.prepare",
                    names[:10],
                )
            )
        if torch.bfloat16 in dtypes.values():
            _LOG.warning(
                "guard: trained parameters are bf16: small updates round to nothing; use fp32"
            )

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._close()
        return original(*args, **kwargs)

    def _close(self) -> None:
        """Say and write how many steps were not taken."""
        self._looks.end()
        self._note(ended=True)
        summary = self._recovery.budget.closing()
        # Once: the end of training and `detach` may both come.
        if summary and not self._said and self._host.rank == 0:
            self._said = True
            _LOG.warning("guard: %s", summary)

    def _skip_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        self._names.watch(loader, self._patches)
        return loader


def _listed(value: Any) -> list[Any]:
    """Return one or several as a list; None is none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
