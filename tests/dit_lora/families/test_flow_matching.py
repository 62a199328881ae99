"""Schedules of flow matching as recipes choose them, on tiny Sana; weights for tokens that are given clean."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.config.timesteps import TimestepsConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.sana.checkpoint import SanaDenoiser
from dit_lora.numerics.noise_levels import NoiseLevelDistribution
from dit_lora.numerics.objectives import compute_mean_squared_error
from dit_lora.numerics.streams import RandomStreams


def recipe_with(path: Path, **timesteps: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"family": "sana", "path": str(path)},
            "data": {"path": "unread", "height": 64, "width": 64},
            "train": {"steps": 1, "timesteps": timesteps or None},
            "run": {"dir": "unwritten"},
        }
    )


@pytest.fixture
def tiny(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["sana-600m"]


@pytest.fixture
def stored(tiny: Path) -> Checkpoint:
    return get_family("sana").open(ModelConfig(family="sana", path=str(tiny)))


def levels_of(checkpoint: Checkpoint, rows: int = 2000) -> torch.Tensor:
    batch = {"latent_mean": torch.zeros(rows, 32, 2, 2)}
    return RandomStreams(0, range(rows)).draw_random_tensors(
        checkpoint.denoiser.get_random_input_samplers(batch), torch.device("cpu")
    )["timestep"]


def test_a_recipe_without_a_schedule_trains_by_the_familys(tiny: Path, stored: Checkpoint) -> None:
    assert stored.apply_recipe(recipe_with(tiny)).denoiser.objective == stored.denoiser.objective


def test_density_shift_and_range_are_the_recipes(tiny: Path, stored: Checkpoint) -> None:
    schedule = {"density": "uniform", "shift": 2.0, "t_min": 0.25, "t_max": 0.75}
    checkpoint = stored.apply_recipe(recipe_with(tiny, **schedule))
    assert checkpoint.denoiser.objective.shift == 2.0
    assert checkpoint.denoiser.objective.distribution == NoiseLevelDistribution("uniform", t_min=0.25, t_max=0.75)
    assert checkpoint.denoiser.timestep_range == range(250, 750)
    levels = levels_of(checkpoint)
    assert levels.min() >= 0.25
    assert levels.max() < 0.75
    # Uniform before the shift: the median is where 2u / (1 + u) is, u being the middle of 1/7 and 3/5.
    middle = (1 / 7 + 3 / 5) / 2
    assert levels.median().item() == pytest.approx(2 * middle / (1 + middle), abs=0.02)


def test_what_a_recipe_leaves_out_stays(tiny: Path, stored: Checkpoint) -> None:
    checkpoint = stored.apply_recipe(recipe_with(tiny, std=0.5))
    assert checkpoint.denoiser.objective.shift == stored.denoiser.objective.shift
    assert checkpoint.denoiser.objective.distribution == NoiseLevelDistribution("logit_normal", std=0.5)
    spread = torch.logit(levels_of(checkpoint)).std().item()
    assert spread == pytest.approx(0.5, rel=0.05)


@dataclass(frozen=True, kw_only=True)
class Expert(SanaDenoiser):
    """Sana as if it were for high noise alone, and shifted by the size of its latents."""

    def compute_shift_mu(self, size: torch.Size) -> float:
        return 0.1 * size[-1]


@pytest.fixture
def expert(stored: Checkpoint) -> Checkpoint:
    high = replace(stored.denoiser.objective, distribution=NoiseLevelDistribution(t_min=0.875))
    return replace(stored, denoiser=Expert(info=stored.info, objective=high))


def test_a_shift_by_tokens_is_the_pipelines_mu_of_the_latents_size(tiny: Path, expert: Checkpoint) -> None:
    checkpoint = expert.apply_recipe(recipe_with(tiny, shift="tokens"))
    assert checkpoint.denoiser.compute_shift(torch.Size((32, 4, 10))) == pytest.approx(math.e)
    objective = replace(checkpoint.denoiser.objective, distribution=NoiseLevelDistribution())
    plain = replace(checkpoint, denoiser=replace(checkpoint.denoiser, objective=objective))
    median = levels_of(plain).median().item()
    assert torch.logit(torch.tensor(median)).item() == pytest.approx(0.2, abs=0.08)


def test_a_parts_own_range_holds_unless_a_recipe_narrows_it(tiny: Path, expert: Checkpoint) -> None:
    assert expert.apply_recipe(recipe_with(tiny, density="uniform")).denoiser.objective.distribution.t_min == 0.875
    narrow_range = expert.apply_recipe(recipe_with(tiny, t_min=0.9, t_max=0.95))
    levels = levels_of(narrow_range)
    assert levels.min() >= 0.9
    assert levels.max() < 0.95
    for options in ({"t_min": 0.5}, {"t_max": 0.5}, {"t_min": 0.1, "t_max": 0.4}):
        with pytest.raises(DitLoraError, match=r"not within the noise levels that transformer"):
            expert.apply_recipe(recipe_with(tiny, **options))


def test_schedules_that_mean_nothing_are_refused(tiny: Path, stored: Checkpoint) -> None:
    with pytest.raises(ValidationError, match=r"t_min=0\.5 must be below t_max=0\.5"):
        TimestepsConfig(t_min=0.5, t_max=0.5)
    with pytest.raises(ValidationError, match="mode_scale is of density mode; got uniform"):
        TimestepsConfig(density="uniform", mode_scale=1.0)
    with pytest.raises(ValidationError, match="std is of density logit_normal or"):
        TimestepsConfig(density="mode", std=1.0)
    with pytest.raises(DitLoraError, match="does not shift by size; give a number"):
        stored.apply_recipe(recipe_with(tiny, shift="tokens"))
    with pytest.raises(DitLoraError, match=r"has no draw from 0 on and below 0\.001"):
        stored.apply_recipe(recipe_with(tiny, std=0.1, t_max=0.001))


@dataclass(frozen=True, kw_only=True)
class Inpainting(Conditioning):
    """The left column of the latents is given clean."""

    def compute_conditioning_mask(self, batch: Any, random_tensors: Any) -> torch.Tensor:
        rows = batch["latent_mean"]
        conditioning_mask = torch.zeros(len(rows), 1, *rows.shape[2:])
        conditioning_mask[..., 0] = 1
        return conditioning_mask


class Echo(nn.Module):
    """Answers with what it was given, and keeps it."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        self.seen = hidden
        return (hidden,)


