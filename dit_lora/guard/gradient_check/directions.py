"""Directions in the space of trained weights, and displacements along them that low precision keeps exactly."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from dit_lora.numerics.adapter_tensors import get_layer_name
from dit_lora.numerics.streams import derive_seed

Parameters = Mapping[str, torch.Tensor]
"""Trained parameters by name, with their gradients."""
_MAGNITUDE = "lora_magnitude_vector"
_MAX_ELEMENTS = 2**18
"""Elements that are moved at a time: their temporary values take about 12 MB."""


def select_exact_parameters(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Parameters whose gradient is, by design, the derivative of the loss.

    DoRA takes the norm of its weights for a constant (arXiv 2402.09353, section 4.3), so of its layers only the
    magnitudes are such.
    """
    magnitudes = [name for name in parameters if _MAGNITUDE in name]
    inexact_layers = {get_layer_name(name) for name in magnitudes}
    return {
        name: p for name, p in parameters.items() if name in magnitudes or get_layer_name(name) not in inexact_layers
    }


@dataclass(frozen=True, eq=False)
class Direction(ABC):
    """A direction over some of the trained parameters, computed for each tensor when it is needed.

    Storing it would take as much memory as the weights. It is computed for some rows at a time,
    see `split_rows_into_parts`.
    """

    parameters: Parameters

    label = ""

    @abstractmethod
    def compute_vector(self, name: str, rows: slice) -> torch.Tensor:
        """The direction's values for rows of one parameter, in fp32 (fp64 for fp64 parameters)."""

    def restrict_to_parameters(self, names: Iterable[str]) -> Self:
        """The same direction for some of its parameters; it leaves the others where they are."""
        return replace(self, parameters={name: self.parameters[name] for name in names})

    def compute_slope(self) -> float:
        """Slope of the loss along the direction according to the gradient."""
        return sum(
            compute_gradient_dot_product(parameter, self.compute_vector(name, rows), rows)
            for name, parameter in self.parameters.items()
            for rows in split_rows_into_parts(parameter)
        )


@dataclass(frozen=True, eq=False)
class GradientDirection(Direction):
    """The gradient itself. Layers with large gradients dominate it."""

    label = "gradient"

    def compute_vector(self, name: str, rows: slice) -> torch.Tensor:
        parameter = self.parameters[name]
        # A parameter without a gradient stays where it is.
        if parameter.grad is None:
            return torch.zeros_like(to_at_least_fp32(get_rows(parameter, rows)))
        return to_at_least_fp32(get_rows(parameter.grad, rows))


@dataclass(frozen=True, eq=False)
class TensorwiseGradientDirection(GradientDirection):
    """The gradient, scaled to length 1 in each tensor, so that layers with small gradients count too."""

    norms: dict[str, float] = field(default_factory=dict)
    """Lengths of the tensors' gradients, each computed when it is needed."""

    label = "gradient per tensor"

    def compute_vector(self, name: str, rows: slice) -> torch.Tensor:
        gradient = super().compute_vector(name, rows)
        if name not in self.norms:
            self.norms[name] = compute_euclidean_norm(self.parameters[name].grad)
        return gradient / self.norms[name] if self.norms[name] > 0 else gradient


@dataclass(frozen=True, eq=False)
class RandomDirection(Direction):
    """Random signs, scaled to the weights. Its slope also contains errors that are orthogonal to the gradient."""

    scales: Mapping[str, float] = field(default_factory=dict)
    """Root mean square of each tensor's weights. Computed once, because the weights move while it is used."""
    seed: int = 0

    label = "random signs"

    @classmethod
    def from_parameters(cls, parameters: Parameters, seed: int) -> Self:
        """A direction over all parameters; `restrict_to_parameters` it to those that are to be moved."""
        scales = {name: compute_rms(p.detach()) for name, p in parameters.items()}
        # For tensors whose weights are all zero, such as B in a new LoRA.
        largest = max(scales.values()) or 1.0
        return cls(parameters, {name: scale or largest for name, scale in scales.items()}, seed)

    def compute_vector(self, name: str, rows: slice) -> torch.Tensor:
        values = to_at_least_fp32(get_rows(self.parameters[name], rows))
        generator = seed_generator(values.device, self.seed, "signs", name, rows.start)
        signs = torch.randint(0, 2, values.shape, generator=generator, device=values.device, dtype=values.dtype)
        return (2 * signs - 1) * self.scales[name]


@dataclass(frozen=True, eq=False)
class UntrainedDirection(RandomDirection):
    """Random signs for parameters whose gradient is missing or zero. If that is right, the loss does not change."""

    label = "random signs, zero gradients"


