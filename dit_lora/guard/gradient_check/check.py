"""Check that a step's gradient is the slope of its loss; if not, find the parameter group and the layer.

A check compares along up to four directions:

- Random signs, for parameters whose gradient is missing or zero: the loss must not depend on them.
- The gradient: finds what is wrong with all of it, such as a wrong scale or the gradient of another batch.
- The gradient with length 1 in each tensor: finds layers whose gradients are too small to count in the first.
- Random signs, for all other parameters: finds errors that are orthogonal to the gradient. In a large model, noise
  hides them; therefore this direction may find a fault, but need not give a result.

An error smaller than the bounds that are reported is not seen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dit_lora.guard.gradient_check.directions import (
    Direction,
    GradientDirection,
    Parameters,
    RandomDirection,
    TensorwiseGradientDirection,
    UntrainedDirection,
)
from dit_lora.guard.gradient_check.slopes import (
    MAX_SIZES,
    TOLERANCES,
    CheckResult,
    LossEvaluator,
    LossTerms,
    SlopeComparison,
    compare_gradient_with_slopes,
    may_use_tf32,
    persists_at_smallest_step,
)
from dit_lora.numerics.adapter_tensors import get_layer_name
from dit_lora.numerics.finite import HALF_DTYPES

_RELATIVE_SIZE = 0.02
"""First step along a random direction, relative to the weights."""
_LOSS_NOT_FINITE = "the loss is not finite"
GRADIENT_NOT_FINITE = "the gradient is not finite"
MAX_AGREED_BOUND = 0.05
"""Relative bound above which a check says `cannot tell`: it would not see an error of this size."""
_MAX_RANDOM_SIZES = 3
"""Step sizes along random signs, which need not give a result."""
MAX_REPLAY_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 0.01}
"""The loss may differ from the step's by this share: without gradients other kernels may run, which round otherwise.

On a CPU the two differed by 1e-7 at most. Against a wider dtype, all rounding was 1e-7 of the loss in fp32 and 1e-3 in
bf16 (`python -m benchmarks.gradient_check --rounding`).
"""


@dataclass(frozen=True)
class FaultLocation:
    """Where slope and gradient differ."""

    layer: str | None
    """The last layer, in the model's order, with a wrong gradient; None if no single layer was found.

    A backward pass goes from the last layer to the first, so the fault is in this layer or right behind it."""
    candidates: tuple[str, ...]
    """The layers that remain when the search ends; only `layer` if it was found."""
    groups: tuple[str, ...] = ()
    """Parameter groups that differ; empty if there is only one group."""
    earlier_layers: CheckResult | None = None
    """Whether the layers before `layer` differ too; None if there are none or it was not measured."""
    comparisons: tuple[SlopeComparison, ...] = ()

    @property
    def description(self) -> str:
        """The place as the end of a sentence."""
        if self.layer is None:
            return f", in at least one of {len(self.candidates)} layers"
        earlier = " and layers before it" if self.earlier_layers == "differs" else ""
        return f", in {self.layer}{earlier}"


@dataclass(frozen=True)
class GradientReport:
    """Result of a gradient check."""

    result: CheckResult
    comparisons: tuple[SlopeComparison, ...]
    """One per direction."""
    num_evaluations: int
    location: FaultLocation | None = None
    """Where the gradient is wrong, if the result is `differs`."""
    reason: str = ""
    """Why nothing was compared, or what differs without a comparison; else empty."""
    is_in_fp32: bool = False
    """True if the comparisons are those of a replay in fp32 of a step in lower precision."""
    fp32_distance: float | None = None
    """Relative distance of the step's gradient from that in fp32, if the two were compared."""

    @property
    def worst(self) -> SlopeComparison | None:
        """The comparison that differs; without one, that along the gradient. None if there is neither.

        If the check cannot tell, the comparison with the widest bound among those that could not.
        """
        if self.result == "cannot tell":
            # Random signs need not give a result, and a slope of zero has no relative bound.
            needed = [c for c in self.comparisons if c.direction != RandomDirection.label and c.bound < math.inf]
            undecided = [c for c in needed if c.result == "cannot tell"]
            return max(undecided or needed, key=lambda comparison: comparison.bound, default=None)
        differing = [c for c in self.comparisons if c.result == "differs"]
        along_gradient = [c for c in self.comparisons if c.direction == GradientDirection.label]
        return next(iter(differing or along_gradient), None)

    @property
    def is_finite(self) -> bool:
        return self.reason not in (_LOSS_NOT_FINITE, GRADIENT_NOT_FINITE)

    @property
    def message(self) -> str:
        """The result in one sentence."""
        worst = self.worst
        if self.result == "differs" and worst is None:
            return self.reason
        if self.result == "cannot tell" or worst is None:
            figures = (
                f"slope / gradient is {worst.ratio:.4g} +- {worst.bound:.2g}" if worst else "nothing was compared"
            )
            return f"the gradient could not be checked against the loss: {self.reason or figures}"
        in_fp32 = " in fp32" * self.is_in_fp32
        if self.result == "agrees":
            text = f"slope / gradient is {worst.ratio:.4f} +- {worst.bound:.2g}{in_fp32}"
            distance = self.fp32_distance
            rounding = f", and rounding moves the gradient by {distance:.1%}" if distance is not None else ""
            return f"the gradient agrees with the loss: {text}{rounding}"
        location = self.location.description if self.location else ""
        if worst.direction == UntrainedDirection.label:
            return f"the loss depends on parameters whose gradient is missing or zero{in_fp32}{location}"
        article = "the " if worst.direction.startswith("gradient") else ""
        return (
            f"the gradient is wrong: along {article}{worst.direction}, the slope of the loss is {worst.ratio:.4g} +- "
            f"{worst.bound:.2g} times what the gradient says{in_fp32}{location}"
        )