def test_given_latents_stay_clean_and_no_loss_is_taken_there(stored: Checkpoint) -> None:
    denoiser = replace(stored.denoiser, conditioning=Inpainting())
    generator = torch.Generator().manual_seed(3)
    batch = {
        "latent_mean": torch.randn(3, 32, 2, 5, generator=generator),
        "prompt_embeds": torch.randn(3, 4, 8, generator=generator),
        "prompt_attention_mask": torch.ones(3, 4, dtype=torch.int64),
    }
    model, streams = Echo(), RandomStreams(0, [1, 2, 3])
    output = denoiser.losses(model, batch, streams)
    random_inputs = streams.draw_random_tensors(denoiser.get_random_input_samplers(batch), torch.device("cpu"))
    clean = denoiser.clean_latents(batch, random_inputs)
    assert torch.equal(model.seen[..., 0], clean[..., 0])
    level = random_inputs["timestep"].double().view(-1, 1, 1, 1)
    noisy = (1 - level) * clean.double() + level * random_inputs["noise"].double()
    assert not torch.allclose(model.seen.double()[..., 1:], clean.double()[..., 1:])
    torch.testing.assert_close(model.seen.double()[..., 1:], noisy[..., 1:])
    errors = (noisy - (random_inputs["noise"].double() - clean.double())).square()[..., 1:]
    torch.testing.assert_close(output.losses.double(), errors.flatten(1).mean(1), rtol=1e-6, atol=0)


def test_weighted_errors_are_divided_by_the_sum_of_their_weights() -> None:
    """Values and gradients against fp64, with weights that differ by sample and are broadcast over channels."""
    generator = torch.Generator().manual_seed(4)
    prediction = torch.randn(3, 5, 7, generator=generator).transpose(1, 2).requires_grad_()
    target = torch.randn(3, 7, 5, generator=generator)
    weights = torch.rand(3, 1, 5, generator=generator)
    losses = compute_mean_squared_error(prediction, target, weights)
    double_prediction = prediction.detach().double().requires_grad_()
    full = weights.double().expand_as(double_prediction)
    exact = ((double_prediction - target.double()).square() * full).sum((1, 2)) / full.sum((1, 2))
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=0)
    spread = torch.tensor([1.0, -2.0, 0.5])
    (gradient,) = torch.autograd.grad(losses @ spread, prediction)
    (expected,) = torch.autograd.grad(exact @ spread.double(), double_prediction)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-8)
