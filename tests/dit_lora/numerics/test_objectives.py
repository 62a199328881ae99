"""v-prediction in fp32: exact where bf16 forms are not."""

import math

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from dit_lora.numerics.objectives import EpsilonPrediction, VPrediction, compute_mean_squared_error


@pytest.fixture(params=[1.0, 3.0], ids=["5B", "2B"])
def scheduler(request: pytest.FixtureRequest) -> CogVideoXDPMScheduler:
    return CogVideoXDPMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=request.param,
    )


def test_target_and_noising_equal_fp64_within_1e_6(scheduler: CogVideoXDPMScheduler) -> None:
    """At every timestep, with different rows (N9)."""
    objective = VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod)
    generator = torch.Generator().manual_seed(0)
    timesteps = torch.arange(1000)
    clean, noise = (torch.randn(1000, 3, 5, generator=generator) for _ in range(2))
    a = scheduler.alphas_cumprod.double().view(-1, 1, 1)
    noisy = a.sqrt() * clean.double() + (1 - a).sqrt() * noise.double()
    target = a.sqrt() * noise.double() - (1 - a).sqrt() * clean.double()
    scale = clean.double().abs().max()
    assert (objective.add_noise(clean, noise, timesteps) - noisy).abs().max() / scale < 1e-6
    assert (objective.compute_target(clean, noise, timesteps) - target).abs().max() / scale < 1e-6


def test_all_1000_noise_levels_are_distinct(scheduler: CogVideoXDPMScheduler) -> None:
    """In bf16 they would collapse to a few hundred."""
    objective = VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod)
    assert len(objective.sigma.unique()) == 1000
    assert len(objective.sigma.bfloat16().unique()) < 600


@pytest.mark.parametrize("timestep", [0, 1, 999])
def test_the_loss_equals_the_weighted_x0_form_and_is_finite_at_the_ends(
    scheduler: CogVideoXDPMScheduler, timestep: int
) -> None:
    """CogVideo's trainer weights the x0 error by 1 / (1 - a): the same number, computed in fp64 (N10)."""
    objective = VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod)
    generator = torch.Generator().manual_seed(1)
    clean, noise, predicted = (torch.randn(2, 4, 6, generator=generator) for _ in range(3))
    t = torch.full((2,), timestep)
    losses = compute_mean_squared_error(predicted, objective.compute_target(clean, noise, t))

    a = scheduler.alphas_cumprod[timestep].double()
    noisy = a.sqrt() * clean.double() + (1 - a).sqrt() * noise.double()
    x0 = a.sqrt() * noisy - (1 - a).sqrt() * predicted.double()
    weighted = ((x0 - clean.double()).square() / (1 - a)).flatten(1).mean(1)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), weighted, rtol=1e-5, atol=0)


def test_losses_are_per_sample() -> None:
    prediction = torch.tensor([[1.0, 3.0], [0.0, 0.0]], dtype=torch.bfloat16)
    target = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    assert compute_mean_squared_error(prediction, target).tolist() == [5.0, 4.0]


BETAS = torch.linspace(1e-4, 0.02, 1000)


def wide_bound(
    clean: torch.Tensor, noise: torch.Tensor, guess: torch.Tensor, fraction: torch.Tensor, t: int
) -> torch.Tensor:
    """One sample's bound in bits, fp64, from the definitions (arXiv 2102.09672, equations 3 to 8, 15)."""
    beta = BETAS.double()
    total = (1 - beta).cumprod(0)
    a, b, before = total[t], beta[t], total[t - 1] if t else torch.tensor(1.0).double()
    noisy = a.sqrt() * clean.double() + (1 - a).sqrt() * noise.double()

    def posterior_mean(x0: torch.Tensor) -> torch.Tensor:
        return (before.sqrt() * b * x0 + (1 - b).sqrt() * (1 - before) * noisy) / (1 - a)

    mean = posterior_mean((noisy - (1 - a).sqrt() * guess.double()) / a.sqrt())
    timestep = max(t, 1)
    smallest = beta[timestep] * (1 - total[timestep - 1]) / (1 - total[timestep])
    v = (fraction.double() + 1) / 2
    variance = torch.exp(v * b.log() + (1 - v) * smallest.log())
    if t > 0:
        q = torch.distributions.Normal(posterior_mean(clean.double()), smallest.sqrt())
        p = torch.distributions.Normal(mean, variance.sqrt())
        return torch.distributions.kl_divergence(q, p).mean() / math.log(2)
    normal = torch.distributions.Normal(mean, variance.sqrt())
    upper = normal.cdf(clean.double() + 1 / 255)
    lower = normal.cdf(clean.double() - 1 / 255)
    bin_probability = torch.where(clean > 0.999, 1 - lower, torch.where(clean < -0.999, upper, upper - lower))
    return -bin_probability.clamp(min=1e-12).log().mean() / math.log(2)


