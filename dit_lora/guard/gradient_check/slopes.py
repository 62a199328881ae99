"""Measure the slope of a loss along a direction, with an error bound from the same evaluations.

At each step size the loss is evaluated at -2, -1, 0, 1 and 2 steps. From its changes:

- The slope, by central differences at 1 and 2 steps and Richardson extrapolation.
- The truncation error, from the difference between the two.
- The noise of one evaluation, from the fourth difference. For a smooth loss it vanishes with the step size, and for
  rounding errors it does not (Moré and Wild, Estimating Computational Noise, SIAM J. Sci. Comput. 33, 2011).
  Evaluating twice at the same weights would find only nondeterminism.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from dit_lora.guard.gradient_check.directions import Direction, displace_weights
from dit_lora.numerics.stop_gradient import StopGradientValues

CheckResult = Literal["agrees", "differs", "cannot tell"]
LossTerms = Callable[[], torch.Tensor]
"""Computes the terms of a step's loss, such as each sample's share; their sum is the loss."""

_POSITIONS = (1, -1, 2, -2)
EVALUATIONS_PER_SIZE = len(_POSITIONS)
# Variance of a fourth difference of independent values: the squares of 1, -4, 6, -4, 1.
_FOURTH_DIFFERENCE_VARIANCE = 70.0
# Standard deviation of the extrapolated slope for noise of 1: root of 2 * (8/12)^2 + 2 * (1/12)^2.
_SLOPE_DEVIATION = math.sqrt(130) / 12
_NOISE_FACTOR = 5.0
"""Standard deviations in the bound, of noise that is known; `SlopeEstimate.noise_bound` uses more for an estimate."""
MAX_SIZES = 6
_SIZE_FACTOR = 2.5
"""Ratio of two step sizes that are tried in turn."""
_TRUNCATION_FACTOR = 2.0
"""A difference is reported only if it is above its bound with so many times the truncation error.

