"""Spreads a training step over ranks: the differences between replicated weights, sharded weights and DeepSpeed.

The loop, the gate, recovery and checkpoints are the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dit_lora.config.optim import OptimConfig
from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.guard.finite_gate import has_nonfinite_weights, take_step_unless_bad
from dit_lora.numerics.dtensors import copy_full_values, gather_tensors, shard_like_reference
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.training.optim.build import clip_gradients, compute_gradient_norms
from dit_lora.training.optim.state import (
    drop_optimizer_state,
    iterate_optimizer_parameters,
    load_optimizer_state,
    load_scalar_state,
    optimizer_state,
)

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Engine:
    """Base class for ways of spreading a step over ranks.

    This one has the whole model on every rank: one process, or DDP.

    Methods are collective unless they concern only this rank's part.
    """

    accelerator: Accelerator
    model: nn.Module
    """The module to call for a training forward."""
    optimizer: Any
    """The optimizer; its groups have a name, a learning rate and parameters."""
    collective_forward: ClassVar[bool] = False
    """True if a forward of `unwrapped_model` needs every rank: all then run the same forward at the same time."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The unwrapped model, with its original parameter names. Used for replays, sampling and saving."""
        # Accelerate's `unwrap_model` would import DeepSpeed if it is installed.
        if isinstance(self.model, DistributedDataParallel):
            module: nn.Module = self.model.module
            return module
        return self.model

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of other ranks' weights or gradients that this rank holds during a forward or backward pass."""
        return 0

    def fix_ddp_bucket_order(self, compute_loss: Callable[[], torch.Tensor]) -> None:
        """Run one throw-away backward so that DDP fixes its bucket order before step 1.

        DDP orders its buckets, and so its sums, by its first backward. Without this, the first step after a resume
        would round differently from the same step of an uninterrupted run.
        """
        # Adding two numbers has one order; only from three ranks on can it differ.
        if isinstance(self.model, DistributedDataParallel) and self.accelerator.num_processes > 2:
            compute_loss().backward()
            self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self) -> AbstractContextManager[Any]:
        """Context around forward and backward of a micro-step.

        Gradients are all-reduced only in the step's last one.
        """
        # A module, never a list: a list disables no_sync and all-reduces in every micro-step.
        return self.accelerator.accumulate(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def enable_local_forward(self) -> AbstractContextManager[None]:
        """Let this rank call `unwrapped_model` by itself inside the context, with local weights and all tokens."""
        return nullcontext()

    def keep_unsharded_gradients(self) -> AbstractContextManager[None]:
        """Context in which `grad` of every trained parameter is the step's whole gradient, before the norms.

        If a rank fails before the gradients are exchanged, such as for lack of memory, all ranks raise
        `GradientCheckError`, and no gradient has changed.
        """
        # DDP has averaged the gradients.
        return nullcontext()

    def compute_gradient_norms(self, compute_norms: NormFunction | None) -> dict[str, torch.Tensor]:
        """Gradient norm of each parameter group over all ranks, as fp64 scalars on the device.

        A norm is finite exactly if every element is.

        `compute_norms` computes them; None uses PyTorch.
        """
        # DDP has averaged the gradients: every rank computes the same norms, without communication.
        return compute_gradient_norms(self.optimizer.param_groups, compute_norms)

    def clip_gradients(
        self, norms: Tensors, optim: OptimConfig, adaptive_bound: Callable[[str], float | None]
    ) -> torch.Tensor:
        """Clip the gradients of all ranks. Returns the norm over all groups before clipping."""
        return clip_gradients(self.optimizer.param_groups, norms, optim, adaptive_bound)

    def step(self, should_skip: torch.Tensor) -> None:
        """Run the optimizer step unless `should_skip` is true, and clear the gradients."""
        # The flag stays on the device where the optimizer can read it there (fused AdamW's `found_inf`).
        take_step_unless_bad(self.optimizer, should_skip)
        # Also after a skipped step: it is repeated from fresh gradients.
        self.optimizer.zero_grad(set_to_none=True)

    def discard_gradients(self) -> None:
        """Clear gradients that no update will follow, and reset the micro-step count. Not collective."""
        # Not with Accelerate's `zero_grad`, which does nothing in the middle of an accumulated step.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        # Accelerate counts micro-steps to find the last one of a step.
        self.accelerator.step = 0

    def has_nonfinite_weights(self) -> torch.Tensor:
        """Bool scalar on the device: true if a trained weight of this rank is not finite."""
        return has_nonfinite_weights(self.optimizer)

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """Live trained weights and optimizer state by name; of sharded tensors, this rank's part."""
        return {**get_trainable_parameters(self.unwrapped_model), **self.local_optimizer_state()}

    def local_optimizer_state(self) -> dict[str, torch.Tensor]:
        """This rank's optimizer state by name, a part of `local_state_dict`."""
        return optimizer_state(self.optimizer)

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """State that is replicated, and must be bitwise equal, on all ranks."""
        # Each rank has its own shard of a DTensor: there is nothing to compare it with.
        return {n: t for n, t in self.local_state_dict().items() if not isinstance(t, DTensor)}

    def load_scalar_state(self, state: Tensors) -> None:
        """Write back the values of `local_state_dict` that are copies: the optimizer's Python numbers."""
        load_scalar_state(self.optimizer, state)

    def drop_optimizer_state(self, names: Sequence[str]) -> None:
        """Delete the optimizer state of these names of `local_state_dict`: the next step starts from scratch."""
        drop_optimizer_state(self.optimizer, names)

    def trainable_state_dict(self) -> dict[str, torch.Tensor]:
        """The trained weights by name, unsharded. Ranks other than the first may get meta tensors."""
        return self._gather(get_trainable_parameters(self.unwrapped_model))

    def optimizer_state_dict(self) -> dict[str, torch.Tensor]:
        """The optimizer state by name, unsharded. Ranks other than the first may get meta tensors."""
        return self._gather(optimizer_state(self.optimizer))

    def _gather(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        # Tensors that are not sharded are returned as they are, on every rank.
        return gather_tensors(tensors, keep_values=self.accelerator.is_main_process)

    def load_state(self, weights: Tensors, moments: Tensors) -> None:
        """Load full (unsharded) tensors, equal on all ranks, into this rank's weights and optimizer state."""
        for name, weight in get_trainable_parameters(self.unwrapped_model).items():
            copy_full_values(weight, weights[name])
        parameters = iterate_optimizer_parameters(self.optimizer.param_groups)
        local_moments = dict(moments)
        for name, moment in moments.items():
            # A moment, `<group>/<parameter>/<moment>`, is sharded like its parameter; step counts are 0-dim.
            parameter = parameters.get(name.rpartition("/")[0])
            if moment.ndim and isinstance(parameter, DTensor):
                local_moments[name] = shard_like_reference(moment, parameter)
        load_optimizer_state(self.optimizer, local_moments)