DirectionMaker = Callable[[Sequence[str]], Direction]
"""Makes a direction that moves the parameters of these names."""


@dataclass
class _GradientCheckState:
    """Arguments of a check, and the step sizes that it found."""

    evaluator: LossEvaluator
    parameters: Parameters
    dtype: torch.dtype
    seed: int
    sizes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By label of the direction, the best step size along it and the gradient's slope there."""

    def compare_along_direction(self, direction: Direction) -> SlopeComparison:
        slope = abs(direction.compute_slope())
        size = self._choose_step_size(direction, slope)
        max_sizes = _MAX_RANDOM_SIZES if direction.label == RandomDirection.label else MAX_SIZES
        comparison = compare_gradient_with_slopes(
            self.evaluator, direction, size=size, dtype=self.dtype, max_sizes=max_sizes
        )
        if comparison.estimate is not None and direction.label not in self.sizes:
            self.sizes[direction.label] = (comparison.estimate.size, slope)
        return comparison

    def _choose_step_size(self, direction: Direction, slope: float) -> float:
        """The first step size to try."""
        if direction.label in self.sizes:
            size, known_slope = self.sizes[direction.label]
            # A part of the model changes the loss less, so noise calls for longer steps; with equal changes of the
            # loss they would often be too long.
            return size * max(1.0, known_slope / slope) ** 0.5 if slope else size
        # Signs are scaled to the weights already, and their slope may cancel to almost nothing.
        if isinstance(direction, RandomDirection) or not slope:
            return _RELATIVE_SIZE
        # Along the gradient: the step that changes the loss by a given share.
        loss = max(abs(self.evaluator.base_loss), self.evaluator.base_noise)
        return TOLERANCES[self.dtype].loss_change * loss / slope

    def list_directions(self) -> list[tuple[list[str], DirectionMaker]]:
        """The directions to compare along, each with the names of the parameters that it moves."""
        parameters = self.parameters
        moved = [name for name, p in parameters.items() if p.grad is not None and bool(p.grad.any())]
        still = [name for name in parameters if name not in moved]
        makers: list[tuple[list[str], DirectionMaker]] = [
            # First: missing gradients are the clearest finding, and the other directions cannot see them.
            (still, UntrainedDirection.from_parameters(parameters, self.seed).restrict_to_parameters),
            (moved, GradientDirection(parameters).restrict_to_parameters),
            (moved, TensorwiseGradientDirection(parameters).restrict_to_parameters),
            (moved, RandomDirection.from_parameters(parameters, self.seed).restrict_to_parameters),
        ]
        return [(names, make_direction) for names, make_direction in makers if names]


