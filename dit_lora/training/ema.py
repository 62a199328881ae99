"""An exponential moving average of what is trained; it moves after healthy steps only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.numerics.dtensors import as_part_of, local


class TrainedEMA:
    """Diffusers' `EMAModel` over the trained weights, with its warm-up of (1 + step) / (10 + step).

    The average is what is validated and saved. Its decay is a function of the step, so that its tensors are
    all its state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._average = EMAModel(self._own(), decay=decay, foreach=True)

    def _own(self) -> list[Any]:
        """Return the weights, of sharded ones this rank's part: PyTorch copies no list of DTensors."""
        values = self._parameters.values()
        return [local(p.detach()).requires_grad_() if isinstance(p, DTensor) else p for p in values]

    def step(self, number: int) -> None:
        """Move towards the weights after optimizer step `number`, counted from 1."""
        # Diffusers counts its own calls; set by the step, the decay is the same after a resume or a rollback.
        self._average.optimization_step = number - 1
        self._average.step(self._own())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages as `ema/<parameter>`, live; of sharded weights, DTensors like them."""
        averages = zip(self._parameters, self._average.shadow_params, strict=True)
        return {
            f"ema/{name}": as_part_of(self._parameters[name], average) for name, average in averages
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the model within; afterwards it has its own weights again, bit for bit."""
        self._average.store(self._own())
        self._average.copy_to(self._own())
        try:
            yield
        finally:
            self._average.restore(self._own())
