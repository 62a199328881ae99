"""SANA-Video text-to-video: Sana's objective and text encoding on latents of Wan's autoencoder.

Prompts, positions and denoising call the stock pipeline's and transformer's own code
(diffusers/pipelines/sana_video/pipeline_sana_video.py).

Shapes: B batch, T text tokens, C latent channels, F latent frames, H and W latent size.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, TensorMap, Tensors
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser
from dit_lora.families.latents import encode_video
from dit_lora.families.refusals import frame_count_errors, side_errors
from dit_lora.families.sana.attention import keep_linear_attention_fp32
from dit_lora.families.sana.checkpoint import (
    PIPELINE_MULTIPLE,
    SanaEncoders,
    SanaInfo,
    SanaSampler,
    predict_velocity,
    read_sana_fields,
)

# flow_shift of NVlabs/Sana configs/sana_video_config/Sana_2000M_480px_AdamW_fsdp.yaml. The published scheduler has 8,
# for sampling (inference_flow_shift there: 7 at 98c4a1db), which means higher noise than in training.
_TRAIN_SHIFT = 3.0

# Defaults of AutoencoderKLWan: the published config was written before these two options existed.
_WAN_FACTORS = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}


@dataclass(frozen=True, kw_only=True)
class SanaVideoInfo(SanaInfo):
    """Info of a SANA-Video text-to-video checkpoint with Wan's autoencoder."""

    pipeline_class: ClassVar[Any] = SanaVideoPipeline

    @property
    def size_multiple(self) -> int:
        spatial = self.vae_config["scale_factor_spatial"]
        # (time, height, width)
        _, patch_height, patch_width = self.transformer_config["patch_size"]
        return lcm(PIPELINE_MULTIPLE, spatial * lcm(patch_height, patch_width))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        temporal = self.vae_config["scale_factor_temporal"]
        return [*side_errors(shape, self.size_multiple), *frame_count_errors(shape.frames, temporal)]


@dataclass(frozen=True, kw_only=True)
class SanaVideoEncoders(SanaEncoders):
    """Text encoder and VAE of a SANA-Video checkpoint.

    Captions are encoded unchanged: a motion score is part of the caption, ` motion score: 30.` at its end.
    """

    vae_class = AutoencoderKLWan
    transform = "sana-video-1: pixels / 127.5 - 1, posterior mean and logvar"

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_video(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class SanaVideoDenoiser(FlowDenoiser):
    transformer_class: ClassVar[Any] = SanaVideoTransformer3DModel

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer = super().load_transformer(dtype)
        # No SANA-Video checkpoint was trained in fp16.
        keep_linear_attention_fp32(transformer, should_saturate=False)
        return transformer

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents; equal to one call of the stock pipeline."""
        return predict_velocity(self.info, transformer, noisy, timesteps, batch)


@dataclass(frozen=True, kw_only=True)
class SanaVideoSampler(SanaSampler):
    output_field = "frames"
    frames_argument = "frames"


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a SANA-Video checkpoint. Raises as `DiffusionFamily.open` does."""
    fields, objective = read_sana_fields(family, model)
    vae = fields["vae_config"]
    kind = vae.get("_class_name")
    if kind != AutoencoderKLWan.__name__:
        raise DitLoraError(
            f"{model.path} has the autoencoder {kind}; family sana_video trains checkpoints with "
            f"{AutoencoderKLWan.__name__} (2B, 480p)"
        )
    info = SanaVideoInfo(**{**fields, "vae_config": {**_WAN_FACTORS, **vae}})
    denoiser = SanaVideoDenoiser(info=info, objective=replace(objective, shift=_TRAIN_SHIFT))
    return Checkpoint.from_denoiser(denoiser, SanaVideoEncoders, SanaVideoSampler)