def check_gradient(
    compute_terms: LossTerms,
    parameters: Parameters,
    *,
    dtype: torch.dtype = torch.float32,
    groups: Mapping[str, Sequence[str]] | None = None,
    step_loss: float | None = None,
    max_evaluations: int = 300,
    seed: int = 0,
) -> GradientReport:
    """Compare a step's gradient with the slope of its loss.

    Weights get their original bits back, also if `compute_terms` raises. So does the random state of torch, before
    each evaluation. At most the moved weights are copied.

    Args:
        compute_terms: Computes the terms of the step's loss, such as loss / samples for each sample, as a tensor whose
            sum is the loss that was differentiated. It must use the same batches, noise, dropout masks and weights of
            micro-batches as the step. It runs without gradients and must leave the model's buffers unchanged.
        parameters: The trained parameters by name, in the model's order. `grad` is the step's gradient after
            accumulation, reduction and unscaling, and before clipping; None counts as zero.
        dtype: The lowest precision of the model's forward pass, such as autocast's.
        groups: Names of parameters by parameter group.
        step_loss: The loss that the step had, if known. If the loss evaluated now differs from it, nothing can be
            said about the gradient.
        max_evaluations: Evaluations of the loss that the check may use. A healthy check took about 22 in
            fp32 and 60 in bf16.
        seed: Seeds random directions.
    """
    devices = list({p.device for p in parameters.values() if p.device.type == "cuda"})
    evaluator = LossEvaluator(compute_terms, devices, max_evaluations)
    evaluator.evaluate_base()
    reason = _find_comparison_obstacle(evaluator, parameters, dtype, step_loss)
    if reason:
        return GradientReport("cannot tell", (), evaluator.num_evaluations, reason=reason)
    check = _GradientCheckState(evaluator, parameters, dtype, seed)
    comparisons: list[SlopeComparison] = []
    for names, make_direction in check.list_directions():
        comparison = check.compare_along_direction(make_direction(names))
        if comparison.result == "differs" and not comparison.has_difference_beyond_bounds(
            TOLERANCES[dtype].reported_bounds
        ):
            comparison = replace(comparison, result="cannot tell")
        comparisons.append(comparison)
        # The first direction that differs is searched; the rest would find the same fault again.
        if comparison.result == "differs":
            location = _locate_wrong_layers(check, comparison, make_direction, groups or {})
            if location is not None:
                return GradientReport("differs", tuple(comparisons), evaluator.num_evaluations, location)
            comparisons[-1] = replace(comparison, result="cannot tell")
    # Random signs are extra: noise may hide their slope without making the others less certain.
    needed = [c for c in comparisons if c.direction != RandomDirection.label]
    # An estimate that is zero, as its bound, has no relative bound.
    is_sure = all(c.result == "agrees" and not MAX_AGREED_BOUND < c.bound < math.inf for c in needed)
    return GradientReport("agrees" if is_sure else "cannot tell", tuple(comparisons), evaluator.num_evaluations)


def repeat_comparison(
    compute_terms: LossTerms,
    parameters: Parameters,
    comparison: SlopeComparison,
    *,
    dtype: torch.dtype,
    max_evaluations: int = 60,
    seed: int = 0,
) -> CheckResult:
    """Repeat a comparison of `check_gradient` with the gradient that the parameters have now.

    Parameters without a gradient may have one now: then it is compared too.
    """
    devices = list({p.device for p in parameters.values() if p.device.type == "cuda"})
    evaluator = LossEvaluator(compute_terms, devices, max_evaluations)
    evaluator.evaluate_base()
    parameters = {name: parameters[name] for name in comparison.parameters}
    if _find_comparison_obstacle(evaluator, parameters, dtype, step_loss=None):
        return "cannot tell"
    check = _GradientCheckState(evaluator, parameters, dtype, seed)
    directions = [make_direction(names) for names, make_direction in check.list_directions()]
    # The other directions agreed before, or were not tried.
    labels = {comparison.direction}
    # If these parameters have a gradient now, random signs for zero gradients move none of them.
    if comparison.direction == UntrainedDirection.label:
        labels.add(GradientDirection.label)
    results = {
        check.compare_along_direction(direction).result for direction in directions if direction.label in labels
    }
    if "differs" in results:
        return "differs"
    return "agrees" if results == {"agrees"} else "cannot tell"


