"""Distributions of flow-matching noise levels: a density that is shifted and then truncated to a range.

Every density has a closed-form distribution function. Truncation maps draws through its quantiles, so the density
keeps its shape, no draw is rejected and none is outside the range. Computed in fp64 on the CPU, rounded once to fp32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from dit_lora.errors import DitLoraError

Density = Literal["uniform", "logit_normal", "stretched_logit_normal", "mode"]

# Of LTX-2's trainer (Lightricks/LTX-2, ltx-trainer, timestep_samplers.py).
_LOW, _HIGH = -2.5758, 3.0902
"""Quantiles of the standard normal distribution at 0.5 % and 99.9 %, as rounded there."""
_MIRROR_LEVEL = 1e-3
_UNIFORM_SHARE = 0.1
_MIN_DISTANCE_TO_ONE = 2.0**-53
"""Smallest distance from 1 at which an fp64 number still has a finite logit."""
_NUM_BISECTIONS = 60
"""Bisections of [0, 1]: more than fp64 has digits there."""


@dataclass(frozen=True)
class NoiseLevelDistribution:
    """A distribution of noise levels from 0 (clean) to 1 (noise), without its shift.

    `logit_normal` and `mode` are those of arXiv 2403.03206, section 3.1. `stretched_logit_normal` draws nine in ten
    levels from a shifted logit-normal, stretched linearly so that its percentiles 0.5 and 99.9 become 0 and 1, with
    levels below 0.001 mirrored at 0.001; the tenth is uniform.
    """

    density: Density = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    mode_scale: float = 1.29
    t_min: float = 0.0
    t_max: float = 1.0

    def compute_levels(self, gaussian: torch.Tensor, shift: float) -> torch.Tensor:
        """Noise levels, fp32 in [t_min, t_max), one for each standard normal number and increasing with it.

        `shift` moves them towards noise before truncation: `s' = shift s / (1 + (shift - 1) s)`. Raises `DitLoraError`
        if the density has almost no mass in the range.
        """
        # Without truncation, a logit-normal level is a function of the draw itself.
        if self.density == "logit_normal" and (self.t_min, self.t_max) == (0.0, 1.0):
            level = torch.sigmoid(gaussian.float() * self.std + self.mean)
            return shift * level / (1 + (shift - 1) * level)
        # Probabilities at t_min and t_max before truncation.
        low, high = self._compute_cdf_bounds(shift)
        # Inverse transform sampling: a uniform number between the two probabilities, then its quantile.
        probability = low + torch.special.ndtr(gaussian.double()) * (high - low)
        level = self._untruncated_icdf(probability, shift).float()
        # Rounding may reach the end of the half-open range, or just leave its beginning.
        return level.clamp(_round_up_to_fp32(self.t_min), _get_largest_fp32_below(self.t_max))

    def cdf(self, level: torch.Tensor, shift: float) -> torch.Tensor:
        """Cumulative distribution of noise levels: the fraction of draws below each given level, fp64.

        It is 0 up to t_min and 1 from t_max on.
        """
        low, high = self._compute_cdf_bounds(shift)
        return ((self._untruncated_cdf(level.double(), shift) - low) / (high - low)).clamp(0, 1)

    def _compute_cdf_bounds(self, shift: float) -> tuple[float, float]:
        # Not evaluated at 0 and 1: their logits are infinite, and a search for a step's first Inf would find them.
        # Pairs below are for the lower and the upper end.
        is_cut = self.t_min > 0, self.t_max < 1
        ends = [end if cut else 0.5 for end, cut in zip((self.t_min, self.t_max), is_cut, strict=True)]
        shares = self._untruncated_cdf(torch.tensor(ends, dtype=torch.float64), shift).tolist()
        # An end that is not cut has probability 0 or 1.
        low, high = (shares[i] if cut else float(i) for i, cut in enumerate(is_cut))
        # Written with `not`, so that NaN is refused too.
        if not high - low > 1e-9:
            raise DitLoraError(
                f"train.timesteps: {self.density} with shift {shift:g} has no draw from {self.t_min:g} on and below "
                f"{self.t_max:g}; widen t_min and t_max, or change density or shift"
            )
        return low, high

    def _untruncated_cdf(self, level: torch.Tensor, shift: float) -> torch.Tensor:
        """Cumulative distribution of noise levels before truncation: the fraction of draws below each given level."""
        # Adding log(shift) to a logit is the shift: this density applies it before the stretch.
        if self.density == "stretched_logit_normal":
            return self._stretched_cdf(level, math.log(shift))
        unshifted = level / (shift - (shift - 1) * level)  # inverts the shift
        if self.density == "uniform":
            return unshifted
        if self.density == "mode":
            return _invert_by_bisection(self._mode_icdf, unshifted)
        return torch.special.ndtr((torch.logit(unshifted) - self.mean) / self.std)

    def _untruncated_icdf(self, probability: torch.Tensor, shift: float) -> torch.Tensor:
        """Inverse of `_untruncated_cdf`: the noise levels below which these fractions of untruncated draws lie."""
        if self.density == "stretched_logit_normal":
            return _invert_by_bisection(lambda level: self._stretched_cdf(level, math.log(shift)), probability)
        if self.density == "uniform":
            unshifted = probability
        elif self.density == "mode":
            unshifted = self._mode_icdf(probability)
        else:
            unshifted = torch.sigmoid(torch.special.ndtri(probability) * self.std + self.mean)
        # The shift is increasing, so it maps quantiles to quantiles.
        return shift * unshifted / (1 + (shift - 1) * unshifted)

    def _mode_icdf(self, probability: torch.Tensor) -> torch.Tensor:
        """Noise levels of the `mode` density for these cumulative probabilities.

        Equation 20 of arXiv 2403.03206 with u = 1 - probability, so that the level increases with the probability.
        """
        return probability - self.mode_scale * (torch.sin(math.pi / 2 * probability).square() - probability)

    def _stretched_cdf(self, level: torch.Tensor, shift: float) -> torch.Tensor:
        """Fraction of the stretched density's draws below these levels; `shift` is added to the mean of the logits."""
        mean = self.mean + shift
        # Computed with 1 - level: near 1, where a large shift puts the levels, fp64 has no digits left for the level.
        clean_low, clean_high = (1 / (1 + math.exp(mean + z * self.std)) for z in (_LOW, _HIGH))

        def compute_unstretched_cdf(stretched: torch.Tensor) -> torch.Tensor:
            clean = clean_low + (clean_high - clean_low) * stretched
            clean = clean.clamp(torch.finfo(clean.dtype).tiny, 1 - _MIN_DISTANCE_TO_ONE)
            return torch.special.ndtr((-torch.logit(clean) - mean) / self.std)

        # Draws further below the mirror than this level is above it end up above the level: they do not count.
        mirrored = compute_unstretched_cdf(level) - compute_unstretched_cdf(2 * _MIRROR_LEVEL - level)
        # Levels that the stretch moves beyond 1 count as 1.
        normal = torch.where(level < _MIRROR_LEVEL, 0.0, torch.where(level < 1, mirrored, 1.0))
        # The uniform tenth starts at the mirror too.
        uniform = ((level - _MIRROR_LEVEL) / (1 - _MIRROR_LEVEL)).clamp(0, 1)
        return (1 - _UNIFORM_SHARE) * normal + _UNIFORM_SHARE * uniform


LOGIT_NORMAL = NoiseLevelDistribution()


def _invert_by_bisection(increasing: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    low, high = torch.zeros_like(target), torch.ones_like(target)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        # Elementwise: every element has its own interval.
        is_too_high = increasing(middle) > target
        low, high = torch.where(is_too_high, low, middle), torch.where(is_too_high, middle, high)
    return (low + high) / 2


def _round_up_to_fp32(bound: float) -> float:
    """Round a bound of the noise levels up to the nearest fp32 number."""
    # Rounded to the nearest fp32 number, which may be below the bound.
    nearest = torch.tensor(bound)
    up = torch.nextafter(nearest, torch.tensor(2.0))
    return nearest.item() if nearest.double().item() >= bound else up.item()


def _get_largest_fp32_below(bound: float) -> float:
    """The largest fp32 number below the bound rounded to fp32, so that scaling cannot round a level up to it."""
    return torch.nextafter(torch.tensor(bound), torch.tensor(-1.0)).item()
