"""The models that a loop's optimizers train, and their calls that the current gradients come from."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext, unwrap_model
from dit_lora.guard.attach.calls.call_recorder import ModelCallRecorder
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.calls.discover_models import ModelDiscovery
from dit_lora.guard.attach.calls.gather_calls import RankCalls, gather_rank_calls
from dit_lora.guard.attach.containment import try_call
from dit_lora.guard.attach.find_models import Models, find_called_parts, find_optimizer_parameters, find_trained_models
from dit_lora.guard.attach.finite_values import find_infinite_tensor_names
from dit_lora.guard.attach.frozen_weights import LoopFrozenWeightDigests
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.training_state import LoopState
from dit_lora.guard.diagnose import InconsistentReplayError
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.fallbacks import list_fallbacks
from dit_lora.guard.state_checks import compute_weight_peak
from dit_lora.numerics.dtensors import has_collective_forward

T = TypeVar("T")
_MAX_SEARCHES = 20
"""Number of steps in which models are searched for. Weights of no called model are then treated as loose."""


class WatchedModels:
    """Records the calls of every model that the optimizers train.

    Args:
        host: The loop's device and ranks.
        named_models: Models that the user named; may be empty.
        state: Weights and optimizer state; its parameters are set here.
        discovery: Searches for the models that a loss passes through; it may have found some already.
        compares_frozen: Whether frozen weights and buffers are compared with the start.
    """

    def __init__(
        self,
        host: LoopProcessContext,
        named_models: Sequence[nn.Module],
        state: LoopState,
        discovery: ModelDiscovery,
        *,
        compares_frozen: bool,
    ) -> None:
        self.log = discovery.log
        """Recent calls of the models."""
        self.models: Models = {}
        """The models by the prefix of their parameters' names."""
        self.contexts: dict[int, DiagnosisContext] = {}
        """Diagnosis context of each model, by the model's id."""
        self.prefixes: dict[int, str] = {}
        """Prefix of each model's parameter names, by the model's id; empty for a single model."""
        self.joint_context: DiagnosisContext
        """Diagnosis context of all models as one module, with the prefixed parameter names."""
        self.frozen_record: LoopFrozenWeightDigests | None
        """Frozen weights and buffers at the start; None if they are not compared."""
        self.collective_forward = False
        """True if a model is sharded, so that ranks can only run it together and diagnose together."""
        self.infinities: dict[int, list[str]] = {}
        """Names of the weights and buffers of each model, by its id, that held infinity when it was first watched."""
        self.disabled_names: set[str] = set()
        """Names of components that diagnoses have disabled."""
        self.on_refresh: Callable[[], None] = lambda: None
        """Called when the set of watched models has changed."""
        self._host = host
        self._named_models = list(named_models)
        self._state = state
        self._compares_frozen = compares_frozen
        self._parts: Models = {}
        self._discovered: list[nn.Module] = []
        self._recorders: dict[int, ModelCallRecorder] = {}
        self._interceptions = MethodInterceptions()
        self._discovery = discovery
        discovery.get_recorders = lambda: self._recorders
        self._num_searches = 0
        self._last_fingerprint = (0, 0)
        self._trained_ids: set[int] = set()
        """Ids of parameters that have been trained, including those that the loop freezes for a while, as in a GAN."""
        self.log.on_end = self._after_call
        self.refresh_trained_models()
        self._discovery.start_recording_calls()

    def all_models(self) -> list[nn.Module]:
        return [*self.models.values(), *self._parts.values()]

    def refresh_trained_models(self) -> None:
        """Update the list of parameters that the optimizers train, and of the models that they belong to."""
        named = self._host.unwrap_models(self._named_models)
        discovered = [model for model in self._discovered if not any(model is candidate for candidate in named)]
        # A discovered module inside a named model is a part of that model.
        inner_ids = {id(module) for model in named for module in model.modules()}
        models = [*named, *(model for model in discovered if id(model) not in inner_ids)]
        if self._host.uses_deepspeed:
            # A DeepSpeed engine trains a single model, and its optimizer holds copies of the parameters.
            self.models = {"": models[0]}
            self._state.parameters = {name: p for name, p in models[0].named_parameters() if p.requires_grad}
        else:
            required = unwrap_model(self._named_models[0]) if self._named_models else None
            optimizers = self._state.optimizers
            self._last_fingerprint = self._compute_fingerprint()
            self.models = find_trained_models(models, optimizers, called_models=self._discovered, required=required)
            self._state.parameters = find_optimizer_parameters(self.models, optimizers, self._trained_ids)
        self._parts = find_called_parts(self.models, discovered)
        self._interceptions.restore_originals()
        # Keep existing recorders, with their open calls and the gradients that they have seen.
        self._recorders = {
            id(model): self._recorders.get(id(model)) or ModelCallRecorder(model, self.log)
            for model in self.all_models()
        }
        for recorder in self._recorders.values():
            self._interceptions.intercept_method(recorder.model, "__call__", recorder.run_and_record_call)
        self.infinities = {
            id(model): self.infinities[id(model)]
            if id(model) in self.infinities
            else find_infinite_tensor_names(model)
            for model in self.all_models()
        }
        self.rebuild_contexts()
        self.on_refresh()

    def find_newly_trained_models(self) -> bool:
        """End the search for trained models once a step shows them. True if new models were found.

        The search continues while an optimizer holds weights of no called model.
        """
        if not self._discovery.is_searching or not self.log.calls:
            return False
        new = self._discovery.end_search_for_trained_models()
        self._discovered += new
        if new:
            self.refresh_trained_models()
        self._num_searches += 1
        # A model whose weights an optimizer holds may be called only in a later step.
        has_loose = "optimizer." in self.models or any(type(model) is nn.Module for model in self.models.values())
        if has_loose and self._num_searches < _MAX_SEARCHES:
            self._discovery.start_recording_calls()
        return bool(new)

    def rebuild_contexts(self) -> None:
        """Rebuild the diagnosis contexts: current weights and buffers count as those that training starts with."""
        models = self.models
        called = models | self._parts
        self.prefixes = {id(model): prefix for prefix, model in called.items()}
        # Join all models in one module with the prefixed parameter names, for checks over all models.
        # A ModuleDict key may not contain a dot.
        parts = {prefix.removesuffix("."): model for prefix, model in models.items()}
        single = next(iter(models.values()), nn.Module())
        joined_model = nn.ModuleDict(parts) if len(models) > 1 else single
        self.collective_forward = has_collective_forward(joined_model)
        self.frozen_record = (
            LoopFrozenWeightDigests(joined_model, self._trained_ids) if self._compares_frozen else None
        )
        infinite = [prefix + name for prefix, model in models.items() for name in self.infinities[id(model)]]
        self.joint_context = self._make_context(joined_model, "", self.frozen_record, infinite)
        self.contexts = {
            id(model): self._make_context(model, prefix, None, self.infinities[id(model)])
            for prefix, model in called.items()
        }

    def gather_calls_to_diagnose(
        self, calls: Sequence[CapturedCall], controls: Mapping[int, CapturedCall]
    ) -> list[RankCalls]:
        """Recorded model calls that this rank must diagnose. Collective.

        These are its own or, for a sharded model, those of all ranks. For a sharded model the list is empty if the
        arguments of a call cannot be sent to other ranks: no rank may run the model without the others.
        """
        if not self.collective_forward:
            return [RankCalls(self._host.rank, calls, controls)]
        # The same order on all ranks, since calls are sent with the position of their model.
        models = [recorder.model for recorder in self._recorders.values()]
        return gather_rank_calls(calls, controls, models, self._host.device) or []

    def has_new_trained_parameters(self) -> bool:
        """True if an optimizer received more parameters, or one of its parameters was unfrozen."""
        return self._compute_fingerprint() != self._last_fingerprint

    def count_parameters(self) -> int:
        """Number of parameters in all optimizers of the loop."""
        count = 0
        for optimizer in self._state.optimizers:
            for group in optimizer.param_groups:
                count += len(group["params"])
        return count

    def find_out_of_range_ids(self) -> list[str]:
        return [line for recorder in self._recorders.values() for line in recorder.find_out_of_range_ids()]

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Record no calls inside the context, since replays are not the loop's."""
        for recorder in self._recorders.values():
            recorder.is_paused = True
        try:
            yield
        finally:
            for recorder in self._recorders.values():
                recorder.is_paused = False

    def stop_recording_calls(self) -> None:
        self._discovery.stop_recording_calls()
        self._interceptions.restore_originals()

    def _make_context(
        self, model: nn.Module, prefix: str, record: LoopFrozenWeightDigests | None, infinite_names: Collection[str]
    ) -> "LoopDiagnosisContext":
        trained = [p for p in model.parameters() if p.requires_grad]
        return LoopDiagnosisContext(
            model=model,
            fallbacks=list_fallbacks(model),
            start_peak=compute_weight_peak(trained, all_ranks=self.collective_forward),
            collective_forward=self.collective_forward,
            frozen_record=record,
            infinite_names=infinite_names,
            disabled_names=self.disabled_names,
            state=self._state,
            prefix=prefix,
        )

    def before_call(self) -> None:
        """Record frozen weights and buffers before a model call, until it is known what healthy calls change."""
        if self.frozen_record is not None and not self.frozen_record.is_calibrated:
            self.frozen_record.before_call()

    def _after_call(self) -> None:
        if self.frozen_record is not None and not self.frozen_record.is_calibrated:
            self.frozen_record.after_call()

    def _compute_fingerprint(self) -> tuple[int, int]:
        param_lists = [group["params"] for optimizer in self._state.optimizers for group in optimizer.param_groups]
        # A loop may freeze weights for a while, as in a GAN; parameters that were trained once stay watched.
        self._trained_ids.update(id(p) for parameters in param_lists for p in parameters if p.requires_grad)
        # The second number grows when the loop unfreezes a parameter.
        return sum(map(len, param_lists)), len(self._trained_ids)


@dataclass(frozen=True, kw_only=True)
class LoopDiagnosisContext(DiagnosisContext):
    """Context for diagnosing a watched model, or all of them together, with the state of their training loop."""

    state: LoopState
    prefix: str
    """The model's name with a dot, as in the names of optimizer state; empty for a single model."""

    def collect_optimizer_state(self) -> Mapping[str, torch.Tensor]:
        return self.state.exclude_infinite_state(self.state.collect_optimizer_tensors())

    def compute_snapshot_peaks(self) -> Mapping[str, float]:
        peaks = self.state.snapshots.compute_largest_magnitudes()
        # Optimizer state keeps the prefix in its names; this model's weights are known without it.
        return {**peaks, **{name.removeprefix(self.prefix): peak for name, peak in peaks.items()}}

    def compute_decay_share(self) -> float:
        return self.state.compute_max_decay()

    def run_experiment(self, experiment: Callable[[], T]) -> T | None:
        # Ranks that run a model together must all continue, or all fail.
        if self.collective_forward:
            return experiment()
        return try_call(experiment, reraised=(InconsistentReplayError, torch.OutOfMemoryError))
