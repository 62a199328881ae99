"""Base of the flow-matching families: the scheduler's config, noise levels, noising, target and loss.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.config.timesteps import TimestepsConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Denoiser, TensorMap
from dit_lora.families.latents import compute_loss_weights, normalize_latents, sample_posterior
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.noise_levels import LOGIT_NORMAL, NoiseLevelDistribution
from dit_lora.numerics.objectives import FlowMatching, LossOutput, compute_mean_squared_error
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, draw_normal_noise


@dataclass(frozen=True, kw_only=True)
class FlowDenoiser(Denoiser):
    """Base class of denoisers that predict the velocity from clean latents to noise."""

    objective: FlowMatching

    @property
    def training_options(self) -> tuple[str, ...]:
        return ("train.timesteps", *super().training_options)

    def apply_training_options(self, recipe: Recipe) -> Self:
        denoiser = super().apply_training_options(recipe)
        if recipe.train.timesteps is None:
            return denoiser
        # The timesteps of the recipe replace those of the checkpoint only where the recipe sets them.
        return replace(denoiser, objective=denoiser._apply_timesteps_config(recipe.train.timesteps))

    def _apply_timesteps_config(self, config: TimestepsConfig) -> FlowMatching:
        """Objective of the denoiser with the recipe's `train.timesteps`.

        Raises `DitLoraError` if no noise level is left.
        """
        stored_objective, levels = self.objective, self.objective.distribution
        # `shift` is handled below: None leaves the checkpoint's, and "tokens" selects the shift by size.
        overrides = {name: value for name, value in config.model_dump(exclude={"shift"}).items() if value is not None}
        # The recipe may only narrow the range in which this component is used, such as an expert's.
        low, high = (max(overrides.get("t_min", 0), levels.t_min), min(overrides.get("t_max", 1), levels.t_max))
        if low >= high or low > overrides.get("t_min", low) or high < overrides.get("t_max", high):
            raise DitLoraError(
                f"train.timesteps: t_min={overrides.get('t_min', low):g}, t_max={overrides.get('t_max', high):g} is "
                f"not within the noise levels that {self.info.part} of {self.info.path.name} is used at: from "
                f"{levels.t_min:g} on and below {levels.t_max:g}"
            )
        if overrides.get("density", levels.density) != levels.density:
            # The parameters of the family's density do not apply to another density.
            levels = NoiseLevelDistribution(t_min=levels.t_min, t_max=levels.t_max)
        if config.shift == "tokens":
            self.compute_shift_mu(torch.Size([1, 64, 64]))  # raises if the pipeline does not shift by size
        shift = stored_objective.shift if config.shift is None else config.shift
        shift = None if shift == "tokens" else shift
        objective = replace(stored_objective, shift=shift, distribution=replace(levels, **overrides))
        if shift is not None:
            # Raises if the range is too narrow to sample from.
            objective.compute_sigmas(torch.zeros(1))
        return objective

    def compute_shift_mu(self, size: torch.Size) -> float:
        """Logarithm of the noise-level shift that the pipeline computes for latents of this size.

        Args:
            size: Latent size without the batch, (C, F, H, W) or (C, H, W).

        Raises:
            DitLoraError: The pipeline does not shift by size.
        """
        raise DitLoraError(
            f"train.timesteps: shift=tokens: the pipeline of {self.info.path.name} does not shift by size; give a "
            "number"
        )

    def compute_shift(self, size: torch.Size) -> float:
        """Shift of the noise levels for latents of this size, given without the batch dimension."""
        return math.exp(self.compute_shift_mu(size)) if self.objective.shift is None else self.objective.shift

    @property
    def timestep_range(self) -> range:
        # The objective's range of noise levels (0 to 1) in integer timesteps, rounded outwards.
        levels, steps = self.objective.distribution, self.num_train_timesteps
        return range(math.floor(levels.t_min * steps), math.ceil(levels.t_max * steps))

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors of a training step: noise, noise levels (`timestep`) and the posterior's noise, if any."""
        size = batch["latent_mean"].shape[1:]
        shift = self.compute_shift(size)
        # The network's latents may be packed; the meta device gives their shape without any values.
        packed_size = self._pack_tokens(torch.empty(batch["latent_mean"].shape, device="meta")).shape[1:]
        noise_draws: DrawFunctions = {
            "noise": partial(draw_normal_noise, packed_size),
            "timestep": lambda rows: self.objective.compute_sigmas(draw_normal_noise((), rows), shift),
        }
        # A batch with logvar has a posterior to sample from; otherwise latents are used as they are.
        posterior = {"posterior": partial(draw_normal_noise, size)} if "latent_logvar" in batch else {}
        return {**posterior, **noise_draws, **self.conditioning.get_random_input_samplers(batch)}

    def clean_latents(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Clean training latents of a cached batch, fp32, as the network sees them without noise.

        They are sampled from the posterior, if the VAE has one, normalised and packed: the inverse of decoding.
        Latents that are given as conditioning are in their place.
        """
        latents = batch["latent_mean"].float()
        # Without a posterior, every epoch uses the same latents.
        if "latent_logvar" in batch:
            latents = sample_posterior(latents, batch["latent_logvar"], random_tensors["posterior"])
        packed = self._pack_tokens(self._scale_latents(latents, batch))
        return self.conditioning.insert_clean_latents(packed, batch, random_tensors)

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        """Normalise the VAE's latents (B, C, ...) for the network, by default with the numbers in the VAE's config."""
        return normalize_latents(latents, self.info.vae_config)

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, ...) in the shape that the network takes, such as tokens (B, S, P). By default unchanged."""
        return latents

    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """Velocity loss of each sample at random noise levels. Noising, target and loss are in fp32."""
        draws = streams.draw_random_tensors(self.get_random_input_samplers(batch), batch["latent_mean"].device)
        objective, clean = self.objective, self.clean_latents(batch, draws)
        noise, sigmas = draws["noise"], draws["timestep"]
        noisy, conditioning_mask = (
            objective.add_noise(clean, noise, sigmas),
            self.conditioning.compute_conditioning_mask(batch, draws),
        )
        if conditioning_mask is not None:
            noisy = torch.where(conditioning_mask > 0, clean, noisy)
        # The transformer takes timesteps, sigmas scaled to the range of the scheduler.
        timesteps = sigmas * self.num_train_timesteps
        prediction = self.predict_in_training(transformer, noisy, timesteps, batch, draws)
        # The velocity does not depend on the noise level: noise - clean.
        target = objective.compute_target(clean, noise)
        losses = compute_mean_squared_error(prediction, target, self._loss_weights(batch, conditioning_mask))
        return LossOutput(losses, objective.convert_to_timesteps(sigmas))

    def compute_mask_loss_weights(self, batch: TensorMap) -> torch.Tensor | None:
        """Loss weights from the data's masks, broadcastable to `clean_latents`; None without masks."""
        latents = batch["latent_mean"]
        weights = compute_loss_weights(batch, self.mask_floor, latents)
        # Expanded to all channels and frames first, so that every packed value has its weight.
        return None if weights is None else self._pack_tokens(weights.expand_as(latents))

    def _loss_weights(self, batch: TensorMap, conditioning_mask: torch.Tensor | None) -> torch.Tensor | None:
        masked = self.compute_mask_loss_weights(batch)
        # With only one of the two, there is nothing to multiply.
        if conditioning_mask is None or masked is None:
            return masked if conditioning_mask is None else 1 - conditioning_mask
        # Latents that are given clean get no loss, inside or outside of the mask.
        return masked * (1 - conditioning_mask)

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        """Predict the velocity in a training step.

        Families that need random tensors beyond noise and timestep override this.
        """
        return self.predict(transformer, noisy, timesteps, batch)


def read_flow_scheduler(model: ModelConfig, path: Path) -> Mapping[str, Any]:
    """Read a checkpoint's scheduler config, filled with the class's defaults.

    Raises `DitLoraError` for another scheduler class, or one that shifts with another formula than `exponential`.
    """
    stored_config = read_component_config(path, "scheduler")
    kind = FlowMatchEulerDiscreteScheduler
    # Another class in this place would be read with the wrong options: solvers name their shift `flow_shift`.
    if stored_config.get("_class_name") != kind.__name__:
        raise DitLoraError(
            f"{model.path}: scheduler {stored_config.get('_class_name')} is not the one that family {model.family} is "
            f"published with: {kind.__name__}"
        )
    # from_config fills options that older files lack.
    config: Any = kind.from_config(stored_config).config
    if config.use_dynamic_shifting and config.time_shift_type != "exponential":
        raise DitLoraError(
            f"{model.path}: its scheduler shifts with time_shift_type={config.time_shift_type}; family "
            f"{model.family} knows exponential, the published checkpoints'"
        )
    return dict(config)


def build_flow_matching(
    scheduler: Mapping[str, Any], distribution: NoiseLevelDistribution = LOGIT_NORMAL
) -> FlowMatching:
    """Flow-matching objective with the shift of the checkpoint's scheduler.

    A dynamic shift depends on the number of tokens, through `compute_shift_mu`.
    """
    shift = None if scheduler["use_dynamic_shifting"] else float(scheduler["shift"])
    return FlowMatching(shift, scheduler["num_train_timesteps"], distribution)


def compute_mu(scheduler: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the noise-level shift for this many image or video tokens, computed as the pipelines do."""
    # A line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).
    return calculate_shift(
        num_tokens,
        scheduler["base_image_seq_len"],
        scheduler["max_image_seq_len"],
        scheduler["base_shift"],
        scheduler["max_shift"],
    )


def require_min_steps(scheduler: Mapping[str, Any], steps: int, name: str) -> None:
    """Raise `DitLoraError` for one-step sampling if the scheduler has `shift_terminal`: its timestep would be NaN.

    `shift_terminal` stretches the schedule so that its last step ends there. With a single step, the last step is also
    the first, which is pure noise, so the stretch would divide zero by zero.
    """
    terminal = scheduler["shift_terminal"]
    if terminal and steps < 2:
        raise DitLoraError(
            f"{name} must be 2 or more, as shift_terminal={terminal:g} of the scheduler gives NaN in one step; got "
            f"{steps}"
        )
