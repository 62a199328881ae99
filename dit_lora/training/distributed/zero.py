"""DeepSpeed's ZeRO-2: each rank holds all weights, and its part of the gradients and the optimizer state.

DeepSpeed partitions and gathers. The step is this package's, as with DDP: its clipping, gate and autocast.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed, nn

from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.guard.gradient_check.ranks import gather_or_raise
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.training.distributed.engine import Engine, Tensors
from dit_lora.training.optim.build import compute_gradient_norms
from dit_lora.training.optim.state import iterate_optimizer_parameters

_MAX_BUCKET_ELEMENTS = 50_000_000
"""Elements of the largest bucket in which gradients wait to be averaged; DeepSpeed's default needs 2 GB."""


def import_deepspeed(device: str) -> Any:
    """Import `deepspeed` without its log output and without compiling extensions."""
    # Otherwise DeepSpeed searches for an accelerator, and logs that.
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed's own calls cause this warning.
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor", FutureWarning)
    # On a CPU it would spend a minute compiling a shared-memory collective; gloo suffices.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@dataclass(frozen=True)
class _LocalGroupShard:
    """This rank's part of one flattened parameter group in ZeRO."""

    tensor: torch.Tensor
    """The flat weights, with their gradient. All ranks' parts in order are the group's parameters, then padding."""
    start: int
    """Index of this part's first element in the flat group."""
    parameters: Mapping[str, nn.Parameter]
    """The group's parameters by `<group>/<parameter>`, in the order in which they are flattened."""

    def slices_in_group(self) -> dict[str, slice]:
        """Slice that each parameter takes in the flattened group, by name."""
        slices, end = {}, 0
        for name, parameter in self.parameters.items():
            slices[name] = slice(end, end + parameter.numel())
            end += parameter.numel()
        return slices

    def slices_in_local_shard(self) -> dict[str, slice]:
        """Slice that each parameter takes in this rank's part of the group, by name.

        Parameters outside of it are omitted.
        """
        end = self.start + self.tensor.numel()
        return {
            name: slice(max(location.start, self.start) - self.start, min(location.stop, end) - self.start)
            for name, location in self.slices_in_group().items()
            if location.start < end and location.stop > self.start
        }


