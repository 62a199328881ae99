"""Keeps the frozen base in host memory, and moves it to the device block by block: `train.offload: group`.

A block's frozen weights are copied when it is called, in the forward pass and again in the backward pass. They are
released when the next block is called, whose weights are copied while this one computes. Trained weights stay on the
device, where the optimizer holds them. No value depends on any of this.

Diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference. Its groups include the adapters;
it releases a block's weights when its recomputation ends, before its backward pass reads them; if the recomputation
stops early, as torch's does, it releases nothing; and it prefetches only in the order of the forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.guard.fallbacks import OFFLOAD, Fallback
from dit_lora.numerics.transformer_blocks import WHOLE_BLOCK_LAUNCHES, find_weights_read_outside, repeated_blocks
from dit_lora.training.execution.activation_checkpointing import register_before_computation, supports_checkpointing

_OFFLOAD_KEY = "_dit_lora_offload"


def offload_base(recipe: Recipe, transformer: nn.Module, accelerator: Accelerator) -> None:
    """Keep the frozen base in host memory if `train.offload` is set.

    Call it with the adapter attached and the model on the CPU, before `Accelerator.prepare`, which must get
    `get_device_placement` so that it does not move the model: the whole base is never on the device. Raises
    `DitLoraError` if the model or the launch does not support it.
    """
    if recipe.train.offload == "none":
        return
    if accelerator.distributed_type not in WHOLE_BLOCK_LAUNCHES:
        raise DitLoraError(
            f"train.offload=group: {accelerator.distributed_type.value} places the weights itself; launch "
            "with accelerate_configs/ddp.yaml or in one process, or set it to none"
        )
    directly_called = get_family(recipe.model.family).directly_called_modules
    transformer.__dict__[_OFFLOAD_KEY] = WeightOffloader(transformer, accelerator.device, directly_called)


def get_device_placement(*objects: Any) -> list[bool] | None:
    """`device_placement` for `Accelerator.prepare` of these objects; None (its default) without offload."""
    offloaded_flags = [isinstance(module, nn.Module) and _OFFLOAD_KEY in module.__dict__ for module in objects]
    return [not module for module in offloaded_flags] if any(offloaded_flags) else None


def make_offload_fallback(transformer: nn.Module) -> Fallback | None:
    """The fallback of `train.offload`: the whole base on the device; None without offload."""
    offload: WeightOffloader | None = transformer.__dict__.get(_OFFLOAD_KEY)
    if offload is None:
        return None
    return Fallback(OFFLOAD, "kernel", offload.disable_temporarily, offload.disable, "the base on the device")


class WeightOffloader:
    """Moves the frozen weights of a model's blocks and tracks them; between passes all are in host memory."""

    def __init__(
        self, transformer: nn.Module, device: torch.device, directly_called_modules: Sequence[str] = ()
    ) -> None:
        """Move all tensors except frozen block weights to `device`, and register the hooks of offload.

        Raises `DitLoraError` if no weight can be offloaded.
        """
        self.groups = _group_frozen_weights(transformer, directly_called_modules)
        self._device = device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.resident_groups: list[_FrozenBlockWeights] = []
        self._is_disabled = False
        """True while all weights stay on the device."""
        self._last_two_groups: _GroupPair = (None, None)
        self._next_groups: dict[_GroupPair, _FrozenBlockWeights] = {}
        """The group that last followed two others; pairs tell forward order from backward order."""
        self._place_tensors(transformer)
        for block, group in self.groups.items():
            enter = partial(self._prepare_block, group)
            block.register_forward_pre_hook(enter, prepend=True)
            # Transformers recomputes a layer without calling its forward pre-hooks.
            register_before_computation(block, enter)
        transformer.register_forward_pre_hook(self._offload_all, prepend=True)
        # Also after a forward that raised: a replay catches the error, and the base must be at rest for the next.
        transformer.register_forward_hook(self._offload_all, always_call=True)

    def _place_tensors(self, transformer: nn.Module) -> None:
        offloaded = {p for group in self.groups.values() for p in group.parameters}
        named_tensors = [*transformer.named_parameters(), *transformer.named_buffers()]
        for _, tensor in named_tensors:
            if tensor not in offloaded:
                tensor.data = tensor.data.to(self._device)
            elif self._copy_stream is not None:
                # A copy from pageable memory would block the host and could not overlap with computation.
                tensor.data = tensor.data.pin_memory()
        # DDP refuses a model on two devices, and has no public way to exclude weights. These need no broadcast: all
        # ranks read the same files.
        offloaded_names = {name for name, tensor in named_tensors if tensor in offloaded}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, offloaded_names)

    def _prepare_block(self, group: "_FrozenBlockWeights", *_: Any) -> None:
        """Copy a block's frozen weights to the device before it computes, in a forward pass or its recomputation.

        May be called twice for one computation.
        """
        if self._is_disabled or group is self._last_two_groups[1]:
            return
        # In a backward pass no module hook runs after the last block, but the engine's callback does.
        if not self.resident_groups and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._offload_all)
        self._next_groups[self._last_two_groups] = group
        self._last_two_groups = (self._last_two_groups[1], group)
        # The block that followed these two the last time: prefetch it.
        ahead = self._next_groups.get(self._last_two_groups)
        # Earlier blocks have been computed, in a backward pass too: otherwise this block would not be called yet.
        for passed in [resident for resident in self.resident_groups if resident not in (group, ahead)]:
            self._offload_group(passed)
        self._load_group(group)
        if group.arrival_event is not None:
            torch.cuda.current_stream(self._device).wait_event(group.arrival_event)
        if ahead is not None:
            self._load_group(ahead)

    def _offload_all(self, *_: Any) -> None:
        """Move all offloaded weights to host memory: before and after a forward pass, and after a backward pass."""
        if self._is_disabled:
            return
        for group in list(self.resident_groups):
            self._offload_group(group)
        self._last_two_groups = (None, None)

    def disable(self) -> None:
        """Move all weights to the device, where they stay. Needs memory for the whole base."""
        # First: the hooks must not send away what is loaded here.
        self._is_disabled = True
        for group in self.groups.values():
            self._load_group(group)
            if group.arrival_event is not None:
                torch.cuda.current_stream(self._device).wait_event(group.arrival_event)

    @contextmanager
    def disable_temporarily(self) -> Iterator[None]:
        """Keep all weights on the device inside the context. It begins and ends between two passes."""
        try:
            self.disable()
            yield
        finally:
            self._is_disabled = False
            self._offload_all()

    def _load_group(self, group: "_FrozenBlockWeights") -> None:
        if group in self.resident_groups:
            return
        self.resident_groups.append(group)
        if self._copy_stream is not None:
            # The memory may belong to a released block that queued work still reads.
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        # Has no effect if there is no stream.
        with torch.cuda.stream(self._copy_stream):
            group.load_weights_to_device(self._device)
            if self._copy_stream is not None:
                group.arrival_event = self._copy_stream.record_event()

    def _offload_group(self, group: "_FrozenBlockWeights") -> None:
        self.resident_groups.remove(group)
        group.release_device_weights()


