"""`train.timesteps` in families with a table of timesteps: which are drawn, and that losses keep their weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.numerics.streams import RandomStreams, make_generator

DRAWS = 20_000
FAMILIES = {"cogvideox": "cogvideox-2b", "latte": "latte"}
"""A tiny variant of each of the two losses: velocity and noise."""


class Answer(nn.Module):
    """Predicts the same everywhere."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        return (torch.full_like(hidden_states, 0.25),)


def open_with(tiny_checkpoints: dict[str, Path], family: str, timesteps: dict[str, Any] | None) -> Checkpoint:
    path = str(tiny_checkpoints[FAMILIES[family]])
    model, frames = {"family": family, "path": path}, 9 if family == "cogvideox" else 4
    recipe = Recipe.model_validate(
        {
            "model": model,
            "data": {"path": "unread", "frames": frames, "height": 32, "width": 32, "fps": 8},
            "train": {"steps": 1, "timesteps": timesteps},
            "run": {"dir": "unwritten"},
        }
    )
    return get_family(family).open(ModelConfig.model_validate(model)).apply_recipe(recipe)


def draw_timesteps(checkpoint: Checkpoint, rows: int = DRAWS) -> torch.Tensor:
    draw = checkpoint.denoiser.get_random_input_samplers({"latent_mean": torch.zeros(rows, 4, 1, 1, 1)})["timestep"]
    return draw(RandomStreams(3, range(rows))("timestep"))


def logit_normal_shares(mean: float, std: float, shift: float, low: float, high: float) -> np.ndarray:
    """Share of each of 1,000 timesteps, integrated over the shifted density, apart from the code under test."""
    level = (np.arange(2_000_000) + 0.5) / 2_000_000
    logit = np.log(level / (1 - level)) - np.log(shift)
    density = np.exp(-((logit - mean) ** 2) / (2 * std**2)) / (level * (1 - level))
    density[(level < low) | (level >= high)] = 0
    shares = density.reshape(1000, -1).sum(1)
    return shares / shares.sum()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"density": "logit_normal"}, (0, 1, 1, 0, 1)),
        (
            {"density": "logit_normal", "mean": -1, "std": 0.7, "shift": 2, "t_min": 0.1, "t_max": 0.6},
            (-1, 0.7, 2, 0.1, 0.6),
        ),
    ],
)
def test_the_drawn_timesteps_have_the_recipes_density(
    tiny_checkpoints: dict[str, Path], family: str, options: dict[str, Any], shares: tuple[float, ...]
) -> None:
    checkpoint = open_with(tiny_checkpoints, family, options)
    timesteps = draw_timesteps(checkpoint)
    assert timesteps.dtype is torch.int64
    expected = logit_normal_shares(*shares).cumsum()
    drawn = np.bincount(timesteps.numpy(), minlength=1000).cumsum() / DRAWS
    # A Kolmogorov-Smirnov distance that 1 % of correct samples exceed.
    assert np.abs(drawn - expected).max() < 1.63 / DRAWS**0.5
    low, high = shares[3:]
    assert checkpoint.denoiser.timestep_range == range(round(1000 * low), round(1000 * high))
    assert timesteps.min() >= 1000 * low
    assert timesteps.max() < 1000 * high


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_option_timesteps_are_the_plain_integers_of_the_stream(
    tiny_checkpoints: dict[str, Path], family: str
) -> None:
    drawn = draw_timesteps(open_with(tiny_checkpoints, family, None), 50)
    expected = [torch.randint(0, 1000, (1,), generator=make_generator(3, "timestep", row)) for row in range(50)]
    assert torch.equal(drawn, torch.cat(expected))


def test_a_range_alone_is_uniform_in_it(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = open_with(tiny_checkpoints, "cogvideox", {"t_min": 0.3, "t_max": 0.301})
    assert set(draw_timesteps(checkpoint, 100).tolist()) == {300}
    tenth = draw_timesteps(open_with(tiny_checkpoints, "cogvideox", {"t_min": 0.99}), 4000)
    counts = np.bincount(tenth.numpy() - 990, minlength=10)
    # 400 each, with a standard deviation of 19.
    assert abs(counts - 400).max() < 80


def test_losses_keep_their_weights(tiny_checkpoints: dict[str, Path]) -> None:
    """The loss of a drawn timestep is Diffusers' plain mean squared error there, for every density."""
    checkpoint = open_with(tiny_checkpoints, "cogvideox", {"density": "logit_normal", "mean": 1.5})
    path, generator, rows = tiny_checkpoints["cogvideox-2b"], torch.Generator().manual_seed(0), range(6)
    mean = torch.randn(6, 4, 3, 4, 6, generator=generator)
    batch = {
        "latent_mean": mean,
        "latent_logvar": torch.full_like(mean, -30.0),
        "prompt_embeds": torch.zeros(6, 226, 32),
    }
    output = checkpoint.denoiser.losses(Answer(), batch, RandomStreams(5, rows))
    scheduler = CogVideoXDPMScheduler.from_pretrained(path, subfolder="scheduler")
    clean = (mean * checkpoint.info.vae_config["scaling_factor"]).transpose(1, 2).double()
    noise = [torch.randn(4, 3, 4, 6, generator=make_generator(5, "noise", row)) for row in rows]
    target = scheduler.get_velocity(clean, torch.stack(noise).transpose(1, 2).double(), output.timesteps)
    expected = (0.25 - target).square().flatten(1).mean(1)
    torch.testing.assert_close(output.losses.double(), expected, rtol=1e-4, atol=0)
    # Above the middle, as the mean says.
    assert output.timesteps.double().mean() > 600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": "tokens"}, "does not depend on the size; give a number"),
        ({"std": 0.5}, "std: .* draws its timesteps uniformly by default; add density: logit_normal"),
        ({"density": "logit_normal", "std": 0.1, "t_max": 0.001}, r"has no draw from 0 on and below 0\.001"),
    ],
)
def test_options_without_effect_are_refused(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DitLoraError, match=message):
        open_with(tiny_checkpoints, "cogvideox", options)
