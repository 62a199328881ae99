"""LTX-Video image-to-video: the image is the first latent frame, clean, at timestep 0 and without loss.

As in the stock pipeline (diffusers/pipelines/ltx/pipeline_ltx_image2video.py), the image's latent is sampled from its
posterior.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, S video tokens (F H W).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from diffusers import LTXImageToVideoPipeline
from diffusers.video_processor import VideoProcessor

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import Checkpoint, TensorMap, Tensors, VideoEncoder
from dit_lora.families.conditioning import FirstFrameTokenConditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory, sample_posterior
from dit_lora.families.ltx_video.text_to_video import (
    LTXVideoDenoiser,
    LTXVideoEncoders,
    LTXVideoInfo,
    LTXVideoSampler,
    normalize_latents,
    pack_latents,
)
from dit_lora.families.pictures import require_images, to_pil_image
from dit_lora.families.refusals import min_frames_errors
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.numerics.streams import DrawFunctions, draw_normal_noise

IMAGE_TRANSFORM = "ltx-video-i2v-1: the pipeline's preprocessing, posterior of one frame, fp32"


@dataclass(frozen=True, kw_only=True)
class LTXVideoImageInfo(LTXVideoInfo):
    """Info (configs, supported shapes) of an LTX-Video checkpoint for image-to-video."""

    pipeline_class: ClassVar[Any] = LTXImageToVideoPipeline
    image_argument_names: ClassVar[tuple[str, ...]] = ("image",)
    supported_options: ClassVar[tuple[str, ...]] = (
        *LTXVideoInfo.supported_options,
        "data.image_column",
        "validation.images",
    )

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        frame_problems = min_frames_errors(shape.frames, self.temporal_factor)
        return [*super().find_shape_errors(shape), *frame_problems]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        info = super().copy_with_recipe_settings(recipe, training_options)
        # After the checks of all tasks, whose errors come first.
        require_images(self.path.name, recipe.validation, self.image_argument_names)
        return info


@dataclass(frozen=True, kw_only=True)
class LTXVideoImageEncoders(LTXVideoEncoders):
    """Text encoder and VAE of an LTX-Video checkpoint for image-to-video."""

    info: LTXVideoImageInfo

    def latent_cache_key(self) -> Mapping[str, Any]:
        return {**super().latent_cache_key(), "image": IMAGE_TRANSFORM}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the clip's tensors and the posterior of its image, (C, 1, H, W)."""
        vae = self.load_vae(dtype, device, memory)
        processor = VideoProcessor(vae_scale_factor=self.info.spatial_factor)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            picture = to_pil_image(pixels[0] if image is None else image)
            # (1, 3, height, width) -> (1, 3, 1, height, width)
            posterior = vae.encode(processor.preprocess(picture).to(device)[:, :, None]).latent_dist
            return {
                **self.encode_pixels(vae, pixels),
                "image_latent_mean": posterior.mean[0],
                "image_latent_logvar": posterior.logvar[0],
            }

        return encode


@dataclass(frozen=True, kw_only=True)
class SampledFirstTokens(FirstFrameTokenConditioning):
    """First-frame conditioning of packed latents, whose image latent is sampled from its posterior."""

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        # (C, 1, H, W)
        picture: DrawFunctions = {"image_posterior": partial(draw_normal_noise, batch["image_latent_mean"].shape[1:])}
        # The clip's posterior has a stream of its own, so both latents are independent.
        return {**super().get_random_input_samplers(batch), **picture}


def get_image_tokens(batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
    """A batch's image latents, normalised, repeated for every frame and packed, (B, S, C)."""
    latent, noise = batch["image_latent_mean"].float(), random_tensors.get("image_posterior")
    if noise is not None:
        latent = sample_posterior(latent, batch["image_latent_logvar"], noise)
    # Like the pipeline, without the VAE's scaling factor, which is 1.
    frames = batch["latent_mean"].shape[2]
    # (B, C, 1, H, W) -> (B, C, F, H, W) -> (B, S, C)
    return pack_latents(normalize_latents(latent, batch).expand(-1, -1, frames, -1, -1))


def compose_checkpoint(objective: FlowMatching, **facts: Any) -> Checkpoint:
    """Build an opened LTX-Video checkpoint for image-to-video."""
    info = LTXVideoImageInfo(**facts)
    conditioning = SampledFirstTokens(image_latents=get_image_tokens)
    denoiser = LTXVideoDenoiser(info=info, objective=objective, conditioning=conditioning)
    return Checkpoint.from_denoiser(denoiser, LTXVideoImageEncoders, LTXVideoSampler)
