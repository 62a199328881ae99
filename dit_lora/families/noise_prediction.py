"""What DiT, the video DiT and Latte share: latents of an image VAE, and noise prediction on them.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Tensors, VideoEncoder
from dit_lora.models.vae_memory import VaeMemory
from dit_lora.numerics.streams import Streams, integers, moved, normal
from dit_lora.objectives import EpsilonPrediction, LossOutput, mean_squared_error
from dit_lora.pretrained import load_pretrained

# Changes whenever the same pixels would be encoded otherwise; part of each clip's cache key.
VIDEO_TRANSFORM = "frames-1: pixels / 127.5 - 1, posterior mean and logvar of each frame, fp32"


def spatial_factor(vae_config: Mapping[str, Any]) -> int:
    """Pixels per latent, as the pipelines count them."""
    return 2 ** (len(vae_config["block_out_channels"]) - 1)


def scaling_factor(vae_config: Mapping[str, Any]) -> float:
    """By what latents are multiplied; older configs leave out AutoencoderKL's default."""
    return vae_config.get("scaling_factor", 0.18215)


def load_frame_encoder(path: Path, device: torch.device, memory: VaeMemory) -> VideoEncoder:
    """Keeps the posterior's mean and logvar, (C, F, H, W), so that each epoch draws afresh; the VAE is fp32."""
    vae: Any = load_pretrained(
        AutoencoderKL, path, subfolder="vae", dtype=torch.float32, use_safetensors=True
    ).to(device)
    memory.set(vae)

    @torch.no_grad()
    def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        # One frame at a time: memory of one image, and no frame's latent depends on the clip's length.
        frames = [
            vae.encode(frame[None].to(device).float() / 127.5 - 1).latent_dist for frame in pixels
        ]
        return {
            "latent_mean": torch.stack([frame.mean[0] for frame in frames], dim=1),
            "latent_logvar": torch.stack([frame.logvar[0] for frame in frames], dim=1),
        }

    return encode


def noise_losses(
    objective: EpsilonPrediction,
    predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    streams: Streams,
    *,
    scale: float,
    vlb: bool,
) -> LossOutput:
    """Squared error of the noise, plus the variance's bound in bits with `vlb`, at uniform timesteps; all fp32.

    `predict` takes noisy latents (B, C, ...) and timesteps, and gives the noise and, behind it, the
    variance's fraction.
    """
    mean, logvar = batch["latent_mean"].float(), batch["latent_logvar"].float()
    shape, device = mean.shape[1:], mean.device
    posterior_noise = moved(normal(shape, streams("posterior")), device)
    clean = (mean + torch.exp(0.5 * logvar) * posterior_noise) * scale
    noise = moved(normal(shape, streams("noise")), device)
    timesteps = moved(integers(0, len(objective.alpha), streams("timestep")), device)

    noisy = objective.add_noise(clean, noise, timesteps)
    output = predict(noisy, timesteps).float()
    prediction, fraction = output[:, : shape[0]], output[:, shape[0] :]
    losses = mean_squared_error(prediction, noise)
    if vlb:
        bound = objective.variational_bound(prediction, fraction, clean, noisy, timesteps)
        losses = losses + bound
    return LossOutput(losses, timesteps)


def noise_objective(model: ModelConfig, scheduler_config: Mapping[str, Any]) -> EpsilonPrediction:
    """The objective of a scheduler's betas; refuses one that predicts something else."""
    scheduler: Any = DDIMScheduler.from_config(dict(scheduler_config))
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


def learns_variance(name: str, transformer_config: Mapping[str, Any]) -> bool:
    """Whether the network has a second half of channels; raises on any other number of them."""
    channels, out = transformer_config["in_channels"], transformer_config["out_channels"]
    if out not in (channels, 2 * channels):
        raise DitLoraError(
            f"{name}: a transformer of {channels} channels gives as many, or twice as many with a learned "
            f"variance; its config says out_channels={out}"
        )
    return out == 2 * channels


def trains_variance(recipe: Recipe, name: str, learned: bool) -> bool:
    """What `train.vlb` comes to for a checkpoint."""
    if recipe.train.vlb and not learned:
        raise DitLoraError(
            f"train.vlb: {name} has no learned variance (its transformer has as many channels out as in); "
            "remove it"
        )
    return learned and recipe.train.vlb is not False


def check_patches(name: str, shape: VideoShape, frame_step: int, pixel_step: int) -> None:
    """Frames must be multiples of `frame_step`, height and width of `pixel_step`; all that is wrong is listed."""
    sizes = (
        ("frames", shape.frames, frame_step),
        ("height", shape.height, pixel_step),
        ("width", shape.width, pixel_step),
    )
    wrong = [
        f"data.{what} must be a multiple of {step}; got {value}, nearest {_multiples(value, step)}"
        for what, value, step in sizes
        if value % step
    ]
    if wrong:
        raise DitLoraError(listed(f"{name} cannot take this shape", wrong))


def _multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} and {below + step}" if below else str(step)
