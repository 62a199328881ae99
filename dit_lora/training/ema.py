"""An exponential moving average of the trained weights, updated after healthy steps only, and its bounds check."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.numerics.dtensors import get_local_tensor, wrap_local_values

Tensors = Mapping[str, torch.Tensor]
_BOUND_TOLERANCE = 10.0
"""Tolerance for weights that peaked between two checks; an average never exceeds its weight's largest magnitude."""


class TrainedEMA:
    """Exponential moving averages of the trained weights.

    They use Diffusers' `EMAModel` with its warm-up of (1 + step) / (10 + step).

    Validation and saving use the averages. The decay is a function of the step, so the tensors are the only state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # It clones the weights, so the averages start at their present values.
        self._ema_model = EMAModel(self._local_weights(), decay=decay, foreach=True)
        self.bounds = AverageMagnitudeBounds()

    def _local_weights(self) -> list[Any]:
        """The trained weights for the moving averages; local shards of DTensors.

        PyTorch cannot deep-copy lists of DTensors.
        """
        values = self._parameters.values()
        return [get_local_tensor(p.detach()).requires_grad_() if isinstance(p, DTensor) else p for p in values]

    def step(self, number: int) -> None:
        """Update the moving averages of the weights after optimizer step `number`, counted from 1."""
        # Diffusers counts its own calls; set by the step, the decay is the same after a resume or a rollback.
        self._ema_model.optimization_step = number - 1
        self._ema_model.step(self._local_weights())

    def named_averages(self) -> dict[str, torch.Tensor]:
        """The live averages of the trained weights as `ema/<parameter>`; DTensors if the weights are sharded."""
        # Diffusers keeps the averages in the order of the parameters.
        averages = zip(self._parameters, self._ema_model.shadow_params, strict=True)
        return {f"ema/{name}": wrap_local_values(self._parameters[name], average) for name, average in averages}

    @contextmanager
    def apply_averages(self) -> Iterator[None]:
        """Context in which the model's weights are their moving averages.

        Afterwards the weights are restored bit for bit.
        """
        self._ema_model.store(self._local_weights())
        try:
            self._ema_model.copy_to(self._local_weights())
            yield
        finally:
            self._ema_model.restore(self._local_weights())


@dataclass
class AverageMagnitudeBounds:
    """Largest known magnitude of each trained weight (of this rank's shard), which also bounds its average."""

    max_magnitudes: dict[str, float] = field(default_factory=dict)

    def widen_magnitude_bounds(self, weights: Tensors, averages: Tensors) -> None:
        """Raise the bounds on magnitudes to those of these weights and averages, which are taken as sound."""
        # After a resume, earlier peaks of the weights are known only through their averages.
        for peaks in (_compute_largest_magnitudes(weights), _compute_largest_magnitudes(averages)):
            for name, peak in peaks.items():
                self.max_magnitudes[name] = max(peak, self.max_magnitudes.get(name, 0.0))

    def find_averages_out_of_bounds(self, weights: Tensors, averages: Tensors) -> dict[str, tuple[float, float]]:
        """Find finite averages that exceed every magnitude their weights had.

        Returns (largest magnitude, bound) by name.
        """
        current_peaks = _compute_largest_magnitudes(weights)
        bounds = {name: max(peak, self.max_magnitudes.get(name, 0.0)) for name, peak in current_peaks.items()}
        return {
            name: (peak, bounds[name])
            for name, peak in _compute_largest_magnitudes(averages).items()
            if math.isfinite(peak) and peak > _BOUND_TOLERANCE * bounds[name]
        }


def _compute_largest_magnitudes(tensors: Tensors) -> dict[str, float]:
    """Largest magnitude of each tensor, NaN if it holds a NaN. Reads from the device once."""
    parts = {name: get_local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    # A rank's shard of a small tensor may be empty: it has no largest value.
    filled = {name: tensor for name, tensor in parts.items() if tensor.numel()}
    # The maximum norm of every tensor, with one call for all.
    norms = torch._foreach_norm([*filled.values()], ord=float("inf")) if filled else []
    values = torch.stack([norm.float() for norm in norms]).tolist() if filled else []
    return dict.fromkeys(parts, 0.0) | dict(zip(filled, values, strict=True))
