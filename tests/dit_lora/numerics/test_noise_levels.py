"""Noise levels: 50,000 draws of each density against a distribution function written down here, and cuts."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora.errors import DitLoraError
from dit_lora.numerics.noise_levels import Density, NoiseLevelDistribution

DRAWS = 50_000
KS_BOUND = 1.63 / math.sqrt(DRAWS)
"""Kolmogorov-Smirnov distance that 1 % of correct samples exceed."""
Share = Callable[[np.ndarray], np.ndarray]


def unshifted(level: np.ndarray, shift: float) -> np.ndarray:
    """Solve `s' = shift s / (1 + (shift - 1) s)` for s."""
    return level / (shift + level * (1 - shift))


def logit_normal(mean: float, std: float, shift: float) -> Share:
    """Integrate the density of arXiv 2403.03206, equation 19, after the shift."""

    t = (np.arange(1_000_000) + 0.5) / 1_000_000
    logit = np.log(t / (1 - t))
    density = np.exp(-((logit - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi) * t * (1 - t))
    cumulative = np.concatenate([[0], np.cumsum(density)]) / len(t)
    grid = np.linspace(0, 1, len(cumulative))
    return lambda levels: np.interp(unshifted(levels, shift), grid, cumulative)


def uniform(shift: float) -> Share:
    return lambda levels: unshifted(levels, shift)


def mode(scale: float, shift: float) -> Share:
    """Count the u of a fine grid whose level, equation 20, is below."""
    u = (np.arange(2_000_000) + 0.5) / 2_000_000
    level = np.sort(1 - u - scale * (np.cos(np.pi / 2 * u) ** 2 - 1 + u))
    return lambda levels: np.searchsorted(level, unshifted(levels, shift)) / len(u)


def stretched(mean: float, std: float, shift: float) -> Share:
    """Take quantiles of a normal distribution through LTX-2's steps, one after the other."""
    quantile = NormalDist().inv_cdf
    normal = np.array([quantile((index + 0.5) / 100_000) for index in range(100_000)])
    mu = mean + math.log(shift)
    low, high = (1 / (1 + math.exp(-(mu + std * z))) for z in (-2.5758, 3.0902))
    level = (1 / (1 + np.exp(-(mu + std * normal))) - low) / (high - low)
    level = np.sort(np.minimum(np.where(level < 1e-3, 2e-3 - level, level), 1))

    def share(levels: np.ndarray) -> np.ndarray:
        flat = np.clip((levels - 1e-3) / (1 - 1e-3), 0, 1)
        return 0.9 * np.searchsorted(level, levels) / len(level) + 0.1 * flat

    return share


CASES = {
    "logit_normal": (NoiseLevelDistribution(mean=-0.4, std=1.3), 2.5, logit_normal(-0.4, 1.3, 2.5)),
    "logit_normal, plain": (NoiseLevelDistribution(), 1.0, logit_normal(0, 1, 1.0)),
    "uniform": (NoiseLevelDistribution("uniform"), 3.0, uniform(3.0)),
    "uniform, towards clean": (NoiseLevelDistribution("uniform"), 0.6, uniform(0.6)),
    "mode": (NoiseLevelDistribution("mode"), 1.7, mode(1.29, 1.7)),
    "mode, to the ends": (NoiseLevelDistribution("mode", mode_scale=-0.8), 1.0, mode(-0.8, 1.0)),
    "stretched": (
        NoiseLevelDistribution("stretched_logit_normal", mean=0.2, std=0.9),
        math.exp(1.4),
        stretched(0.2, 0.9, math.exp(1.4)),
    ),
}
RANGES = [(0.0, 1.0), (0.875, 1.0), (0.0, 0.9), (0.31, 0.57)]