def _find_comparison_obstacle(
    evaluator: LossEvaluator, parameters: Parameters, dtype: torch.dtype, step_loss: float | None
) -> str:
    """Why no comparison is possible; empty if it is."""
    if not evaluator.base_terms.isfinite().all():
        return _LOSS_NOT_FINITE
    if not all(bool(p.grad.isfinite().all()) for p in parameters.values() if p.grad is not None):
        return GRADIENT_NOT_FINITE
    return describe_loss_change(evaluator.base_loss, step_loss, dtype, evaluator.base_noise)


def describe_loss_change(loss: float, step_loss: float | None, dtype: torch.dtype, noise: float = 0.0) -> str:
    """Why a loss that was evaluated again is not the step's; empty if it is, or if the step's is not known."""
    # Without the step's loss, replays are trusted to repeat it.
    if step_loss is None:
        return ""
    if abs(loss - step_loss) > MAX_REPLAY_DIFFERENCE[dtype] * abs(step_loss) + 10 * noise:
        return f"the loss is {loss:.6g} when it is evaluated again, and was {step_loss:.6g} in the step"
    return ""


def _locate_wrong_layers(
    check: _GradientCheckState,
    comparison: SlopeComparison,
    make_direction: DirectionMaker,
    groups: Mapping[str, Sequence[str]],
) -> FaultLocation | None:
    """Find the parameter groups that differ, then by bisection the last layer that does.

    None if there the loss is not smooth, and the difference disappears in small steps.
    """
    comparisons: list[SlopeComparison] = []
    if comparison.direction == GradientDirection.label:
        # Within a part of the model, every layer counts alike.
        make_direction = TensorwiseGradientDirection(check.parameters).restrict_to_parameters

    def compare_parameter_groups(names: Sequence[str]) -> CheckResult:
        comparisons.append(check.compare_along_direction(make_direction(names)))
        return comparisons[-1].result

    names_of_group = {group: [n for n in comparison.parameters if n in names] for group, names in groups.items()}
    # A search over groups says something only if there are several.
    candidates = [group for group, names in names_of_group.items() if names]
    differing = (
        [g for g in candidates if compare_parameter_groups(names_of_group[g]) == "differs"]
        if len(candidates) > 1
        else []
    )
    groups_searched = {name for group in differing for name in names_of_group[group]} or set(comparison.parameters)
    # In the model's order, which is roughly that of the forward pass.
    names_of_layer: dict[str, list[str]] = {}
    for name in comparison.parameters:
        if name in groups_searched:
            names_of_layer.setdefault(get_module_name(name), []).append(name)
    layers = list(names_of_layer)

    def compare_layers(start: int, end: int) -> CheckResult:
        return compare_parameter_groups([name for layer in layers[start:end] for name in names_of_layer[layer]])

    low, high = _bisect_layer_range(len(layers), compare_layers)
    names = [name for layer in layers[low:high] for name in names_of_layer[layer]]
    differing_comparisons = [c for c in comparisons if c.result == "differs" and set(c.parameters) == set(names)]
    last_comparison = differing_comparisons[-1] if differing_comparisons else comparison
    direction = make_direction(last_comparison.parameters)
    # In 16 bits and in TF32, rounding removes small changes of the loss altogether.
    is_coarse = check.dtype in HALF_DTYPES or may_use_tf32(direction.parameters.values())
    if not is_coarse and not persists_at_smallest_step(check.evaluator, direction, last_comparison, check.dtype):
        return None
    is_single = high - low == 1
    return FaultLocation(
        layer=layers[low] if is_single else None,
        candidates=tuple(layers[low:high]),
        groups=tuple(differing),
        earlier_layers=compare_layers(0, low) if is_single and low else None,
        comparisons=tuple(comparisons),
    )


def get_module_name(parameter_name: str) -> str:
    """The adapted layer of an adapter's tensor; of any other parameter the module that holds it."""
    layer = get_layer_name(parameter_name)
    return layer if layer != parameter_name else parameter_name.rpartition(".")[0] or parameter_name


def _bisect_layer_range(num_layers: int, compare: Callable[[int, int], CheckResult]) -> tuple[int, int]:
    """Narrow down the last layer that differs to the range of layers [low, high)."""
    low, high = 0, num_layers
    while high - low > 1:
        middle = (low + high) // 2
        # The half nearer to the loss first: a wrong gradient there also makes those before it wrong.
        if compare(middle, high) == "differs":
            low = middle
        # Measured, not concluded: the difference may be spread over layers that are each within their bound.
        elif compare(low, middle) == "differs":
            high = middle
        else:
            break
    return low, high