The truncation error is that of a smooth loss. ReLU makes it larger, by 1.2 bounds in a healthy check of Sana."""
_CONFIRMED_NOISE = 4.0
"""The difference at the smallest size that confirms it, in bounds of the noise."""
_CONFIRMED_SIZE_FACTOR = 8.0
"""Ratio of two step sizes in `persists_at_smallest_step`."""
_MIN_CONFIRMED_SIZE = 1e-3
"""The smallest size that confirms a difference, relative to the best."""
_REPEATS = (1.1, 0.9, 1.2)
"""Relative step sizes of measurements that are averaged with the best, if noise makes it too inexact."""


class SlopeTolerance(NamedTuple):
    """Tolerances of a comparison for the dtype that the model computes in."""

    gradient_bias: float
    """Relative rounding error of a correct gradient as a whole, which evaluations of the loss cannot measure."""
    gradient_spread: float
    """Relative rounding error of its elements, as root mean square; it averages out."""
    target_bound: float
    """Relative bound of the measured slope below which no other step size is tried."""
    max_bound: float
    """Relative bound above which the result is `cannot tell` instead of `agrees`."""
    loss_change: float
    """Change of the loss in the first step tried, relative to the loss."""
    reported_bounds: float = 1.0
    """A check reports a difference of more than so many bounds.

    In bf16 a right gradient was 1.2 bounds off, in a layer of Sana that amplifies rounding."""


# The first two columns, from `python -m benchmarks.gradient_check --rounding`: the largest errors in 60 steps of six
# families on a CPU were 4e-7 and 3e-6 in fp32, and 0.03 and 0.084 in bf16. In fp32 a single tensor had 1e-4; other
# devices sum in another order. fp16 has three bits more than bf16, and fp64 29 more than fp32.
TOLERANCES = {
    torch.float64: SlopeTolerance(1e-6, 1e-6, 1e-5, 0.1, 1e-3),
    torch.float32: SlopeTolerance(1e-4, 1e-4, 2e-3, 0.1, 1e-3),
    torch.float16: SlopeTolerance(4e-3, 0.01, 0.02, 0.1, 3e-3, reported_bounds=2.0),
    torch.bfloat16: SlopeTolerance(0.03, 0.08, 0.02, 0.15, 1e-2, reported_bounds=2.0),
}


# Sums of thousands of products in 10 bits of mantissa.
_TF32_GRADIENT_ERROR = 2e-3


class EvaluationBudgetError(Exception):
    """Raised if a comparison needs more evaluations of the loss than the check may use."""


@dataclass
class LossEvaluator:
    """Evaluates the loss without gradients, counts the evaluations, and restores the random state after each."""

    compute_terms: LossTerms
    devices: Sequence[torch.device]
    """CUDA devices whose random state the loss uses."""
    max_evaluations: int
    num_evaluations: int = 0
    base_terms: torch.Tensor = field(init=False)
    """Terms at the original weights, fp64."""
    base_noise: float = field(init=False)
    """Lower bound of the noise: of rounding the terms, and of two evaluations at the same weights."""
    _epsilon: float = field(init=False, default=0.0)
    _stopped_values: StopGradientValues = field(init=False, default_factory=StopGradientValues)

    def evaluate_base(self) -> None:
        """Evaluate the loss twice at the original weights."""
        terms, repeated_terms = self.evaluate_loss_terms(), self.evaluate_loss_terms()
        # 1.0 has the spacing eps; the sum that makes a term adds more rounding.
        rounding = self._epsilon * terms.norm().item()
        self.base_terms = terms
        self.base_noise = max(rounding, _estimate_error_of_sum(repeated_terms - terms) / math.sqrt(2))

    @property
    def base_loss(self) -> float:
        return self.base_terms.sum().item()

    def require_evaluation_budget(self, num_evaluations: int) -> None:
        """Raise `EvaluationBudgetError` if so many evaluations are too many."""
        if self.num_evaluations + num_evaluations > self.max_evaluations:
            raise EvaluationBudgetError

    def evaluate_loss_terms(self) -> torch.Tensor:
        """The terms of the loss at the present weights, fp64 on the CPU."""
        self.num_evaluations += 1
        # Autocast caches casts of weights, which would hide that they have changed. In some versions of PyTorch a cast
        # that was cached without gradients also loses the gradient of the next step.
        torch.clear_autocast_cache()
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(self.devices),
                self._stopped_values.hold_values_across_evaluations(),
            ):
                terms = self.compute_terms().detach()
        finally:
            torch.clear_autocast_cache()
        self._epsilon = torch.finfo(terms.dtype).eps
        # (terms,)
        return terms.double().cpu().flatten()


def _estimate_error_of_sum(differences: torch.Tensor) -> float:
    # Errors of terms are independent (their root sum square), or of equal sign (their sum): the larger.
    return max(differences.sum().abs().item(), differences.norm().item())


@dataclass(frozen=True)
class SlopeEstimate:
    """Slope and projection at one step size, both as changes of the loss per step."""

    size: float
    slope: float
    """Measured from evaluations of the loss."""
    projection: float
    """Computed from the gradient, for the displacements as stored."""
    noise: float
    """Standard deviation of one evaluation of the loss."""
    truncation: float
    """Bound of the error by the loss's curvature."""
    gradient_error: float
    """Bound of the gradient's own rounding error."""
    scale: float
    """What differences are relative to: the projection or, where its terms cancel, their root sum square."""
    moves_loss: bool
    """False if all evaluations were bitwise equal."""
    num_values: int
    """Number of terms of the loss from which the noise was estimated."""
    is_average: bool = False
    """True if it is the average of several measurements with almost equal step sizes."""

    @property
    def slope_error_bound(self) -> float:
        return self.measurement_bound + self.gradient_error

    @property
    def measurement_bound(self) -> float:
        """Bound of the error of `slope`."""
        return self.noise_bound + self.truncation

    @property
    def noise_bound(self) -> float:
        # Like Student's t: few values may happen to be close to each other.
        return (1 + 4 / self.num_values) * _compute_noise_bound(self.noise)

    @property
    def slope_difference(self) -> float:
        return self.slope - self.projection

    @property
    def has_significant_difference(self) -> bool:
        return abs(self.slope_difference) > self.slope_error_bound

    @property
    def is_reportable(self) -> bool:
        """True if the difference is too large even for a loss that is not smooth."""
        return abs(self.slope_difference) > self.slope_error_bound + (_TRUNCATION_FACTOR - 1) * self.truncation


def _compute_noise_bound(noise: float) -> float:
    """Bound of a slope's error, from the standard deviation of one evaluation."""
    return _NOISE_FACTOR * _SLOPE_DEVIATION * noise


def divide_or_infinity(numerator: float, denominator: float) -> float:
    """The quotient; infinite, or NaN for 0 / 0, if the denominator is 0."""
    if denominator:
        return numerator / denominator
    return math.copysign(math.inf, numerator) if numerator else math.nan