def drawn(levels: NoiseLevelDistribution, shift: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return levels.compute_levels(torch.randn(DRAWS, generator=generator), shift)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("t_min", "t_max"), RANGES)
def test_draws_are_of_the_density_cut_to_the_range(name: str, t_min: float, t_max: float) -> None:
    """Kolmogorov-Smirnov test of the draws; none outside the range; `cdf` gives the same distribution."""
    untruncated, shift, closed_form = CASES[name]
    levels = NoiseLevelDistribution(**{**vars(untruncated), "t_min": t_min, "t_max": t_max})
    draws = drawn(levels, shift)
    assert draws.dtype is torch.float32
    sorted_draws = np.sort(draws.double().numpy())
    assert sorted_draws[0] >= t_min
    assert sorted_draws[-1] < t_max
    low, high = closed_form(np.array([max(t_min, 1e-9), min(t_max, 1 - 1e-9)]))
    if t_max == 1.0:
        high = 1.0  # what is stretched beyond 1 counts as just below 1
    expected = (closed_form(sorted_draws) - low) / (high - low)
    rank = np.arange(DRAWS) / DRAWS
    # Levels stretched beyond 1 are equal, so a tie's distance is taken at its first draw.
    inner = sorted_draws < np.nextafter(np.float32(t_max), np.float32(0))
    assert np.abs(rank - expected)[inner].max() < KS_BOUND
    ends = np.linspace(t_min, t_max, 42)[1:-1]
    shares = levels.cdf(torch.tensor(ends), shift).numpy()
    np.testing.assert_allclose(shares, (closed_form(ends) - low) / (high - low), atol=1e-4)


def test_levels_rise_with_the_normal_number_and_its_halves_are_the_distributions() -> None:
    """One number draws one level for every range: a quantile of the density."""
    gaussian = torch.linspace(-4, 4, 81)
    for levels, shift, _ in CASES.values():
        truncated = NoiseLevelDistribution(**{**vars(levels), "t_min": 0.2, "t_max": 0.8})
        values = truncated.compute_levels(gaussian, shift)
        assert (values.diff() > 0).all()
        median = values[40].double()
        assert truncated.cdf(median[None], shift).item() == pytest.approx(0.5, abs=1e-5)


def test_the_end_of_a_range_is_never_reached_even_after_scaling_to_timesteps() -> None:
    """Wan 2.2 sends timesteps from 875 on to one expert: 0.875 times 1000 in fp32 must not be met from below."""
    extreme = torch.tensor([-30.0, -9.0, 9.0, 30.0])
    for bound in (0.875, 0.9, 1 / 3):
        upper_levels = NoiseLevelDistribution(t_max=bound).compute_levels(extreme, 3.0)
        lower_levels = NoiseLevelDistribution(t_min=bound).compute_levels(extreme, 3.0)
        assert max((upper_levels * 1000).tolist()) < bound * 1000
        assert min((lower_levels * 1000).tolist()) >= bound * 1000 - 1e-4
        assert (lower_levels.double() >= bound).all()
        assert (lower_levels < 1).all()


def test_a_range_without_draws_is_refused() -> None:
    levels = NoiseLevelDistribution(std=0.1, t_min=0.0, t_max=0.01)
    with pytest.raises(DitLoraError, match=r"has no draw from 0 on and below 0\.01"):
        levels.compute_levels(torch.zeros(1), 5.0)


class EveryValueIsFinite(TorchDispatchMode):
    """Raises at the first op that gives an Inf or a NaN, as the guard would name it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            assert torch.isfinite(output).all(), func
        return output


@pytest.mark.parametrize("density", get_args(Density))
@pytest.mark.parametrize(("t_min", "t_max"), [(0.875, 1.0), (0.0, 0.875), (0.0, 1.0)])
def test_nothing_on_the_way_to_a_draw_is_infinite(density: Density, t_min: float, t_max: float) -> None:
    levels = NoiseLevelDistribution(density, t_min=t_min, t_max=t_max)
    gaussian = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    with EveryValueIsFinite():
        levels.compute_levels(gaussian, 3.0)
