"""An exponential moving average of what is trained, which moves after healthy steps only, and its bounds."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.numerics.dtensors import as_part_of, local

Tensors = Mapping[str, torch.Tensor]
_BEYOND = 10.0
"""Factor for weights that were larger between two checks than at both; an average never exceeds its weight's peak."""


class TrainedEMA:
    """Diffusers' `EMAModel` over the trained weights, with its warm-up of (1 + step) / (10 + step).

    The average is what is validated and saved. Its decay is a function of the step, so that its tensors are
    all its state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._average = EMAModel(self._own(), decay=decay, foreach=True)
        self.bounds = AverageBounds()

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
        try:
            self._average.copy_to(self._own())
            yield
        finally:
            self._average.restore(self._own())


@dataclass
class AverageBounds:
    """Largest known magnitudes of trained weights, which also bound their averages; of shards, this rank's part."""

    seen: dict[str, float] = field(default_factory=dict)

    def note(self, weights: Tensors, averages: Tensors) -> None:
        """Take these values as sound: they widen the bounds."""
        for peaks in (_peaks(weights), _peaks(averages)):
            for name, peak in peaks.items():
                self.seen[name] = max(peak, self.seen.get(name, 0.0))

    def beyond(self, weights: Tensors, averages: Tensors) -> dict[str, tuple[float, float]]:
        """Return the finite averages beyond all that their weights were, each with its peak and the bound."""
        now = _peaks(weights)
        bounds = {name: max(peak, self.seen.get(name, 0.0)) for name, peak in now.items()}
        return {
            name: (peak, bounds[name])
            for name, peak in _peaks(averages).items()
            if math.isfinite(peak) and peak > _BEYOND * bounds[name]
        }


def _peaks(tensors: Tensors) -> dict[str, float]:
    """Return the largest magnitude of each tensor, NaN if a value is; one read of the device."""
    parts = {name: local(tensor.detach()) for name, tensor in tensors.items()}
    # A rank's shard of a small tensor may be empty, which has no largest value.
    filled = {name: tensor for name, tensor in parts.items() if tensor.numel()}
    norms = torch._foreach_norm([*filled.values()], ord=float("inf")) if filled else []
    values = torch.stack([norm.float() for norm in norms]).tolist() if filled else []
    return dict.fromkeys(parts, 0.0) | dict(zip(filled, values, strict=True))
