"""The trained state of any training loop, as a snapshot to restore: weights, optimizer state, schedules, buffers."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from dit_lora.guard.attach.containment import try_call
from dit_lora.guard.attach.finite_values import to_strided_real
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.state_checks import compute_decay_share
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import is_finite
from dit_lora.numerics.layouts import get_strided_values
from dit_lora.numerics.optimizer_numbers import convert_to_tensor, read_group_numbers, restore_saved_scalars

_MAX_BUFFER_BYTES = 64 * 2**20


class MovingAverage(Protocol):
    """The interface of a moving average of weights that the guard needs, as Diffusers' EMAModel has it."""

    shadow_params: list[torch.Tensor]
    optimization_step: int


class LoopState:
    """Trained weights, optimizer state and learning rate schedules by name, with a snapshot of them.

    Holds one snapshot, or none if `interval_steps` is 0. With AdamW, a snapshot takes three times the memory of the
    trained weights.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Any], *, interval_steps: int
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self.interval_steps = interval_steps
        self.schedules: list[Any] = []
        self.ema: MovingAverage | None = None
        self._ema_steps: dict[int, int] = {}
        self.snapshots = Snapshots(
            self.collect_tensors,
            interval_steps=max(interval_steps, 1),
            max_snapshots=1,
            write_back=self._restore_optimizer_numbers,
        )
        self._schedule_states: dict[int, dict[str, Any]] = {}
        """States of the schedules at the snapshot's step, by the schedule's id."""
        self._buffers: dict[str, torch.Tensor] = {}
        """Copies of the models' buffers at the snapshot's step, by name."""
        self.get_models: Callable[[], Mapping[str, nn.Module]] = dict
        """The models by the prefix of their names."""
        self.infinite_names: set[str] = set()
        """Optimizer state keys and group settings that are infinite by design, such as bounds and best scores."""

    def collect_optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Collect optimizer state by name, `<parameter>/<name>` and `group <number>/<name>`.

        Numbers become new tensors.
        """
        return {
            f"{prefix}/{key}": convert_to_tensor(value)
            for prefix, state in self._iter_named_optimizer_states()
            for key, value in state.items()
            if isinstance(value, (torch.Tensor, int, float))
        }

    def collect_tensors(self) -> dict[str, torch.Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        shadow = self.ema.shadow_params if self.ema is not None else []
        averages = {f"ema/{number}": tensor for number, tensor in enumerate(shadow)}
        return {**weights, **self.collect_optimizer_tensors(), **averages}

    def record_infinite_state(self) -> None:
        """Record which optimizer state is infinite from the start. torch's optimizers have no such state."""
        for name, tensor in self.collect_optimizer_tensors().items():
            if name.startswith("group ") and bool(torch.isinf(tensor).any()):
                self.infinite_names.add(name)
        for optimizer in self.optimizers:
            # torch's own optimizers never hold infinity on purpose.
            if type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("torch."):
                continue
            for state in optimizer.state.values():
                numbers = [(key, value) for key, value in state.items() if isinstance(value, (torch.Tensor, float))]
                for key, value in numbers:
                    values = to_strided_real(convert_to_tensor(value))
                    # NaN is never intended.
                    if bool(values.isinf().any()) and not bool(values.isnan().any()):
                        self.infinite_names.add(key)

    def exclude_infinite_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy named tensors without those that were infinite from the start."""
        return {name: tensor for name, tensor in tensors.items() if not self._is_infinite(name)}

    def _is_infinite(self, name: str) -> bool:
        return name in self.infinite_names or name.rpartition("/")[2] in self.infinite_names

    def is_snapshot_due(self, step: int) -> bool:
        return bool(self.interval_steps) and self.snapshots.is_snapshot_due(step)

    def take_snapshot(self, step: int) -> None:
        """Take a snapshot of the trained state and schedules after `step`, if snapshots are enabled."""
        if not self.interval_steps:
            return
        self.snapshots.take_snapshot(step)
        schedule_states: dict[int, dict[str, Any]] = {}
        for schedule in self.schedules:
            state = dict(schedule.state_dict())
            # The state may hold lists that the schedule goes on writing to.
            copied = try_call(partial(copy.deepcopy, state))
            schedule_states[id(schedule)] = copied if copied is not None else state
        self._schedule_states = schedule_states
        self._copy_buffers()
        # EMAModel computes its decay from its step count, which must be restored together with the averages.
        self._ema_steps = {} if self.ema is None else {step: self.ema.optimization_step}

    def drop_snapshots(self) -> None:
        """Drop all snapshots, after the trained state was loaded from elsewhere."""
        for step in self.snapshots.steps:
            self.snapshots.drop_snapshot(step)

    def find_newest_snapshot(self, gather: Callable[[Sequence[str]], list[str]]) -> int | None:
        """Step of the newest snapshot that is finite on every rank, or None. Drops those that are not. Collective."""
        for step in self.snapshots.steps:
            # All ranks must drop a snapshot that is bad on one of them.
            bad = [n for n in self.snapshots.find_nonfinite(step) if not self._is_infinite(n)]
            if gather(bad):
                self.snapshots.drop_snapshot(step)
        return max(self.snapshots.steps, default=None)

    def restore_snapshot(self, step: int) -> None:
        """Restore the state of a snapshot bit for bit. Optimizer state created since then is dropped."""
        # A graph of the loop may have saved these tensors; keep the versions so that its backward still runs.
        live = tuple(self.collect_tensors().values())
        with torch.autograd._unsafe_preserve_version_counter(live):
            new_names = self.snapshots.restore_snapshot(step)
        self._drop_new_optimizer_state(new_names)
        for schedule in self.schedules:
            if id(schedule) in self._schedule_states:  # a schedule created since has no saved state
                schedule.load_state_dict(copy.copy(self._schedule_states[id(schedule)]))
        if self.ema is not None:
            self.ema.optimization_step = self._ema_steps[step]

    def scale_learning_rates(self, factor: float) -> None:
        """Multiply every learning rate, in the optimizers and in their schedules."""
        for group in self._list_param_groups():
            group["lr"] *= factor
        for schedule in self.schedules:
            # Accelerate's scheduler wraps torch's, which computes its rates from `base_lrs`.
            inner = schedule.scheduler if "scheduler" in vars(schedule) else schedule
            if "base_lrs" in vars(inner):
                inner.base_lrs = [rate * factor for rate in inner.base_lrs]

    @torch.no_grad()
    def restore_bad_buffers(self) -> list[str]:
        """Restore buffers that are not finite now and were finite at the snapshot; returns their names."""
        restored = []
        for name, buffer in self._iter_float_buffers():
            saved = self._buffers.get(name)
            if saved is None or saved.shape != buffer.shape or is_finite(buffer):
                continue
            with torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(saved)
            restored.append(name)
        return restored

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        remaining_bytes = _MAX_BUFFER_BYTES
        self._buffers = {}
        # Smallest first, so that as many buffers as possible fit into the limit.
        for name, buffer in sorted(self._iter_float_buffers(), key=lambda item: item[1].nbytes):
            remaining_bytes -= buffer.nbytes
            if remaining_bytes < 0:
                return
            if is_finite(buffer):
                self._buffers[name] = buffer.detach().clone()

    def _iter_float_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, model in self.get_models().items():
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and buffer.device.type != "meta":
                    yield prefix + name, get_strided_values(get_local_tensor(buffer.detach()))

    def compute_max_decay(self) -> float:
        """The largest fraction of a weight that one step's weight decay removes."""
        return compute_decay_share(self._list_param_groups())

    def _list_param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _iter_named_optimizer_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                # A parameter of no known model is named by its id.
                yield f"{names.get(parameter, id(parameter))}", state
        for number, group in enumerate(self._list_param_groups()):
            yield f"group {number}", read_group_numbers(group)

    def _restore_optimizer_numbers(self, restored: Mapping[str, torch.Tensor]) -> None:
        for number, group in enumerate(self._list_param_groups()):
            # Learning rates and similar numbers of a parameter group.
            restore_saved_scalars(group, f"group {number}", restored)
        for prefix, state in self._iter_named_optimizer_states():
            restore_saved_scalars(state, prefix, restored)

    def _drop_new_optimizer_state(self, new_names: Sequence[str]) -> None:
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in self.optimizers:
            for parameter, state in list(optimizer.state.items()):
                owner = names.get(parameter, id(parameter))
                if not any(f"{owner}/{key}" in new_names for key in state):
                    continue
                # A checkpoint being assembled may contain the dropped state, so replace NaN and Inf by zeros. Finite
                # tensors stay unchanged, since parameters may share them, such as a quantization code table.
                for value in state.values():
                    if isinstance(value, torch.Tensor) and not is_finite(value):
                        value.nan_to_num_(0.0, 0.0, 0.0)
                # Without state, the optimizer starts from scratch with a parameter, as it did at the snapshot.
                del optimizer.state[parameter]
