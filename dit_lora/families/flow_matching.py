"""Base of the families that are trained by flow matching: noise levels, noising, target and loss, which they share.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.config.timesteps import TimestepsConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint
from dit_lora.families.loss_mask import loss_weights
from dit_lora.numerics.noise_levels import NoiseLevels
from dit_lora.numerics.objectives import FlowMatching, LossOutput, mean_squared_error
from dit_lora.numerics.streams import Draws, Streams, normal


@dataclass(frozen=True, kw_only=True)
class FlowCheckpoint(Checkpoint):
    """A checkpoint that predicts the velocity from clean latents to noise."""

    objective: FlowMatching
    takes: ClassVar[tuple[str, ...]] = ("train.timesteps",)

    def for_recipe(self, recipe: Recipe) -> Self:
        fitting = super().for_recipe(recipe)
        if recipe.train.timesteps is None:
            return fitting
        objective = fitting._scheduled(recipe.train.timesteps)
        return replace(fitting, objective=objective)

    def _scheduled(self, asked: TimestepsConfig) -> FlowMatching:
        """Return the objective with what a recipe says otherwise; raise where it leaves nothing to draw."""
        own, levels = self.objective, self.objective.levels
        given = {
            name: value
            for name, value in asked.model_dump(exclude={"shift"}).items()
            if value is not None
        }
        low, high = (
            max(given.get("t_min", 0), levels.t_min),
            min(given.get("t_max", 1), levels.t_max),
        )
        if low >= high or low > given.get("t_min", low) or high < given.get("t_max", high):
            raise DitLoraError(
                f"train.timesteps: t_min={given.get('t_min', low):g}, t_max={given.get('t_max', high):g} is not within "
                f"the noise levels that {self.part} of {self.path.name} is used at: from {levels.t_min:g} on and below "
                f"{levels.t_max:g}"
            )
        if given.get("density", levels.density) != levels.density:
            # What the family says of its own density means nothing to another.
            levels = NoiseLevels(t_min=levels.t_min, t_max=levels.t_max)
        if asked.shift == "tokens":
            self.mu(torch.Size([1, 64, 64]))  # raises where the pipeline has none
        shift = own.shift if asked.shift is None else asked.shift
        shift = None if shift == "tokens" else shift
        objective = replace(own, shift=shift, levels=replace(levels, **given))
        if shift is not None:
            objective.sigmas(torch.zeros(1))  # raises where the range has no draw
        return objective

    def mu(self, size: torch.Size) -> float:
        """Return the shift's logarithm that the pipeline computes for latents of this size, (C, F, H, W) or (C, H, W)."""
        raise DitLoraError(
            f"train.timesteps: shift=tokens: the pipeline of {self.path.name} does not shift by size; give a number"
        )

    def shift_of(self, size: torch.Size) -> float:
        """Return the shift of noise levels for latents of this size, without the batch."""
        return math.exp(self.mu(size)) if self.objective.shift is None else self.objective.shift

    @property
    def drawn_timesteps(self) -> range:
        levels, steps = self.objective.levels, self.train_timesteps
        return range(math.floor(levels.t_min * steps), math.ceil(levels.t_max * steps))

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """Noise, noise levels in the place of timesteps, and latents where the VAE gives a distribution."""
        size = batch["latent_mean"].shape[1:]
        shift = self.shift_of(size)
        drawn: Draws = {
            "noise": partial(normal, size),
            "timestep": lambda rows: self.objective.sigmas(normal((), rows), shift),
        }
        posterior = {"posterior": partial(normal, size)} if "latent_logvar" in batch else {}
        return {**posterior, **drawn}

    @abstractmethod
    def clean_latents(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a batch's latents as the network is trained on them, fp32; `given` are its draws."""

    def known(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return 1 where the network is given clean latents and 0 where it is to find them; None where it is given none.

        Broadcast to the latents. Given ones stay clean, and no loss is taken there.
        """
        return None

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Velocity losses at drawn noise levels; noising, target and loss are fp32."""
        given = streams.drawn(self.draws(batch), batch["latent_mean"].device)
        objective, clean = self.objective, self.clean_latents(batch, given)
        noise, sigmas = given["noise"], given["timestep"]
        noisy, known = objective.add_noise(clean, noise, sigmas), self.known(batch, given)
        if known is not None:
            noisy = torch.where(known > 0, clean, noisy)
        timesteps = sigmas * self.train_timesteps
        prediction = self.drawn_prediction(transformer, noisy, timesteps, batch, given)
        target = objective.target(clean, noise)
        losses = mean_squared_error(prediction, target, self._weights(batch, known))
        return LossOutput(losses, objective.reported(sigmas))

    def masked(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return what the data's masks weigh each of `clean_latents` by, broadcast to them; None without masks."""
        return loss_weights(batch, self.mask_floor, batch["latent_mean"])

    def _weights(
        self, batch: Mapping[str, torch.Tensor], known: torch.Tensor | None
    ) -> torch.Tensor | None:
        masked = self.masked(batch)
        if known is None or masked is None:
            return masked if known is None else 1 - known
        return masked * (1 - known)

    def drawn_prediction(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return a training step's prediction: that of `predict`, unless the family draws something for it."""
        return self.predict(transformer, noisy, timesteps, batch)