@torch.no_grad()
def to_at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def split_rows_into_parts(tensor: torch.Tensor) -> Iterator[slice]:
    """Rows of a tensor in parts of at most `_MAX_ELEMENTS` elements, which bounds the memory of temporary values."""
    num_rows = len(tensor) if tensor.ndim else 1
    if not tensor.numel():
        return
    rows_per_part = max(1, _MAX_ELEMENTS * num_rows // tensor.numel())
    for start in range(0, num_rows, rows_per_part):
        yield slice(start, start + rows_per_part)


def get_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """A view of these rows; of the whole tensor if it is a scalar."""
    return tensor.detach()[rows] if tensor.ndim else tensor.detach()


def compute_euclidean_norm(tensor: torch.Tensor | None) -> float:
    """Euclidean length in fp64; 0 for None."""
    if tensor is None:
        return 0.0
    return sum(get_rows(tensor, rows).double().square().sum().item() for rows in split_rows_into_parts(tensor)) ** 0.5


def compute_rms(values: torch.Tensor) -> float:
    return compute_euclidean_norm(values) / values.numel() ** 0.5 if values.numel() else 0.0


def compute_gradient_dot_product(parameter: torch.Tensor, displacement: torch.Tensor, rows: slice) -> float:
    """Scalar product of rows of a parameter's gradient and their displacement in fp64; 0 without a gradient."""
    if parameter.grad is None:
        return 0.0
    # In fp64, for sums over millions of elements.
    return torch.sum(get_rows(parameter.grad, rows).double() * displacement.double()).item()


def seed_generator(device: torch.device, seed: int, stream: str, *keys: str | int) -> torch.Generator:
    # On the device: drawing for all trained weights on the CPU would take longer than the forward pass.
    return torch.Generator(device).manual_seed(derive_seed(seed, stream, *keys) & 0xFFFFFFFF)


class WeightDisplacement:
    """Moves parameters along a direction; the original weights are kept as a copy. Use `displace_weights`.

    A step is rounded at random to multiples of the spacing of `dtype` at the weight. Low precision would drop a step
    that is smaller than the spacing, and the loss would not move. A multiple also passes a cast to `dtype` unchanged,
    and steps to both sides have equal lengths.
    """

    def __init__(self, direction: Direction, size: float, dtype: torch.dtype) -> None:
        self.direction = direction
        self.size = size
        self.dtype = dtype
        self._originals = {name: p.detach().clone() for name, p in direction.parameters.items()}

    @torch.no_grad()
    def move_weights_to_position(self, position: int) -> float:
        """Set the weights to original + `position` steps. Returns the change of the loss that the gradient predicts.

        The prediction is for the displacement as stored.
        """
        predicted = 0.0
        for name, parameter in self.direction.parameters.items():
            for rows in split_rows_into_parts(parameter):
                moved, original = get_rows(parameter, rows), get_rows(self._originals[name], rows)
                # Always from the copy: adding and subtracting would not give the original bits back.
                moved.copy_(to_at_least_fp32(original) + position * self._compute_step(name, rows))
                # In fp64, of the stored values: what low precision rounded away has not moved the loss either.
                predicted += compute_gradient_dot_product(parameter, moved.double() - original.double(), rows)
        return predicted

    def compute_random_projection(self) -> float:
        """Root sum square of gradient times step: the typical projection of a step with random signs."""
        total = 0.0
        for name, parameter in self.direction.parameters.items():
            if parameter.grad is None:
                continue
            for rows in split_rows_into_parts(parameter):
                step = self._compute_step(name, rows).double()
                total += torch.sum((get_rows(parameter.grad, rows).double() * step).square()).item()
        return total**0.5

    @torch.no_grad()
    def restore_weights(self) -> None:
        for name, parameter in self.direction.parameters.items():
            parameter.copy_(self._originals[name])

    def _compute_step(self, name: str, rows: slice) -> torch.Tensor:
        original = get_rows(self._originals[name], rows)
        vector = self.direction.compute_vector(name, rows)
        # Seeded at every call: all positions use the same step.
        generator = seed_generator(vector.device, 0, "rounding", name, rows.start)
        # The coarser of the dtype that stores the weight and the dtype that it is cast to in the forward pass.
        dtype = max(original.dtype, self.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return round_to_spacing(self.size * vector, to_at_least_fp32(original), dtype, generator)


@contextmanager
def displace_weights(direction: Direction, size: float, dtype: torch.dtype) -> Iterator[WeightDisplacement]:
    """Context in which weights can be moved; on exit they have their original bits. Copies the weights it moves."""
    displacement = WeightDisplacement(direction, size, dtype)
    # A loop may hold a graph from before the check, as a GAN does. Its weights get their bits back, but autograd would
    # refuse them for their version.
    with torch.autograd._unsafe_preserve_version_counter(tuple(direction.parameters.values())):
        try:
            yield displacement
        finally:
            displacement.restore_weights()


def round_to_spacing(
    step: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Round a step to multiples of the spacing of `dtype` at weight +- 2 steps; the expected value is the step."""
    info = torch.finfo(dtype)
    # |x| < 2^exponent, where the spacing of floating-point numbers is 2^exponent * eps / 2.
    exponent = torch.frexp(weight.abs() + 2 * step.abs()).exponent
    smallest = max(info.smallest_normal * info.eps, torch.finfo(step.dtype).tiny)
    spacing = torch.ldexp(torch.full_like(step, info.eps / 2), exponent).clamp(min=smallest)
    # Rounded up with a probability equal to the remainder.
    offsets = torch.rand(step.shape, generator=generator, device=step.device, dtype=step.dtype)
    return torch.floor(step / spacing + offsets) * spacing