class Zero2(Engine):
    """Engine that partitions gradients and moments with DeepSpeed's ZeRO, and uses nothing else of it.

    A group's parameters form one flat tensor. This rank's optimizer holds a part: fp32 weights, their gradient and the
    moments. The optimizer is elementwise, so the parts together take the same step as whole tensors would.
    """

    model: Any
    """DeepSpeed's engine."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        deepspeed = import_deepspeed(accelerator.device.type)
        self.accelerator = accelerator
        self._num_micro_steps = 0
        parameters = [iterate_optimizer_parameters([group]) for group in optimizer.param_groups]
        trained = sum(parameter.numel() for group_parameters in parameters for parameter in group_parameters.values())
        # DeepSpeed allocates the bucket whole: a LoRA needs no 200 MB of it.
        self._bucket_elements = min(_MAX_BUCKET_ELEMENTS, trained)
        # DeepSpeed replaces the groups' parameters with its parts; the caller's groups must not change.
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        # Adds autocast and moves it to its device; in evaluation mode Accelerate wraps it in nothing else.
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        self.model, self._zero_optimizer, _, _ = deepspeed.initialize(
            model=prepared, optimizer=optimizer, config=self._build_config()
        )
        self.optimizer = self._zero_optimizer.optimizer
        flat = (group["params"][0] for group in self.optimizer.param_groups)
        self._parts = [
            _LocalGroupShard(part, part.numel() * accelerator.process_index, group_parameters)
            for part, group_parameters in zip(flat, parameters, strict=True)
        ]
        self._remove_gradient_hooks()

    def _build_config(self) -> dict[str, Any]:
        """DeepSpeed's config, with its precision handling, clipping, norms and overflow check disabled."""
        return {
            "train_micro_batch_size_per_gpu": 1,  # has no effect here
            "gradient_accumulation_steps": self.accelerator.gradient_accumulation_steps,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 2,
                # Off: the loop clips each group, and the gate decides about the step.
                "compute_grad_norm": False,
                "overlap_comm": False,
                "reduce_bucket_size": self._bucket_elements,
            },
            "timers": {"throughput": {"enabled": False}},
        }

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.model.module

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the fp32 gradient bucket that this rank holds during a pass; weights are never gathered."""
        return 4 * self._bucket_elements

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        self._num_micro_steps += 1
        # DeepSpeed must be told which micro-step is a step's last.
        is_last = self._num_micro_steps % self.accelerator.gradient_accumulation_steps == 0
        self.model.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Average and partition the gradients in every micro-step: no rank keeps all of them."""
        # ZeRO's constructor hooks the parameters permanently; here the hooks exist during one backward.
        self._zero_optimizer.create_gradient_handling_hooks()
        try:
            # The engine's and not Accelerate's, which would also step before the gradients are checked.
            self.model.backward(loss)
        finally:
            self._remove_gradient_hooks()

    def _remove_gradient_hooks(self) -> None:
        """Remove DeepSpeed's hooks from the parameters, so that a replay's backward stays on this rank."""
        for hook in self._zero_optimizer._grad_acc_hooks:
            hook.remove()
        self._zero_optimizer._grad_acc_hooks.clear()

    @contextmanager
    def keep_unsharded_gradients(self) -> Iterator[None]:
        # This rank's part and memory for the whole gradient of each group, flat: (part,) and (ranks * part,).
        flat_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

        def allocate_full_gradient() -> None:
            for index, part in enumerate(self._parts):
                local = self._flatten_gradient(index, part)
                flat_gradients.append((local, local.new_empty(local.numel() * self.accelerator.num_processes)))

        # A rank without enough memory must not leave the others waiting in an exchange.
        gather_or_raise("memory for whole gradients", allocate_full_gradient)
        try:
            for part, (local, gathered) in zip(self._parts, flat_gradients, strict=True):
                # Collective, in the same order of groups on every rank.
                distributed.all_gather_into_tensor(gathered, local)
                for name, location in part.slices_in_group().items():
                    parameter = part.parameters[name]
                    parameter.grad = gathered[location].view(parameter.shape)
            # From here on only the parameters hold the gradients.
            flat_gradients.clear()
            yield
        finally:
            # Outside of a backward pass, ZeRO has only the parts.
            for part in self._parts:
                for parameter in part.parameters.values():
                    parameter.grad = None

    def _flatten_gradient(self, index: int, part: _LocalGroupShard) -> torch.Tensor:
        """This rank's part of a group's averaged gradient, with padding."""
        averaged = self._zero_optimizer.averaged_gradients[index]
        flat: torch.Tensor = self._zero_optimizer.flatten_dense_tensors_aligned(averaged, part.tensor.numel())
        return flat

    def compute_gradient_norms(self, compute_norms: NormFunction | None) -> dict[str, torch.Tensor]:
        """Gradient norm of each parameter group over all ranks' parts.

        Squares are added in fp64, where none overflows.
        """
        averaged = self._zero_optimizer.averaged_gradients
        for index, part in enumerate(self._parts):
            # Where the optimizer and clipping expect it; DeepSpeed's step takes a view of it.
            part.tensor.grad = self._flatten_gradient(index, part)
            averaged[index] = [part.tensor.grad]
        local_norms = compute_gradient_norms(self.optimizer.param_groups, compute_norms)
        # The norms are fp64: their squares stay finite where fp32 would overflow.
        squares = torch.stack([*local_norms.values()]).square()
        # Each rank has a part of every group: sum the squares over ranks.
        total_norms = self.accelerator.reduce(squares, reduction="sum").sqrt()
        return dict(zip(local_norms, total_norms.unbind(), strict=True))

    def step(self, should_skip: torch.Tensor) -> None:
        """Run the optimizer step unless `should_skip` is true, then gather the new weights.

        Fused AdamW reads the flag on the device.
        """
        # DeepSpeed calls the optimizer itself, so the flag must be set before.
        self.optimizer.found_inf = should_skip
        try:
            self._zero_optimizer.step()
        finally:
            del self.optimizer.found_inf
        self._zero_optimizer.zero_grad(set_to_none=True)
        self._num_micro_steps = 0

    def discard_gradients(self) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        super().discard_gradients()
        self._zero_optimizer.zero_grad(set_to_none=True)
        for index in self._zero_optimizer.averaged_gradients:
            self._zero_optimizer.averaged_gradients[index] = self._zero_optimizer.all_grad_tensors[index] = None
        # With it the first micro-step starts new sums; later ones add to them.
        self._zero_optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        self._num_micro_steps = 0

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's trained weights and optimizer state.

        `<group>/<parameter>/part` is the optimizer's fp32 copy of its part of a weight.
        """
        parts = {
            f"{name}/part": part.tensor.detach()[location]
            for part in self._parts
            for name, location in part.slices_in_local_shard().items()
        }
        return get_trainable_parameters(self.unwrapped_model) | parts | self.local_optimizer_state()

    def local_optimizer_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{kind}": flat[location] if flat.ndim else flat
            for part in self._parts
            for name, location in part.slices_in_local_shard().items()
            for kind, flat in self.optimizer.state.get(part.tensor, {}).items()
        }

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """State that every rank has: only the trained weights. Everything else is this rank's part."""
        return get_trainable_parameters(self.unwrapped_model)

    def load_scalar_state(self, state: Tensors) -> None:
        """Do nothing: with ZeRO the optimizer is AdamW, which has no Python numbers to write back."""

    def drop_optimizer_state(self, names: Sequence[str]) -> None:
        """Zero the optimizer moments of every parameter group that contains a tensor of these names."""
        # A flat part mixes parameters, so the moments of the whole group are reset.
        owners = {_get_parameter_name(name) for name in names}
        for part in self._parts:
            if owners & part.parameters.keys():
                for value in self.optimizer.state.get(part.tensor, {}).values():
                    value.zero_()

    def optimizer_state_dict(self) -> dict[str, torch.Tensor]:
        state = {}
        for part in self._parts:
            for kind, part_value in self.optimizer.state.get(part.tensor, {}).items():
                # Collective, in the same order of groups and kinds on every rank.
                flat_value = self.accelerator.gather(part_value) if part_value.ndim else part_value
                for name, location in part.slices_in_group().items():
                    shape = part.parameters[name].shape
                    state[f"{name}/{kind}"] = (
                        flat_value[location].view(shape) if part_value.ndim else part_value.clone()
                    )
        return state

    def load_state(self, weights: Tensors, moments: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in get_trainable_parameters(self.unwrapped_model).items():
                tensor.copy_(weights[name])
        # The optimizer's fp32 parts are copies: without this the first step would undo the load.
        self._zero_optimizer.refresh_fp32_params()
        for part in self._parts:
            kinds = {name.rpartition("/")[2] for name in moments if _get_parameter_name(name) in part.parameters}
            self.optimizer.state[part.tensor] = {
                kind: self._select_local_moment(part, kind, moments) for kind in sorted(kinds)
            }

    def _select_local_moment(self, part: _LocalGroupShard, kind: str, moments: Tensors) -> torch.Tensor:
        values = {name: moments[f"{name}/{kind}"] for name in part.parameters}
        # One step count for the whole part: its parameters have taken the same steps.
        if kind == "step":
            return next(iter(values.values())).to(part.tensor.device, copy=True)
        # The flat group is padded to a multiple of the ranks; a checkpoint holds no padding.
        flat_value = part.tensor.new_zeros(part.tensor.numel() * self.accelerator.num_processes)
        for name, location in part.slices_in_group().items():
            flat_value[location] = values[name].flatten()
        return flat_value[part.start : part.start + part.tensor.numel()].clone()


def _get_parameter_name(name: str) -> str:
    return name.rpartition("/")[0]