@dataclass(frozen=True)
class SlopeComparison:
    """Result of comparing the loss's slope along a direction with the gradient's projection on it."""

    direction: str
    parameters: tuple[str, ...]
    """Names of the parameters that were moved."""
    result: CheckResult
    num_evaluations: int
    estimate: SlopeEstimate | None = None
    """The estimate with the narrowest bound; None if there was none, because the loss was not finite or the budget
    was used up."""

    @property
    def ratio(self) -> float:
        """Measured slope / projection of the gradient: 1 for a correct gradient, 2 for half of it."""
        return divide_or_infinity(self.estimate.slope, self.estimate.projection) if self.estimate else math.nan

    @property
    def bound(self) -> float:
        """Bound of the ratio's error; infinite if the gradient's projection is zero."""
        return (
            divide_or_infinity(self.estimate.slope_error_bound, abs(self.estimate.projection))
            if self.estimate
            else math.inf
        )

    def has_difference_beyond_bounds(self, num_bounds: float) -> bool:
        """True if slope and gradient differ by more than so many bounds."""
        return (
            self.estimate is not None
            and abs(self.estimate.slope_difference) > num_bounds * self.estimate.slope_error_bound
        )


def compare_gradient_with_slopes(
    evaluator: LossEvaluator, direction: Direction, *, size: float, dtype: torch.dtype, max_sizes: int = MAX_SIZES
) -> SlopeComparison:
    """Compare slope and gradient along a direction at several step sizes, starting with `size`.

    `dtype` is the lowest precision that the weights are cast to in the forward pass.
    """
    tolerance = TOLERANCES[dtype]
    # For the number of evaluations of this comparison: the evaluator counts those of the whole check.
    began = evaluator.num_evaluations
    estimates: list[SlopeEstimate] = []
    next_size: float | None = size
    while next_size is not None and len(estimates) < max_sizes:
        try:
            # Four evaluations, at both sides of the original weights.
            estimate = measure_slope(evaluator, direction, next_size, dtype)
        except EvaluationBudgetError:
            break
        if not math.isfinite(estimate.slope):
            # Too far: the displaced weights do not give a finite loss.
            next_size = next_size / 16 if not estimates and next_size > size / 1e3 else None
            continue
        estimates.append(estimate)
        # Longer steps reduce noise by this factor at most.
        max_noise_bound = tolerance.max_bound * estimate.scale * _SIZE_FACTOR ** (max_sizes - 1)
        if (
            max_sizes < MAX_SIZES
            and estimate.noise_bound > max_noise_bound
            and not estimate.has_significant_difference
        ):
            break
        next_size = _choose_next_size(_share_largest_slope_noise(estimates), tolerance)
    names = tuple(direction.parameters)
    if not estimates:
        return SlopeComparison(direction.label, names, "cannot tell", evaluator.num_evaluations - began)
    shared = _share_largest_slope_noise(estimates)
    # Not for comparisons that may stay without a result.
    if max_sizes == MAX_SIZES and _is_inconclusive(shared, tolerance):
        shared = _average_best_estimate(evaluator, direction, shared, dtype)
    result = conclude_from_estimates(shared, tolerance)
    if result == "differs" and not _persists_at_small_step(evaluator, direction, shared, dtype):
        result = "cannot tell"
    num_evaluations = evaluator.num_evaluations - began
    return SlopeComparison(direction.label, names, result, num_evaluations, _find_best_estimate(shared))


def _persists_at_small_step(
    evaluator: LossEvaluator, direction: Direction, estimates: Sequence[SlopeEstimate], dtype: torch.dtype
) -> bool:
    """False if a difference disappears at the smallest step size at which noise would still show it."""
    best = _find_best_estimate(estimates)
    size = best.size * max(_CONFIRMED_NOISE * best.noise_bound / abs(best.slope_difference), _MIN_CONFIRMED_SIZE)
    # Such a size was tried.
    if size > 0.7 * min(e.size for e in estimates):
        return True
    try:
        estimate = measure_slope(evaluator, direction, size, dtype)
    except EvaluationBudgetError:
        return True
    return estimate.has_significant_difference and _has_same_difference(best, estimate)


def may_use_tf32(parameters: Iterable[torch.Tensor]) -> bool:
    """True if PyTorch may compute products of these parameters in TF32, which rounds them to 10 bits of mantissa."""
    is_allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return is_allowed and any(p.is_cuda for p in parameters)


