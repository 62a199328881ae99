"""Base of the families that generate images with Qwen-Image's video autoencoder: latents and noise levels.

Latents are normalised per channel, like Wan's, and packed with the stock pipeline's own method.

Shapes: B batch, C latent channels, H and W latent size (of one frame), S image tokens (H W / 4), P packed channels (4
C).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Tensors, VideoEncoder
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.flow_scheduler import flow_scheduler, mu_by_tokens
from dit_lora.families.loss_mask import loss_weights
from dit_lora.families.opening import local_checkpoint, stored_fields, with_defaults
from dit_lora.families.posterior import drawn, encode_video, normalised
from dit_lora.families.refusals import wrong_sides
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.numerics.streams import Draws, normal

PACKED = 2
"""Side of the square of latents that becomes one token."""


@dataclass(frozen=True, kw_only=True)
class QwenLatentsCheckpoint(FlowCheckpoint):
    """A checkpoint whose images are latents of `AutoencoderKLQwenImage`."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    transform = "qwen-latents-1: pixels / 127.5 - 1, posterior mean and logvar of one frame, fp32"
    output = "images"

    @property
    def side_step(self) -> int:
        # The pipelines' vae_scale_factor times their packing.
        return int(PACKED * 2 ** len(self.vae_config["temperal_downsample"]))

    def wrong_shape(self, shape: VideoShape) -> list[str]:
        problems = wrong_sides(shape, self.side_step)
        if shape.frames != 1:
            problems.append(
                f"data.frames must be 1, {self.pipeline_class.__name__} makes images; got {shape.frames}"
            )
        return problems

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the posterior's mean and logvar, (C, 1, H, W), in fp32 regardless of `dtype`."""
        vae = memory.load(AutoencoderKLQwenImage, self.path, torch.float32, device)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return encode_video(vae, pixels)

        return encode

    def mu(self, size: torch.Size) -> float:
        return mu_by_tokens(self.scheduler, size[-2] * size[-1] // PACKED**2)

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """The random tensors of flow matching, with noise for packed latents (S, P)."""
        # The second dimension is time, a single frame.
        channels, _, height, width = batch["latent_mean"].shape[1:]
        # Latents of one token.
        square = PACKED**2
        return {
            **super().draws(batch),
            "noise": partial(normal, (height * width // square, square * channels)),
        }

    def clean_latents(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Latents sampled from the posterior, normalised and packed, (B, S, P): the inverse of decoding."""
        latents = drawn(batch["latent_mean"], batch["latent_logvar"], given["posterior"])
        return self.packed(normalised(latents, self.vae_config))

    def masked(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Loss weights from masks, packed like the latents, (B, S, P); None without masks."""
        latents = batch["latent_mean"]
        # (B, 1, 1, H, W), expanded to all channels, so that every packed value has its weight.
        weights = loss_weights(batch, self.mask_floor, latents)
        return None if weights is None else self.packed(weights.expand_as(latents))

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        """Pack latents (B, C, 1, H, W) in squares of two by two, (B, S, P), with the pipeline's own method."""
        batch, channels, _, height, width = latents.shape
        packed: torch.Tensor = self.pipeline_class._pack_latents(
            latents, batch, channels, height, width
        )
        return packed

    def grid(self, batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Rows and columns of a batch's image tokens."""
        height, width = batch["latent_mean"].shape[-2:]
        return height // PACKED, width // PACKED

    def arguments(self, shape: VideoShape) -> dict[str, Any]:
        return {"height": shape.height, "width": shape.width}


def qwen_latents_fields(model: ModelConfig, transformer_class: Any) -> dict[str, Any]:
    """Read the fields that these families' checkpoints share.

    Raises `DitLoraError` for another scheduler, or if the transformer's channels do not fit the VAE's.
    """
    path = local_checkpoint(model)
    fields, scheduler = stored_fields(model, path), flow_scheduler(model, path)
    transformer = with_defaults(transformer_class, fields["transformer_config"])
    vae = with_defaults(AutoencoderKLQwenImage, fields["vae_config"])
    # A token holds all channels of a square of latents.
    channels = PACKED**2 * vae["z_dim"]
    if transformer["in_channels"] != channels:
        raise DitLoraError(
            f"{model.path}: the parts of this checkpoint do not fit: its transformer's in_channels must be "
            f"{channels}, of {PACKED}x{PACKED} latents of its VAE's {vae['z_dim']} channels; got "
            f"{transformer['in_channels']}"
        )
    # With dynamic shifting, the scheduler's shift depends only on `mu`.
    shift = None if scheduler["use_dynamic_shifting"] else float(scheduler["shift"])
    return {
        **fields,
        "transformer_config": transformer,
        "vae_config": vae,
        "scheduler": scheduler,
        "objective": FlowMatching(shift, scheduler["num_train_timesteps"]),
    }