class _FrozenBlockWeights:
    """The frozen weights of one block, which offload moves between host and device."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.arrival_event: torch.cuda.Event | None = None
        """CUDA event after which the copies requested last have arrived; None without copies."""
        self._host_tensors: list[torch.Tensor] = []

    def load_weights_to_device(self, device: torch.device) -> None:
        """Copy a block's frozen weights to the device from where they are now.

        A diagnosis in fp32 may have replaced their values.
        """
        self._host_tensors = [parameter.data for parameter in self.parameters]
        for parameter, home in zip(self.parameters, self._host_tensors, strict=True):
            parameter.data = home.to(device, non_blocking=True)

    def release_device_weights(self) -> None:
        """Let a block use its frozen weights in host memory again. Nothing is copied: they have not changed."""
        for parameter, home in zip(self.parameters, self._host_tensors, strict=True):
            parameter.data = home
        self._host_tensors = []


_GroupPair = tuple[_FrozenBlockWeights | None, _FrozenBlockWeights | None]


def _group_frozen_weights(
    transformer: nn.Module, directly_called_modules: Sequence[str]
) -> dict[nn.Module, _FrozenBlockWeights]:
    """The blocks that have frozen weights. Raises `DitLoraError` for a model that cannot be offloaded."""
    name = type(transformer).__name__
    if not supports_checkpointing(transformer):
        raise DitLoraError(
            f"train.offload=group: {name} has no gradient checkpointing, which offload needs; set it to none"
        )
    # Weights that the model also reads outside of their block must stay on the device.
    stays = find_weights_read_outside(transformer, directly_called_modules)
    frozen = {
        block: [p for p in block.parameters() if not p.requires_grad and p not in stays]
        for block in repeated_blocks(transformer)
    }
    groups = {block: _FrozenBlockWeights(parameters) for block, parameters in frozen.items() if parameters}
    if not groups:
        raise DitLoraError(
            f"train.offload=group: no block of {name} has frozen weights to keep in host memory; set it to none"
        )
    all_frozen = [p for parameters in frozen.values() for p in parameters]
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in all_frozen):
        raise DitLoraError(
            f"train.offload=group: weights of {name} are quantised; remove train.offload or model.quantize"
        )
    return groups