def persists_at_smallest_step(
    evaluator: LossEvaluator, direction: Direction, comparison: SlopeComparison, dtype: torch.dtype
) -> bool:
    """True if a difference stays the same down to the smallest step size at which rounding does not hide it.

    Attention that divides by a sum of ReLUs near zero bends the loss within a thousandth of a usual step.
    `_persists_at_small_step` takes such bends for noise, and does not look that closely.
    """
    best = comparison.estimate
    if best is None:
        return False
    difference = abs(best.slope_difference) / best.size
    # Terms may be fp64 sums of what the model has computed in `dtype`.
    rounding = max(evaluator.base_noise, torch.finfo(dtype).eps * evaluator.base_terms.norm().item())
    try:
        # Where rounding hides the difference, the fourth difference is rounding alone.
        closest = measure_slope(evaluator, direction, _compute_noise_bound(rounding) / difference, dtype)
        smallest = _CONFIRMED_NOISE * replace(closest, noise=max(closest.noise, rounding)).noise_bound / difference
        size = best.size
        while size > 1.4 * smallest:
            size = max(size / _CONFIRMED_SIZE_FACTOR, smallest)
            estimate = measure_slope(evaluator, direction, size, dtype)
            if not (estimate.has_significant_difference and _has_same_difference(best, estimate)):
                return False
    except EvaluationBudgetError:
        return False
    return True


def measure_slope(evaluator: LossEvaluator, direction: Direction, size: float, dtype: torch.dtype) -> SlopeEstimate:
    """Measure the slope at one step size. Raises `EvaluationBudgetError` before the first evaluation."""
    evaluator.require_evaluation_budget(EVALUATIONS_PER_SIZE)
    # By position: (terms,), and the change that the gradient predicts.
    terms = {0: evaluator.base_terms}
    predicted = {}
    with displace_weights(direction, size, dtype) as displacement:
        for position in _POSITIONS:
            predicted[position] = displacement.move_weights_to_position(position)
            terms[position] = evaluator.evaluate_loss_terms()
        random_projection = displacement.compute_random_projection()
    # Central differences, in which even powers of the step size cancel.
    projections = [(predicted[k] - predicted[-k]) / (2 * k) for k in (1, 2)]
    slopes = [(terms[k] - terms[-k]).sum().item() / (2 * k) for k in (1, 2)]
    # The differences are extrapolated and not the slopes: steps of 1 and 2 are not exactly parallel after rounding.
    near, far = (slope - projection for slope, projection in zip(slopes, projections, strict=True))
    projection = _extrapolate(*projections)
    # Zero for a cubic polynomial, so that noise and higher derivatives are left.
    # Each sample's differences in fp64, before they are summed.
    fourth = terms[2] - 4 * terms[1] + 6 * terms[0] - 4 * terms[-1] + terms[-2]
    noise = _estimate_error_of_sum(fourth) / math.sqrt(_FOURTH_DIFFERENCE_VARIANCE)
    return SlopeEstimate(
        size=size,
        slope=projection + _extrapolate(near, far),
        projection=projection,
        noise=max(noise, evaluator.base_noise),
        # Three times the correction that the extrapolation makes: the remaining error is smaller.
        truncation=abs(far - near),
        gradient_error=_compute_gradient_error_bound(direction, dtype, projection, random_projection),
        scale=max(abs(projection), random_projection),
        moves_loss=any(not torch.equal(terms[k], terms[0]) for k in _POSITIONS),
        num_values=len(fourth),
    )


def _compute_gradient_error_bound(
    direction: Direction, dtype: torch.dtype, projection: float, random_projection: float
) -> float:
    """Bound of the rounding error in the projection of a correct gradient.

    A bias of the whole, plus four standard deviations of independent errors in the elements.
    """
    bias, spread, *_ = TOLERANCES[dtype]
    if dtype == torch.float32 and may_use_tf32(direction.parameters.values()):
        bias = spread = _TF32_GRADIENT_ERROR
    return bias * abs(projection) + 4 * spread * random_projection


def _extrapolate(near: float, far: float) -> float:
    """Richardson extrapolation of central differences at 1 and 2 steps."""
    return (4 * near - far) / 3


def _share_largest_slope_noise(estimates: Sequence[SlopeEstimate]) -> list[SlopeEstimate]:
    """Use for each estimate the largest noise at its own and smaller sizes, in order of size.

    Noise hardly depends on the step size, and each size finds it from few values. Larger sizes are left out, because
    there the fourth difference contains curvature.
    """
    ordered = sorted(estimates, key=lambda e: e.size)
    shared: list[SlopeEstimate] = []
    largest = 0.0
    for estimate in ordered:
        largest = max(largest, estimate.noise)
        shared.append(replace(estimate, noise=largest))
    return shared


