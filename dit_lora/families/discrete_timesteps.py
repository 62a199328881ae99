"""Base of the families whose noise schedule is a table of integer timesteps: CogVideoX, DiT, video DiT, Latte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.config.timesteps import TimestepsConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Denoiser
from dit_lora.numerics.noise_levels import NoiseLevelDistribution
from dit_lora.numerics.streams import DrawFunctions, draw_integers, normal


@dataclass(frozen=True, kw_only=True)
class DiscreteDenoiser(Denoiser):
    """Base class of denoisers that draw integer timesteps, by default all of them equally often.

    `train.timesteps` draws a level from 0 to 1 as in flow matching; the timestep is the level's share of the schedule,
    rounded down. Losses keep their weights.
    """

    level_distribution: NoiseLevelDistribution | None = None
    """Distribution of timestep / num_train_timesteps, before its shift; None for all timesteps equally often."""
    level_shift: float = 1.0
    """Shift of `level_distribution` towards noise."""

    @property
    def training_options(self) -> tuple[str, ...]:
        return ("train.timesteps", *super().training_options)

    def apply_training_options(self, recipe: Recipe) -> Self:
        denoiser = super().apply_training_options(recipe)
        if recipe.train.timesteps is None:
            return denoiser
        return denoiser._apply_timesteps_config(recipe.train.timesteps)

    def _apply_timesteps_config(self, config: TimestepsConfig) -> Self:
        """Copy of the denoiser that draws timesteps by the recipe's `train.timesteps`.

        Raises `DitLoraError` for options that its schedule or density does not have, or if no level is left.
        """
        if config.shift == "tokens":
            raise DitLoraError(
                f"train.timesteps: shift=tokens: the schedule of {self.info.path.name} does not depend on the size; "
                "give a number"
            )
        options = {name: value for name, value in config.model_dump(exclude={"shift"}).items() if value is not None}
        ignored = [name for name in ("mean", "std") if name in options and config.density is None]
        if ignored:
            raise DitLoraError(
                f"train.timesteps: {', '.join(ignored)}: {self.info.path.name} draws its timesteps uniformly by "
                "default; add density: logit_normal"
            )
        distribution = NoiseLevelDistribution(**{"density": "uniform", **options})
        shift = 1.0 if config.shift is None else config.shift
        # Raises if the range is too narrow to sample from.
        distribution.compute_levels(torch.zeros(1), shift)
        return replace(self, level_distribution=distribution, level_shift=shift)

    @property
    def timestep_range(self) -> range:
        levels, steps = self.level_distribution, self.num_train_timesteps
        if levels is None:
            return range(steps)
        # Rounded outwards, as the timesteps of levels at the ends are.
        return range(math.floor(levels.t_min * steps), math.ceil(levels.t_max * steps))

    def timestep_draw_function(self) -> DrawFunctions:
        """Function that draws the timesteps of a training step, int64 (B,), by the name of its stream."""
        levels, shift, timesteps = self.level_distribution, self.level_shift, self.timestep_range
        if levels is None:
            return {"timestep": partial(draw_integers, timesteps.start, timesteps.stop)}

        def draw(rows: Sequence[torch.Generator]) -> torch.Tensor:
            # In fp64, so that no level is rounded up to the next timestep.
            scaled = levels.compute_levels(normal((), rows), shift).double() * self.num_train_timesteps
            return scaled.long().clamp(timesteps.start, timesteps.stop - 1)

        return {"timestep": draw}
