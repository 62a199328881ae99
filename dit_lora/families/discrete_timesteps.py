"""Integer timesteps of the families whose noise schedule is a table: CogVideoX, DiT, video DiT, Latte."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.numerics.noise_levels import NoiseLevelDistribution
from dit_lora.numerics.streams import draw_integers, draw_normal_noise


@dataclass(frozen=True)
class DiscreteTimesteps:
    """The timesteps that training draws, by default all of them equally often.

    `train.timesteps` draws a level from 0 to 1 as in flow matching; the timestep is the level's share of the schedule,
    rounded down. Losses keep their weights.
    """

    distribution: NoiseLevelDistribution | None = None
    """Distribution of timestep / num_train_timesteps, before its shift; None for all timesteps equally often."""
    shift: float = 1.0
    """Shift of `distribution` towards noise."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, name: str) -> Self:
        """The timesteps that a recipe asks for; `name` is the checkpoint's, for messages.

        Raises `DitLoraError` for options that its schedule or density does not have, or if no level is left.
        """
        config = recipe.train.timesteps
        if config is None:
            return cls()
        if config.shift == "tokens":
            raise DitLoraError(
                f"train.timesteps: shift=tokens: the schedule of {name} does not depend on the size; give a number"
            )
        options = {key: value for key, value in config.model_dump(exclude={"shift"}).items() if value is not None}
        ignored = [key for key in ("mean", "std") if key in options and config.density is None]
        if ignored:
            raise DitLoraError(
                f"train.timesteps: {', '.join(ignored)}: {name} draws its timesteps uniformly by default; add "
                "density: logit_normal"
            )
        distribution = NoiseLevelDistribution(**{"density": "uniform", **options})
        shift = 1.0 if config.shift is None else config.shift
        # Raises if the range is too narrow to sample from.
        distribution.compute_levels(torch.zeros(1), shift)
        return cls(distribution, shift)

    def get_timestep_range(self, num_train_timesteps: int) -> range:
        """The timesteps that training can draw from a schedule of this length."""
        if self.distribution is None:
            return range(num_train_timesteps)
        # Rounded outwards, as the timesteps of levels at the ends are.
        start = math.floor(self.distribution.t_min * num_train_timesteps)
        return range(start, math.ceil(self.distribution.t_max * num_train_timesteps))

    def make_timestep_sampler(self, num_train_timesteps: int) -> Callable[[Sequence[torch.Generator]], torch.Tensor]:
        """Function that draws a timestep for each sample's generator, int64 (B,)."""
        distribution, shift, timesteps = self.distribution, self.shift, self.get_timestep_range(num_train_timesteps)
        if distribution is None:
            return partial(draw_integers, timesteps.start, timesteps.stop)

        def sample_scheduled_timesteps(rows: Sequence[torch.Generator]) -> torch.Tensor:
            # In fp64, so that no level is rounded up to the next timestep.
            scaled = distribution.compute_levels(draw_normal_noise((), rows), shift).double() * num_train_timesteps
            return scaled.long().clamp(timesteps.start, timesteps.stop - 1)

        return sample_scheduled_timesteps
