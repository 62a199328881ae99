"""v-prediction in fp32: exact where bf16 forms are not."""

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from dit_lora.objectives import VPrediction, mean_squared_error


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
    assert (objective.target(clean, noise, timesteps) - target).abs().max() / scale < 1e-6


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
    losses = mean_squared_error(predicted, objective.target(clean, noise, t))

    a = scheduler.alphas_cumprod[timestep].double()
    noisy = a.sqrt() * clean.double() + (1 - a).sqrt() * noise.double()
    x0 = a.sqrt() * noisy - (1 - a).sqrt() * predicted.double()
    weighted = ((x0 - clean.double()).square() / (1 - a)).flatten(1).mean(1)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), weighted, rtol=1e-5, atol=0)


def test_losses_are_per_sample() -> None:
    prediction = torch.tensor([[1.0, 3.0], [0.0, 0.0]], dtype=torch.bfloat16)
    target = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    assert mean_squared_error(prediction, target).tolist() == [5.0, 4.0]
