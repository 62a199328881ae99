"""What a loop that is not ours trains: its weights, its optimizer's state, its schedules; to go back to."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from diffusers.training_utils import EMAModel
from torch import nn

from dit_lora.numerics.numbers import as_tensor, group_numbers, put_back
from dit_lora.numerics.snapshot import Snapshots


class LoopState:
    """Trained weights, optimizer state and learning rate schedules by name, with snapshots of them."""

    def __init__(self, model: nn.Module, optimizer: Any, *, every: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedules: list[Any] = []
        self.ema: EMAModel | None = None
        self._ema_steps: dict[int, int] = {}
        self.snapshots = Snapshots(self.tensors, every=every, put=self._put)
        self._schedule_states: dict[int, list[dict[str, Any]]] = {}

    def trainables(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """As `<parameter>/<name>`; numbers are copies, of groups `group <number>/<name>`."""
        return {
            f"{prefix}/{key}": as_tensor(value)
            for prefix, state in self._optimizer_state()
            for key, value in state.items()
            if isinstance(value, (torch.Tensor, int, float))
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.trainables().items()}
        shadow = self.ema.shadow_params if self.ema is not None else []
        averages = {f"ema/{number}": tensor for number, tensor in enumerate(shadow)}
        return {**weights, **self.optimizer_tensors(), **averages}

    def take(self, step: int) -> None:
        """Hold the state of now as that of `step`."""
        self.snapshots.take(step)
        held = {s: v for s, v in self._schedule_states.items() if s in self.snapshots.steps}
        held[step] = [dict(schedule.state_dict()) for schedule in self.schedules]
        self._schedule_states = held
        if self.ema is not None:
            self._ema_steps[step] = self.ema.optimization_step

    def forget_bad(self) -> list[int]:
        """Drop snapshots that are not finite on any rank; the steps that are left. Collective."""
        for held in self.snapshots.steps:
            if gather_object(self.snapshots.not_finite(held)):
                self.snapshots.forget(held)
        return self.snapshots.steps

    def restore(self, step: int) -> None:
        """The state of a held step, bit for bit; optimizer state that is younger is dropped."""
        self._drop(self.snapshots.restore(step))
        for schedule, state in zip(self.schedules, self._schedule_states[step], strict=True):
            schedule.load_state_dict(state)
        if self.ema is not None:
            self.ema.optimization_step = self._ema_steps[step]

    def lower_rates(self, factor: float) -> None:
        """Multiply every learning rate, now and in the schedules."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        for schedule in self.schedules:
            inner = schedule.scheduler if "scheduler" in vars(schedule) else schedule
            inner.base_lrs = [rate * factor for rate in inner.base_lrs]

    def _optimizer_state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        names = {parameter: name for name, parameter in self.trainables().items()}
        for parameter, state in self.optimizer.state.items():
            yield f"{names.get(parameter, id(parameter))}", state
        for number, group in enumerate(self.optimizer.param_groups):
            yield f"group {number}", group_numbers(group)

    def _put(self, restored: Mapping[str, torch.Tensor]) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            put_back(group, f"group {number}", restored)
        for prefix, state in self._optimizer_state():
            put_back(state, prefix, restored)

    def _drop(self, born_since: Sequence[str]) -> None:
        names = {parameter: name for name, parameter in self.trainables().items()}
        for parameter in list(self.optimizer.state):
            owner = names.get(parameter, id(parameter))
            state = self.optimizer.state[parameter]
            if any(f"{owner}/{key}" in born_since for key in state):
                del self.optimizer.state[parameter]
