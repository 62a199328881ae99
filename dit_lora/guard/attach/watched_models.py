"""The models of a loop that is not ours: the part of them that is trained, and the calls since the last step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dit_lora.guard.attach.accelerator_adapter import Host, bare_model
from dit_lora.guard.attach.call_recorder import CapturedCall, Recorder
from dit_lora.guard.attach.discover_models import Roots
from dit_lora.guard.attach.find_models import (
    Models,
    held_parameters,
    parts_of,
    trainable_parameters,
    trained_models,
)
from dit_lora.guard.attach.frozen_weights import LoopRecord
from dit_lora.guard.attach.gather_calls import RankCalls, shared_calls
from dit_lora.guard.attach.sample_ids import Names
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.state import weight_peak
from dit_lora.guard.suspects import Suspects
from dit_lora.guard.switches import all_switches
from dit_lora.numerics.dtensors import needs_all_ranks


class Watched:
    """Records the calls of every model that the optimizers train."""

    def __init__(
        self,
        host: Host,
        given: Sequence[nn.Module],
        state: LoopState,
        names: Names,
        *,
        compares_frozen: bool,
    ) -> None:
        self.calls: list[CapturedCall] = []
        """Calls of the step under way, in order."""
        self.suspects: dict[int, Suspects] = {}
        """Suspects of each model, by its id."""
        self.prefixes: dict[int, str] = {}
        """The prefix of its parameters' names, where there are several models."""
        self.together: Suspects
        """Suspects of all models as one, whose weights have the names that they have here."""
        self.record: LoopRecord | None
        """Frozen weights and buffers as they began; None if they are not to be compared."""
        self.lockstep = False
        """True if a model is sharded, which no rank can run alone: all diagnose together."""
        self.switched_off: set[str] = set()
        """Switches that verdicts have turned off."""
        self.names = names
        self.on_survey: Callable[[], None] = lambda: None
        """Called when other models are watched than before."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a call of a model begins."""
        self._host = host
        self._given = list(given)
        self._state = state
        self._compares_frozen = compares_frozen
        self._models: Models = {}
        self._parts: Models = {}
        self._found: list[nn.Module] = []
        self._recorders: list[Recorder] = []
        self._roots = Roots(
            self._recorder, self.calls, lambda: {id(one.model) for one in self._recorders}
        )
        self._held = (0, 0)
        self._trained: set[int] = set()
        """Ids of what has been trained. It stays so where the loop freezes it for a while, as a GAN's does."""
        self._last_trained: list[int] = []
        self.survey()
        self._roots.look()

    @property
    def models(self) -> Models:
        """The models by the prefix of their parameters' names."""
        return self._models

    def survey(self) -> None:
        """Find what the optimizers train, and what it is part of."""
        known = self._host.models(self._given)
        found = [one for one in self._found if not any(one is other for other in known)]
        inside = {id(module) for model in known for module in model.modules()}
        models = [*known, *(one for one in found if id(one) not in inside)]
        if self._host.under_deepspeed:  # its optimizer holds copies
            self._models = {"": models[0]}
            self._state.parameters = trainable_parameters(self._models)
        else:
            required = bare_model(self._given[0]) if self._given else None
            optimizers = self._state.optimizers
            self._held = self._fingerprint()
            self._models = trained_models(models, optimizers, through=found, required=required)
            self._state.parameters = held_parameters(self._models, optimizers, self._trained)
        self._parts = parts_of(self._models, found)
        self._pause()
        called = [*self._models.values(), *self._parts.values()]
        self._recorders = [self._recorder(model) for model in called]
        self._start()
        self.suspect()
        self.on_survey()

    def find_models(self) -> bool:
        """End the search for models once some were called; return True if there are any that were not known."""
        if not self._roots.is_looking or not self.calls:
            return False
        new = self._roots.found()
        self._found += new
        if new:
            self.survey()
        return bool(new)

    def _recorder(self, model: nn.Module) -> Recorder:
        return Recorder(
            model,
            self.names.ids,
            self.calls,
            sees=self.names.see,
            begins=self._call_begins,
            ends=self._call_ends,
        )

    def suspect(self) -> None:
        """Note weights, buffers and switches as those that training begins with."""
        models = self._models
        called = models | self._parts
        self.prefixes = {id(model): prefix for prefix, model in called.items()}
        # One module whose parameters have the names that they have here, for what is judged over all models.
        parts = {prefix.removesuffix("."): model for prefix, model in models.items()}
        alone = next(iter(models.values()), nn.Module())
        whole = nn.ModuleDict(parts) if len(models) > 1 else alone
        self.lockstep = needs_all_ranks(whole)
        self.record = LoopRecord(whole, self._trained) if self._compares_frozen else None
        self.together = self._suspects(whole, "", self.record)
        self.suspects = {
            id(model): self._suspects(model, prefix, None) for prefix, model in called.items()
        }

    def _suspects(self, model: nn.Module, prefix: str, record: LoopRecord | None) -> Suspects:
        def peaks() -> dict[str, float]:
            of_all = self._state.snapshots.peaks()
            return {**of_all, **{n.removeprefix(prefix): peak for n, peak in of_all.items()}}

        return Suspects(
            model=model,
            optimizer_state=lambda: self._state.optimizer_tensors().items(),
            switches=all_switches(model),
            start_peak=weight_peak(
                [p for p in model.parameters() if p.requires_grad], together=self.lockstep
            ),
            lockstep=self.lockstep,
            frozen=record,
            peaks=peaks,
            switched_off=self.switched_off,
            decay=self._state.largest_decay,
        )

    def shared(
        self, calls: Sequence[CapturedCall], controls: Mapping[int, CapturedCall]
    ) -> list[RankCalls]:
        """Return the calls that this rank is to diagnose: its own or, in lockstep, those of all ranks. Collective."""
        models = [recorder.model for recorder in self._recorders]
        shared = shared_calls(calls, controls, models, self._host.device) if self.lockstep else None
        return shared if shared is not None else [RankCalls(self._host.rank, calls, controls)]

    def has_changed(self) -> bool:
        """Return True if an optimizer was given more to train, or some of what it has was frozen or freed."""
        return self._fingerprint() != self._held

    def draw_from(self, generator: torch.Generator | None) -> None:
        """Note the state of the loop's own generator with each call, from now on."""
        for recorder in self._recorders:
            recorder.generator = generator

    def out_of_range(self) -> list[str]:
        return [words for recorder in self._recorders for words in recorder.out_of_range()]

    def owners(self) -> list[nn.Module]:
        """Return the modules that hold what is trained themselves."""
        wanted = {id(parameter) for parameter in self._state.parameters.values()}
        modules = (module for model in self._models.values() for module in model.modules())
        return [m for m in modules if any(id(p) in wanted for p in m.parameters(recurse=False))]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        self._pause()
        try:
            yield
        finally:
            self._start()

    def stop(self) -> None:
        """Look for models no more, and record no calls."""
        self._roots.stop()
        self._pause()

    def _pause(self) -> None:
        for recorder in self._recorders:
            recorder.stop()

    def forget_calls(self) -> None:
        self.calls.clear()
        self.names.next_step()

    def _call_begins(self) -> None:
        self.on_call()
        if self.record is not None and not self.record.is_settled:
            self.record.call_begins()

    def _call_ends(self) -> None:
        if self.record is not None and not self.record.is_settled:
            self.record.call_ends()

    def _start(self) -> None:
        for recorder in self._recorders:
            recorder.start()

    def _fingerprint(self) -> tuple[int, int]:
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        # A loop may free weights, or give its optimizer more of them, at any step.
        trained = [id(p) for group in groups for p in group["params"] if p.requires_grad]
        if trained != self._last_trained:
            self._last_trained = trained
            self._trained.update(trained)
        return sum(len(group["params"]) for group in groups), len(self._trained)
