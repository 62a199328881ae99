"""Measure the rounding errors of right gradients, which the check must allow for.

The gradient of a tiny model is computed again at the same weights in a wider dtype: fp64 for fp32, fp32 for bf16.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gradient_check.tiny_training import TinyTraining
from dit_lora.families.base import Tensors

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


class GradientRounding(NamedTuple):
    """Relative rounding errors of one gradient, and of the loss."""

    along_gradient: float
    """Difference of the slopes along the gradient."""
    along_tensors: float
    """The same along the gradient with length 1 in each tensor."""
    spread: float
    """Root mean square error of the elements, relative to their root mean square."""
    loss: float
    without_gradients: float
    """Difference of the loss that is computed without gradients from the one with them."""

    def __str__(self) -> str:
        return (
            f"along the gradient {self.along_gradient:.2g}, per tensor {self.along_tensors:.2g}, spread "
            f"{self.spread:.2g}; loss {self.loss:.2g}, without gradients {self.without_gradients:.2g}"
        )


def measure_largest_rounding(family: str, work: Path, dtype: torch.dtype, num_steps: int = 10) -> GradientRounding:
    """The largest of each rounding error in the first steps of a training."""
    training = TinyTraining.from_family(family, work, dtype)
    steps = []
    for _ in range(num_steps):
        steps.append(measure_rounding(training))
        training.train(1)
    return GradientRounding(*map(max, zip(*steps, strict=True)))


def measure_rounding(training: TinyTraining) -> GradientRounding:
    """Compare the present step's gradient with that of a copy in a wider dtype."""
    gradients, loss = _compute_step(training)
    with torch.no_grad():
        repeated_loss = training.compute_terms().sum().item()
    wider = _WIDER[training.dtype]
    # Without autocast, as in fp32.
    copied = replace(
        training,
        model=copy.deepcopy(training.model).to(wider),
        dtype=torch.float32,
        data=[_widen(batch, wider) for batch in training.data],
    )
    exact_gradients, exact_loss = _compute_step(copied)
    names = [name for name, gradient in gradients.items() if gradient.any()]
    lengths = {name: gradients[name].norm().item() for name in names}
    error = sum((gradients[name] - exact_gradients[name]).square().sum().item() for name in names)
    return GradientRounding(
        _compare_slopes(gradients, exact_gradients, dict.fromkeys(names, 1.0)),
        _compare_slopes(gradients, exact_gradients, lengths),
        (error / sum(exact_gradients[name].square().sum().item() for name in names)) ** 0.5,
        abs(loss / exact_loss - 1),
        abs(repeated_loss / loss - 1),
    )


def _compute_step(training: TinyTraining) -> tuple[Tensors, float]:
    """A step's gradients in fp64, and its loss with gradients enabled."""
    training.run_backward()
    gradients = {name: gradient.double() for name, gradient in training.copy_gradients().items()}
    return gradients, training.compute_terms().sum().item()


def _widen(batch: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}


def _compare_slopes(gradients: Tensors, exact_gradients: Tensors, lengths: Mapping[str, float]) -> float:
    """Relative difference of slopes along the gradient, whose tensors are divided by `lengths`."""
    slope = sum((gradients[n] * exact_gradients[n]).sum().item() / length for n, length in lengths.items())
    projection = sum(gradients[n].square().sum().item() / length for n, length in lengths.items())
    return abs(slope / projection - 1)