def _choose_next_size(estimates: Sequence[SlopeEstimate], tolerance: SlopeTolerance) -> float | None:
    """The next step size to try, next to the best one. None if no other is needed, or both sides were tried."""
    if not any(e.moves_loss for e in estimates):
        return None if estimates[-1].projection == 0 else estimates[-1].size * _SIZE_FACTOR**2
    if not _is_inconclusive(estimates, tolerance):
        return None
    best = _find_best_estimate(estimates)
    sides = [best.size * _SIZE_FACTOR, best.size / _SIZE_FACTOR]
    # Noise needs larger steps and curvature smaller ones. A bound as large as the slope says that the loss is far from
    # linear; then the fourth difference is curvature too.
    if best.noise_bound < 2 * best.truncation or best.measurement_bound > 0.5 * best.scale > 0:
        sides.reverse()
    # With both sides tried, the best size is a minimum of the bound.
    untried = [s for s in sides if not any(0.7 < s / e.size < 1.4 for e in estimates)]
    return next(iter(untried), None)


def _is_inconclusive(estimates: Sequence[SlopeEstimate], tolerance: SlopeTolerance) -> bool:
    """True if the estimates give no result yet, or a result with a wide bound."""
    best = _find_best_estimate(estimates)
    is_narrow = divide_or_infinity(best.measurement_bound, best.scale) <= tolerance.target_bound
    is_settled = conclude_from_estimates(estimates, tolerance) == "differs" or (
        is_narrow and not best.has_significant_difference
    )
    return best.moves_loss and not is_settled


def _average_best_estimate(
    evaluator: LossEvaluator, direction: Direction, estimates: Sequence[SlopeEstimate], dtype: torch.dtype
) -> list[SlopeEstimate]:
    """Repeat the best measurement with slightly different step sizes, and replace it with the average.

    Other step sizes round otherwise, so their noise is independent.
    """
    best = _find_best_estimate(estimates)
    measured = [best]
    with suppress(EvaluationBudgetError):
        measured.extend(measure_slope(evaluator, direction, best.size * factor, dtype) for factor in _REPEATS)
    # Per length, in units of the best one's step.
    lengths = [e.size / best.size for e in measured]

    def average_per_value(values: Iterable[float]) -> float:
        return sum(value / length for value, length in zip(values, lengths, strict=True)) / len(measured)

    mean_square_noise = average_per_value(e.noise**2 / length for e, length in zip(measured, lengths, strict=True))
    average_estimate = replace(
        best,
        slope=average_per_value(e.slope for e in measured),
        projection=average_per_value(e.projection for e in measured),
        noise=math.sqrt(mean_square_noise / len(measured)),
        truncation=average_per_value(e.truncation for e in measured),
        gradient_error=average_per_value(e.gradient_error for e in measured),
        scale=average_per_value(e.scale for e in measured),
        num_values=sum(e.num_values for e in measured),
        is_average=True,
    )
    return [*(e for e in estimates if e is not best), average_estimate]


def _find_best_estimate(estimates: Sequence[SlopeEstimate]) -> SlopeEstimate:
    return min(estimates, key=lambda e: e.slope_error_bound / e.size)


def conclude_from_estimates(estimates: Sequence[SlopeEstimate], tolerance: SlopeTolerance) -> CheckResult:
    """The result that estimates at several step sizes support."""
    if not any(e.moves_loss for e in estimates):
        # The loss does not depend on the weights, bit for bit, and the gradient says the same.
        return "agrees" if all(e.projection == 0 for e in estimates) else "cannot tell"
    best = _find_best_estimate(estimates)
    if not best.has_significant_difference:
        return (
            "agrees"
            if divide_or_infinity(best.slope_error_bound, best.scale) <= tolerance.max_bound
            else "cannot tell"
        )
    if not best.is_reportable:
        return "cannot tell"
    # A smaller size: a loss that is not smooth, as with ReLU, deviates by less there, and a wrong gradient does not.
    # An average of four differs less often by chance: a second size need not exclude equality.
    confirming = [e for e in estimates if e.size < best.size and (e.has_significant_difference or best.is_average)]
    return "differs" if any(_has_same_difference(best, estimate) for estimate in confirming) else "cannot tell"


def _has_same_difference(estimate: SlopeEstimate, second_estimate: SlopeEstimate) -> bool:
    """True if a second step size shows the same difference.

    In low precision, small changes of a layer's output are rounded away when they are added to it. Then the measured
    slope is too small without any noise, but it depends on the step size.
    """
    # Per length: steps of different sizes change the loss by different amounts.
    difference = estimate.slope_difference / estimate.size
    second_difference = second_estimate.slope_difference / second_estimate.size
    # A difference that is caused by rounding shrinks by more than this from one size to the next.
    return abs(difference - second_difference) <= 0.5 * min(abs(difference), abs(second_difference))
