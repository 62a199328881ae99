"""Tells whether a model is its base alone, as before the first step, and makes it that for a while."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.utils import gather_object
from torch import nn

from dit_lora.adapters.under import trained_off
from dit_lora.numerics.adapter_tensors import is_adapter, is_idle
from dit_lora.numerics.dtensors import local


def does_nothing(model: nn.Module) -> bool:
    """Return true if only adapters train and they change nothing on any rank, as before step 1. Collective."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    idle = _idle_parts(model)
    is_zero = all(map(is_adapter, trained)) and bool(idle) and not any(bool(p.any()) for p in idle)
    # Of sharded weights a rank may hold a part that is zero still.
    return all(gather_object([is_zero]))


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Let the model be what it was before its first step within, if that did nothing; afterwards it is the same bits.

    A LoRA's B is zero then, so that the same code runs as in training. DoRA also trains magnitudes, which are not zero
    at the start. They are left out, with the same bits: its output is the base's output plus a difference.
    """
    idle = _idle_parts(model)
    trained = [one.clone() for one in idle]
    magnitudes = any("lora_magnitude_vector" in name for name, _ in model.named_parameters())
    try:
        for one in idle:
            one.zero_()
        with trained_off(model) if magnitudes else nullcontext():
            yield
    finally:
        for one, before in zip(idle, trained, strict=True):
            one.copy_(before)


def _idle_parts(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's parts of what trains and is zero at the start, which share the parameters' memory."""
    named = model.named_parameters()
    return [local(p.detach()) for name, p in named if p.requires_grad and is_idle(name)]
