"""Detects whether a model still equals its base, as before the first step, and restores that state temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from dit_lora.adapters.under import disable_trained_adapter
from dit_lora.numerics.adapter_tensors import is_adapter_tensor, is_zero_initialized
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.ranks import is_true_on_all_ranks


def has_only_untrained_adapters(model: nn.Module) -> bool:
    """True if only adapters train and have no effect on any rank, as before step 1. Collective."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    idle = _find_zero_initialized_params(model)
    is_zero = all(map(is_adapter_tensor, trained)) and bool(idle) and not any(bool(p.any()) for p in idle)
    # A rank's shard of a trained weight may still be zero: ask all ranks.
    return is_true_on_all_ranks(is_zero)


@contextmanager
def temporarily_reset_adapters(model: nn.Module) -> Iterator[None]:
    """Reset the adapters to their state before step 1 inside the context; afterwards the weights are bitwise the same.

    Valid if the adapters had no effect at that point. A LoRA's B is zero then, so the same code runs as in training.
    DoRA also trains magnitudes, which are not zero at the start. They are bypassed, with the same bits: DoRA's output
    is the base's output plus a difference.
    """
    idle = _find_zero_initialized_params(model)
    trained = [part.clone() for part in idle]
    # Only DoRA has these parameters.
    magnitudes = any("lora_magnitude_vector" in name for name, _ in model.named_parameters())
    try:
        # In place: optimizer, engine and hooks hold these tensors.
        for part in idle:
            part.zero_()
        with disable_trained_adapter(model) if magnitudes else nullcontext():
            yield
    finally:
        for part, before in zip(idle, trained, strict=True):
            part.copy_(before)


def _find_zero_initialized_params(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of the adapter parameters that train and start at zero; they share the parameters' memory."""
    idle = [p for name, p in model.named_parameters() if p.requires_grad and is_zero_initialized(name)]
    return [get_local_tensor(p.detach()) for p in idle]
