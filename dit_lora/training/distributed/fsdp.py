"""Weights sharded by torch's `fully_shard` (FSDP2): a block is whole on a rank only while it computes.

Accelerate's `prepare` shards only on GPUs. This makes the same few calls on GPUs and CPUs, so that tests without a GPU
run the code that runs on one. Accelerate still provides autocast and the process group.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.dtensors import GATHERING_HOOKS, disable_gathering
from dit_lora.numerics.transformer_blocks import repeated_blocks
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.session.launch import FsdpSettings

_HOOK_ATTRIBUTES = ("_forward_pre_hooks", "_forward_hooks")


@dataclass
class ShardedEngine(Engine):
    """FSDP2 engine: every rank holds a shard of each weight, gradient and moment. A forward pass needs all ranks."""

    sharding: FsdpSettings = field(default_factory=FsdpSettings)
    collective_forward: ClassVar[bool] = True

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.model

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of gathered weights during a pass: the root's and those of two blocks.

        The next block is gathered while one computes.
        """
        blocks = [_count_bytes(block) for block in _select_outermost(repeated_blocks(self.model))]
        resident = sorted(blocks)[-2:] if self.sharding.reshard_after_forward else blocks
        return _count_bytes(self.model) - sum(blocks) + sum(resident)

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        model = cast(FSDPModule, self.model)
        # Only in training may a weight stay whole after a forward pass: a whole copy would miss changes to the shards.
        model.set_reshard_after_forward(self.sharding.reshard_after_forward)
        with self.accelerator.accumulate(self.model):
            # Like DDP's no_sync: gradients of earlier micro-steps stay unreduced until the last.
            model.set_requires_gradient_sync(self.accelerator.sync_gradients)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
                model.set_reshard_after_forward(True)

    def enable_local_forward(self) -> AbstractContextManager[None]:
        return disable_gathering(self.model)


def shard_model(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharding: FsdpSettings,
    directly_called_modules: Sequence[str] = (),
) -> ShardedEngine:
    """Shard the model over all ranks block by block, and give the optimizer the resulting parameters.

    The adapter must be attached, equal on all ranks, and the optimizer must not have stepped. Blocks move to the
    accelerator's device one by one, so it never holds the whole model. Parts of blocks that the model also calls
    directly are sharded separately. Raises `DitLoraError` for parameters that cannot be sharded.
    """
    refused = [
        f"{name}: {'a single number' if not p.ndim else 'not contiguous in memory'}"
        for name, p in model.named_parameters()
        if not p.ndim or not p.is_contiguous()
    ]
    if refused:
        # `fully_shard` would raise at the first of them, after it has sharded others.
        summary = "these weights cannot be sharded; launch with accelerate_configs/ddp.yaml"
        raise DitLoraError(format_list(summary, refused))
    # Raised for models that return a view, as all of Diffusers' do; nothing writes to their output.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    # Only Accelerate's autocast is wanted: `evaluation_mode` keeps it from wrapping the model in DDP as well.
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    # One dimension over all ranks: every weight is sharded over all of them.
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    inner_modules = [model.get_submodule(name) for name in directly_called_modules]
    # Inner modules first: `fully_shard` gives a module the parameters that no inner module has taken.
    for module in (*inner_modules, *_select_outermost(repeated_blocks(model)), model):
        before = {name: dict(getattr(module, name)) for name in _HOOK_ATTRIBUTES}
        # Reshard after each forward pass: whole weights would miss changes to the shards.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        added = {n: [k for k in getattr(module, n) if k not in before[n]] for n in _HOOK_ATTRIBUTES}
        module.__dict__[GATHERING_HOOKS] = added
    _gather_root_weights(model)
    # `fully_shard` replaced the parameters with DTensors; the optimizer still holds the old ones.
    parameters_by_name = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters_by_name[name] for name in group["param_names"]]
    return ShardedEngine(accelerator, model, optimizer, sharding=sharding)


_FEATURE_METHODS = ("get_image_features", "get_video_features")
"""Methods of the inner model that Transformers' `generate` calls before its first forward pass."""


def _gather_root_weights(model: nn.Module) -> None:
    """Gather the root's weights when a method of `_FEATURE_METHODS` is called outside a forward pass."""
    trunk: Any = getattr(model, "base_model", model)
    for name in _FEATURE_METHODS if trunk is not model else ():
        method = getattr(trunk, name, None)
        if method is None:
            continue
        # FSDP2 wraps methods of the sharded module only, so add the inner model's method to it under another name.
        gathered_name = f"_gathered_{name}"
        setattr(model, gathered_name, method)
        register_fsdp_forward_method(model, gathered_name)
        trunk.__dict__[name] = _gather_weights_during_method(model, method, getattr(model, gathered_name))


def _gather_weights_during_method(
    model: Any, method: Callable[..., Any], gathering_method: Callable[..., Any]
) -> Callable[..., Any]:
    # `generate` reads the method's signature.
    @functools.wraps(method)
    def call_method(*args: Any, **kwargs: Any) -> Any:
        # Inside a forward pass the root is already gathered; gathering twice would reshard it too early.
        is_outside = isinstance(model.get_input_embeddings().weight, DTensor)
        return gathering_method(*args, **kwargs) if is_outside else method(*args, **kwargs)

    return call_method


def _select_outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks to shard: those that no other block contains. Inner ones are gathered with the outer one."""
    inside = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if id(block) not in inside]


def _count_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
