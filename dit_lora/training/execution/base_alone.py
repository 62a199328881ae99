"""Tells whether a model is its base alone, as before the first step, and makes it that for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object
from torch import nn

from dit_lora.adapters.attach import is_lora_b
from dit_lora.numerics.dtensors import local


def does_nothing(model: nn.Module) -> bool:
    """Return true if all that trains is a LoRA whose B is zero on every rank, as before its first step. Collective."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    is_lora = all(".lora_A." in name or is_lora_b(name) for name in trained)
    b = _all_b(model)
    is_zero = is_lora and bool(b) and not any(bool(one.any()) for one in b)
    # Of sharded weights a rank may hold a part that is zero still.
    return all(gather_object([is_zero]))


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Set every trained LoRA's B to zero within: the model is then what it was before its first step, if that did nothing.

    Not by leaving adapters out: the same code runs then as when they are trained. Afterwards B is the same bits.
    """
    b = _all_b(model)
    trained = [one.clone() for one in b]
    try:
        for one in b:
            one.zero_()
        yield
    finally:
        for one, before in zip(b, trained, strict=True):
            one.copy_(before)


def _all_b(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's parts of every B that trains, which share the parameters' memory."""
    named = model.named_parameters()
    return [local(p.detach()) for name, p in named if p.requires_grad and is_lora_b(name)]
