"""Chooses the engine that a launch asks for."""

from typing import Any

from torch import nn

from dit_lora.families import get_family
from dit_lora.training.context import ContextParallel
from dit_lora.training.engine import Engine, Replicated
from dit_lora.training.offload import placement
from dit_lora.training.runtime import Runtime
from dit_lora.training.sharded import shard
from dit_lora.training.zero import Zero2


def build_engine(runtime: Runtime, model: nn.Module, optimizer: Any) -> Engine:
    """Place the model and its optimizer as the launch and `train.context_parallel` say."""
    accelerator = runtime.accelerator
    if runtime.sharding is not None:
        alone = get_family(runtime.recipe.model.family).called_alone
        return shard(accelerator, model, optimizer, runtime.sharding, alone)
    if runtime.zero is not None:
        return Zero2(accelerator, model, optimizer)
    degree = runtime.recipe.train.context_parallel
    if degree > 1:
        model, optimizer = accelerator.prepare(model, optimizer)
        return ContextParallel(accelerator, model, optimizer, degree=degree)
    # With offload the model is on two devices already, and Accelerate must not move it to one.
    placed = placement(model, optimizer)
    return Replicated(accelerator, *accelerator.prepare(model, optimizer, device_placement=placed))
