"""Keeps the frozen base in host memory, block by block on the device: `train.offload: group`.

A block's frozen weights come when it is called, in the forward pass and again in the backward pass, and leave when
the next block is called, whose weights are copied while this one computes. What trains stays on the device, where
the optimizer holds it. No value depends on any of this.

Diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference. Its groups take adapters along; it
sends a block's weights away when its recomputation ends, which is before its backward pass reads them; where the
recomputation stops early, as torch's does, it sends nothing away; and it prefetches in the forward pass's order only.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.training.execution.activation_checkpointing import (
    before_each_computation,
    supports_checkpointing,
)
from dit_lora.training.execution.blocks import LAUNCHES, read_outside, repeated_blocks

_OFFLOAD = "_dit_lora_offload"


def offload_base(recipe: Recipe, transformer: nn.Module, accelerator: Accelerator) -> None:
    """Keep the frozen base in host memory if `train.offload` says so.

    Call it with the adapter attached and the model on the CPU, before `Accelerator.prepare`, which is then told
    by `placement` not to move the model: the base never is on the device as a whole. Raises `DitLoraError` where
    the model or the launch cannot.
    """
    if recipe.train.offload == "none":
        return
    if accelerator.distributed_type not in LAUNCHES:
        raise DitLoraError(
            f"train.offload=group: {accelerator.distributed_type.value} places the weights itself; launch "
            "with accelerate_configs/ddp.yaml or in one process, or set it to none"
        )
    alone = get_family(recipe.model.family).called_alone
    transformer.__dict__[_OFFLOAD] = Offload(transformer, accelerator.device, alone)


def placement(*prepared: Any) -> list[bool] | None:
    """Return `device_placement` for `Accelerator.prepare` of these objects; None, its default, without offload."""
    away = [isinstance(one, nn.Module) and _OFFLOAD in one.__dict__ for one in prepared]
    return [not one for one in away] if any(away) else None


class Offload:
    """Moves the frozen weights of a model's blocks, and knows where they are: at rest, all are in host memory."""

    def __init__(
        self, transformer: nn.Module, device: torch.device, called_alone: Sequence[str] = ()
    ) -> None:
        """Put the rest on `device` and hooks on the model. Raises `DitLoraError` if no weight can be offloaded."""
        self.groups = _groups(transformer, called_alone)
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.resident: list[_Group] = []
        self._trail: _Trail = (None, None)
        self._follows: dict[_Trail, _Group] = {}
        """The group that last followed two others; with it forward and backward order can be told apart."""
        self._place(transformer)
        for block, group in self.groups.items():
            enter = partial(self._enter, group)
            block.register_forward_pre_hook(enter, prepend=True)
            # A forward pre-hook is not called again where Transformers recomputes a layer.
            before_each_computation(block, enter)
        transformer.register_forward_pre_hook(self._rest, prepend=True)
        # Also after a forward that raised: a replay catches that, and the base must be at rest for the next.
        transformer.register_forward_hook(self._rest, always_call=True)

    def _place(self, transformer: nn.Module) -> None:
        offloaded = {p for group in self.groups.values() for p in group.parameters}
        named = [*transformer.named_parameters(), *transformer.named_buffers()]
        for _, tensor in named:
            if tensor not in offloaded:
                tensor.data = tensor.data.to(self._device)
            elif self._copies is not None:
                # From pageable memory a copy would block the host and could not run beside a computation.
                tensor.data = tensor.data.pin_memory()
        # DDP takes no model on two devices, and has no public way to leave weights out. These need no broadcast:
        # all ranks read the same files.
        away = {name for name, tensor in named if tensor in offloaded}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, away)

    def _enter(self, group: "_Group", *_: Any) -> None:
        """Bring a block's weights before it is computed, in a forward pass or again in a backward pass.

        It may be called twice for one computation.
        """
        if group is self._trail[1]:
            return
        # In a backward pass: no hook of a module comes after its last block, but the engine's callback does.
        if not self.resident and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._rest)
        self._follows[self._trail] = group
        self._trail = (self._trail[1], group)
        ahead = self._follows.get(self._trail)
        # What is behind has been computed, in a backward pass too: this block would not be asked for before.
        for other in [one for one in self.resident if one not in (group, ahead)]:
            self._send_away(other)
        self._bring(group)
        if group.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(group.arrived)
        if ahead is not None:
            self._bring(ahead)

    def _rest(self, *_: Any) -> None:
        """Send everything to host memory: before and after a forward pass, after a backward pass."""
        for group in list(self.resident):
            self._send_away(group)
        self._trail = (None, None)

    def _bring(self, group: "_Group") -> None:
        if group in self.resident:
            return
        self.resident.append(group)
        if self._copies is not None:
            # The memory may be that of a block sent away, which work that is queued still reads.
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):  # without effect where it is None
            group.bring(self._device)
            if self._copies is not None:
                group.arrived = self._copies.record_event()

    def _send_away(self, group: "_Group") -> None:
        self.resident.remove(group)
        group.send_away()


class _Group:
    """The frozen weights of one block."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.arrived: torch.cuda.Event | None = None
        """The event on a GPU after which the copies that were last asked for are there."""
        self._home: list[torch.Tensor] = []

    def bring(self, device: torch.device) -> None:
        """Copy the weights from where they are, whatever has been put there: a diagnosis in fp32 puts other values."""
        self._home = [parameter.data for parameter in self.parameters]
        for parameter, home in zip(self.parameters, self._home, strict=True):
            parameter.data = home.to(device, non_blocking=True)

    def send_away(self) -> None:
        """Go back to the tensors in host memory; nothing is copied, since a frozen weight has not changed."""
        for parameter, home in zip(self.parameters, self._home, strict=True):
            parameter.data = home
        self._home = []


_Trail = tuple[_Group | None, _Group | None]


def _groups(transformer: nn.Module, called_alone: Sequence[str]) -> dict[nn.Module, _Group]:
    """Return the blocks that have frozen weights. Raises `DitLoraError` for a model that cannot be offloaded."""
    name = type(transformer).__name__
    if not supports_checkpointing(transformer):
        raise DitLoraError(
            f"train.offload=group: {name} has no gradient checkpointing, which brings a block's weights back "
            "for its backward pass; set it to none"
        )
    stays = read_outside(transformer, called_alone)
    frozen = {
        block: [p for p in block.parameters() if not p.requires_grad and p not in stays]
        for block in repeated_blocks(transformer)
    }
    groups = {block: _Group(parameters) for block, parameters in frozen.items() if parameters}
    if not groups:
        raise DitLoraError(
            f"train.offload=group: no block of {name} has frozen weights to keep in host memory; set it to none"
        )
    all_frozen = [p for parameters in frozen.values() for p in parameters]
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in all_frozen):
        raise DitLoraError(
            f"train.offload=group: weights of {name} are quantised, and small already; use one of the two"
        )
    return groups
