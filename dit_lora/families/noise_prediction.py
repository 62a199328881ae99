"""Noise prediction on latents of an image VAE, for families of pictures (DiT) and clips (video DiT, Latte).

Shapes: B batch, C latent channels, F latent frames of a clip, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DDIMScheduler
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Denoiser, TensorMap, Tensors
from dit_lora.families.discrete_timesteps import DiscreteTimesteps
from dit_lora.families.latents import compute_loss_weights, sample_posterior
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.objectives import EpsilonPrediction, LossOutput, compute_mean_squared_error
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, draw_normal_noise


@dataclass(frozen=True, kw_only=True)
class NoiseDenoiser(Denoiser):
    """Base class of denoisers that predict noise, and optionally its variance."""

    objective: EpsilonPrediction
    should_train_variance: bool = True
    """Train the variance too, if the network predicts one (`train.vlb`)."""
    discrete_timesteps: DiscreteTimesteps = field(default_factory=DiscreteTimesteps)

    @property
    def training_options(self) -> tuple[str, ...]:
        return ("train.vlb", "train.timesteps", *super().training_options)

    @property
    def timestep_range(self) -> range:
        return self.discrete_timesteps.get_timestep_range(self.num_train_timesteps)

    @property
    def has_learned_variance(self) -> bool:
        """True if the network predicts a variance that can be trained."""
        return has_variance_channels(self.info.path.name, self.info.transformer_config)

    def apply_training_options(self, recipe: Recipe) -> Self:
        if recipe.train.vlb and not self.has_learned_variance:
            raise DitLoraError(
                f"train.vlb: {self.info.path.name} has no learned variance (its transformer has as many channels out "
                "as in); remove it"
            )
        # By default (None in the recipe) a variance that the network predicts is trained too.
        trains_variance = self.has_learned_variance and recipe.train.vlb is not False
        if trains_variance and recipe.train.target == "guided":
            raise DitLoraError("train.target: guided has no target for the variance; add train.vlb: false")
        timesteps = DiscreteTimesteps.from_recipe(recipe, self.info.path.name)
        return replace(
            super().apply_training_options(recipe),
            should_train_variance=trains_variance,
            discrete_timesteps=timesteps,
        )

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        # The posterior's noise and the added noise have the latents' shape: (C, H, W) or (C, F, H, W).
        noise = partial(draw_normal_noise, batch["latent_mean"].shape[1:])
        timestep = self.discrete_timesteps.make_timestep_sampler(self.num_train_timesteps)
        return {"posterior": noise, "noise": noise, "timestep": timestep}

    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """Loss of each sample in fp32: squared error of the noise, plus the variational bound of the variance in bits.

        `predict` returns the noise, followed by the variance's interpolation fraction along the channels.
        """
        # All draws of a step come from the sample's own streams, so neighbours in the batch do not change them.
        draws = streams.draw_random_tensors(self.get_random_input_samplers(batch), batch["latent_mean"].device)
        noise, timesteps = draws["noise"], draws["timestep"]
        latents = sample_posterior(batch["latent_mean"], batch["latent_logvar"], draws["posterior"])
        clean = latents * self.info.vae_config["scaling_factor"]

        noisy = self.objective.add_noise(clean, noise, timesteps)
        output = self.predict(transformer, noisy, timesteps, batch).float()
        channels = clean.shape[1]
        # The channels after the noise, if any, interpolate the variance between its bounds.
        prediction, fraction = output[:, :channels], output[:, channels:]
        weights = compute_loss_weights(batch, self.mask_floor, clean)
        losses = compute_mean_squared_error(prediction, noise, weights)
        if self.should_train_variance and self.has_learned_variance:
            losses = losses + self.objective.compute_variational_bound(
                prediction, fraction, clean, noisy, timesteps, weights
            )
        return LossOutput(losses, timesteps)


FRAMES_TRANSFORM = "frames-1: pixels / 127.5 - 1, posterior mean and logvar of each frame, fp32"
"""`Encoders.transform` of the tensors that `encode_frames` computes."""


def encode_frames(vae: Any, pixels: torch.Tensor) -> Tensors:
    """Posteriors of a clip's frames, uint8 (frames, 3, height, width): mean and logvar, each (C, F, H, W).

    Each epoch then samples new latents from them.
    """
    # Encode one frame at a time: this needs the memory of one image, and a latent does not depend on the clip's
    # length.
    frames = [vae.encode(frame[None].to(vae.device).float() / 127.5 - 1).latent_dist for frame in pixels]
    return {
        "latent_mean": torch.stack([frame.mean[0] for frame in frames], dim=1),
        "latent_logvar": torch.stack([frame.logvar[0] for frame in frames], dim=1),
    }


def compute_spatial_factor(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent along a side, as Diffusers' pipelines compute it from the VAE config."""
    return 2 ** (len(vae_config["block_out_channels"]) - 1)


def read_noise_objective(model: ModelConfig, path: Path) -> EpsilonPrediction:
    """The noise-prediction objective with the betas of a checkpoint's scheduler.

    Raises `DitLoraError` if the scheduler's prediction type is not `epsilon`, or if its schedule ends in pure noise.
    """
    # Any scheduler's config will do: only its betas and its prediction type are read.
    scheduler: Any = DDIMScheduler.from_config(read_component_config(path, "scheduler"))
    if scheduler.config.prediction_type != "epsilon":
        raise DitLoraError(
            f"{model.path}: family {model.family} predicts noise, but its scheduler says "
            f"prediction_type={scheduler.config.prediction_type}"
        )
    if scheduler.betas.max() >= 1:
        raise DitLoraError(
            f"{model.path}: its scheduler ends in pure noise (rescale_betas_zero_snr), from which a "
            "prediction of the noise says nothing of the pictures"
        )
    return EpsilonPrediction.from_betas(scheduler.betas)


def has_variance_channels(name: str, transformer_config: Mapping[str, Any]) -> bool:
    """True if the network predicts a variance too: it has twice as many output as input channels.

    Raises `DitLoraError` if the output channels are neither once nor twice the input channels.
    """
    channels, out_channels = transformer_config["in_channels"], transformer_config["out_channels"]
    if out_channels not in (channels, 2 * channels):
        raise DitLoraError(
            f"{name}: a transformer of {channels} channels gives as many, or twice as many with a learned "
            f"variance; its config says out_channels={out_channels}"
        )
    return out_channels == 2 * channels
