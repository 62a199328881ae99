"""Spreads a step over ranks: what differs between replicated weights, sharded ones and DeepSpeed.

The loop, the gate, recovery and checkpoints are the same for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dit_lora.config.optim import OptimConfig
from dit_lora.fuse.gradient_norms import Norms
from dit_lora.guard.gate import gated_step, weights_are_bad
from dit_lora.numerics.parameters import trainable_state
from dit_lora.training.optim.build import clip_gradients, gradient_norms
from dit_lora.training.optim.state import (
    drop_optimizer_state,
    load_optimizer_state,
    optimizer_state,
    put_numbers,
)

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Engine:
    """One way of spreading a step over ranks; here every rank holds the whole model: one process, or DDP.

    Methods are collective unless they concern this rank's part alone.
    """

    accelerator: Accelerator
    model: nn.Module
    """The module that a training forward goes through."""
    optimizer: Any
    """The optimizer; its groups have names, learning rates and parameters."""
    lockstep: ClassVar[bool] = False
    """True if a forward of `bare` needs every rank: then all run the same one at the same time."""

    @cached_property
    def bare(self) -> nn.Module:
        """The model with its own names, as replays, sampling and saving use it."""
        # Once: each call takes 2 ms, to look whether DeepSpeed is installed.
        return self.accelerator.unwrap_model(self.model)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of weights or gradients of other ranks that a pass holds while ranks exchange them."""
        return 0

    def warm_up(self, loss: Callable[[], torch.Tensor]) -> None:
        """Settle what a first backward settles for good, by the loss of a first micro-batch; before the first step.

        Over three ranks and more a backward is run: DDP orders its buckets by its first, and so the order of its sums.
        Without this, the first step after a resume would round otherwise than the same step of a run that went on.
        """
        # Two ranks have one order of adding two numbers; only from three on can it differ.
        if isinstance(self.model, DistributedDataParallel) and self.accelerator.num_processes > 2:
            loss().backward()
            self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self) -> AbstractContextManager[Any]:
        """Return a context around forward and backward of a micro-step; gradients meet in a step's last one."""
        # A module, never a list: a list disables no_sync and all-reduces in every micro-step.
        return self.accelerator.accumulate(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def alone(self) -> AbstractContextManager[None]:
        """Let this rank call `bare` by itself within: with weights as they lie, and with all tokens of a sample."""
        return nullcontext()

    def gradient_norms(self, norms: Norms | None) -> dict[str, torch.Tensor]:
        """Return each group's gradient norm over all ranks, fp64 on the device; finite exactly if every element is.

        `norms` computes them; None for PyTorch.
        """
        # DDP has averaged the gradients: every rank computes the same norms, and nothing is sent.
        return gradient_norms(self.optimizer.param_groups, norms)

    def clip(
        self, norms: Tensors, optim: OptimConfig, adaptive: Callable[[str], float | None]
    ) -> torch.Tensor:
        """Scale gradients to their clips; return the norm over all groups before that."""
        return clip_gradients(self.optimizer.param_groups, norms, optim, adaptive)

    def step(self, bad: torch.Tensor) -> None:
        """Take the optimizer's step unless `bad`, and drop the gradients."""
        # The flag stays on the device where the optimizer can read it there (fused AdamW's `found_inf`).
        gated_step(self.optimizer, bad)
        # Also after a step that was not taken: it is taken again from fresh gradients.
        self.optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        """Drop the gradients of micro-steps that no update will follow, and count micro-steps anew; sends nothing."""
        # Not by Accelerate's `zero_grad`, which does nothing in the middle of an accumulated step.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.accelerator.step = 0

    def weights_are_bad(self) -> torch.Tensor:
        """Return a bool scalar on the device, true if a trained weight of this rank is not finite."""
        return weights_are_bad(self.optimizer)

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return trained weights and optimizer state by name, live; of sharded tensors, this rank's part."""
        return {**trainable_state(self.bare), **self.own_moments()}

    def own_moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's part of `own_state`, named as in `moments`."""
        return optimizer_state(self.optimizer)

    def alike(self) -> dict[str, torch.Tensor]:
        """Return the part of `own_state` that every rank has, and has to have to the same bits."""
        # A rank has a DTensor's shard for itself: other ranks have nothing to compare it with.
        return {n: t for n, t in self.own_state().items() if not isinstance(t, DTensor)}

    def put_numbers(self, state: Tensors) -> None:
        """Write back those values of `own_state` that are copies and no live tensors: the optimizer's numbers."""
        put_numbers(self.optimizer, state)

    def forget(self, names: Sequence[str]) -> None:
        """Drop the optimizer's state of the tensors that `own_state` gives these names, as before its first step."""
        drop_optimizer_state(self.optimizer, names)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights by name, whole. Ranks other than the first may get meta tensors."""
        return trainable_state(self.bare)

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state, whole, named as by `optimizer_state`; without values where `weights` is."""
        return optimizer_state(self.optimizer)

    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Put whole tensors, equal on all ranks, in the place of this rank's own."""
        with torch.no_grad():
            for name, tensor in trainable_state(self.bare).items():
                tensor.copy_(weights[name])
        load_optimizer_state(self.optimizer, moments)