@pytest.mark.parametrize("timesteps", [(0, 0), (1, 0), (0, 999), (500, 37)])
def test_the_variational_bound_equals_an_fp64_computation(timesteps: tuple[int, int]) -> None:
    """A divergence, and at t = 0 a likelihood, also of values beyond the outermost bins."""
    objective = EpsilonPrediction.from_betas(BETAS)
    g = torch.Generator().manual_seed(4)
    clean, noise, prediction, fraction = (torch.randn(2, 3, 5, generator=g) for _ in range(4))
    prediction = noise + 0.3 * prediction
    t = torch.tensor(timesteps)
    noisy = objective.add_noise(clean, noise, t)
    bound = objective.compute_variational_bound(prediction, fraction, clean, noisy, t)
    rows = zip(clean, noise, prediction, fraction, timesteps, strict=True)
    expected = torch.stack([wide_bound(*row) for row in rows])
    assert bound.dtype is torch.float32
    assert (clean.abs() > 0.999).any()
    torch.testing.assert_close(bound.double(), expected, rtol=2e-3, atol=0)


def test_epsilon_noising_equals_fp64_at_every_timestep() -> None:
    objective = EpsilonPrediction.from_betas(BETAS)
    g = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1000, 3, 5, generator=g) for _ in range(2))
    a = (1 - BETAS.double()).cumprod(0).view(-1, 1, 1)
    noisy = a.sqrt() * clean.double() + (1 - a).sqrt() * noise.double()
    added = objective.add_noise(clean, noise, torch.arange(1000))
    assert (added - noisy).abs().max() < 1e-6 * noisy.abs().max()


def test_the_bound_trains_the_variance_and_not_the_mean() -> None:
    objective = EpsilonPrediction.from_betas(BETAS)
    g = torch.Generator().manual_seed(5)
    clean, noise, prediction, fraction = (torch.randn(3, 4, 2, generator=g) for _ in range(4))
    prediction.requires_grad_(True)
    fraction.requires_grad_(True)
    t = torch.tensor([0, 3, 900])
    noisy = objective.add_noise(clean, noise, t)
    objective.compute_variational_bound(prediction, fraction, clean, noisy, t).sum().backward()
    assert prediction.grad is None
    assert fraction.grad is not None
    assert all(row.any() for row in fraction.grad)


def test_the_bound_of_a_perfect_prediction_is_smallest_at_the_true_variance() -> None:
    """Of the noise itself, with the smallest variance, the divergence is zero."""
    objective = EpsilonPrediction.from_betas(BETAS)
    g = torch.Generator().manual_seed(6)
    clean, noise = (torch.randn(2, 4, 3, generator=g) for _ in range(2))
    t = torch.tensor([1, 10])  # later, both variances are the same number in fp32
    noisy = objective.add_noise(clean, noise, t)

    def bound(fraction: float) -> torch.Tensor:
        values = torch.full_like(clean, fraction)
        return objective.compute_variational_bound(noise, values, clean, noisy, t)

    assert bound(-1.0).abs().max() < 1e-3
    assert (bound(1.0) > bound(-1.0)).all()
