"""Bounds moving averages by what their weights were."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dit_lora.numerics.dtensors import local

Tensors = Mapping[str, torch.Tensor]
_BEYOND = 10.0
"""An average is never beyond what its weight has been; between two looks the weight may have been larger than at both."""


@dataclass
class AverageBounds:
    """Largest magnitudes that trained weights, and so their averages, are known to have had; of shards, this rank's."""

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
