"""Chooses the engine for this launch."""

from typing import Any

from torch import nn

from dit_lora.families import get_family
from dit_lora.training.distributed.context_parallel import ContextParallel
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.distributed.fsdp import shard_model
from dit_lora.training.distributed.zero import Zero2
from dit_lora.training.execution.offload import get_device_placement
from dit_lora.training.session.session import Session


def build_engine(session: Session, model: nn.Module, optimizer: Any) -> Engine:
    """Place the model and its optimizer on devices according to the launch and `train.context_parallel`."""
    accelerator = session.accelerator
    # At most one of these: the checks of launch and recipe refuse combinations.
    if session.sharding is not None:
        directly_called = get_family(session.recipe.model.family).directly_called_modules
        return shard_model(accelerator, model, optimizer, session.sharding, directly_called)
    if session.zero_stage is not None:
        return Zero2(accelerator, model, optimizer)
    degree = session.recipe.train.context_parallel
    if degree > 1:
        model, optimizer = accelerator.prepare(model, optimizer)
        return ContextParallel(accelerator, model, optimizer, degree=degree)
    # With offload the model is already on two devices, and Accelerate must not move it to one.
    device_placement = get_device_placement(model, optimizer)
    return Engine(accelerator, *accelerator.prepare(model, optimizer, device_placement=device_placement))
