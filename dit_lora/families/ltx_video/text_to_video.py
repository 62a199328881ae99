"""LTX-Video text-to-video: flow matching on packed latents, conditioned on T5, with positions in seconds.

Prompts, packing, normalisation, the shift and denoising call the stock pipeline's own code
(diffusers/pipelines/ltx/pipeline_ltx.py).

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size, S video tokens
(F H W).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import (
    CheckpointInfo,
    Encoders,
    Sampler,
    Sampling,
    TensorMap,
    Tensors,
    TensorSpec,
    TextEncoder,
)
from dit_lora.families.captions import get_caption_spec, make_caption_encoder
from dit_lora.families.flow_matching import FlowDenoiser, compute_mu, require_min_steps
from dit_lora.families.latents import encode_video
from dit_lora.families.opening import get_call_default
from dit_lora.families.refusals import frame_count_errors, side_errors
from dit_lora.numerics.streams import move_to_device

PIPELINE_MULTIPLE = 32  # required by check_inputs of both pipelines, for any autoencoder
# Recommended for decoders with a timestep (Diffusers' page on LTX-Video); the pipelines' defaults are 0.
_DECODE_KWARGS = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@dataclass(frozen=True, kw_only=True)
class LTXVideoInfo(CheckpointInfo):
    """Info (configs, supported shapes) of an LTX-Video checkpoint for text-to-video."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    fps: float | None = None
    """Frames per second, from which positions are computed. None for the pipeline's default."""
    pipeline_class: ClassVar[Any] = LTXPipeline
    supported_options: ClassVar[tuple[str, ...]] = ("model.task",)

    @property
    def spatial_factor(self) -> int:
        """Pixels per LTX-Video latent along a side."""
        return self._compression_factor("spatial_compression_ratio", self.vae_config["patch_size"])

    @property
    def temporal_factor(self) -> int:
        """Frames per LTX-Video latent frame. The first latent frame is a single frame."""
        return self._compression_factor("temporal_compression_ratio", self.vae_config["patch_size_t"])

    def _compression_factor(self, name: str, patch: int) -> int:
        # If the config leaves the ratio out, compute it as AutoencoderKLLTXVideo does.
        factor = self.vae_config[name]
        # Each downsampling stage doubles the factor of the patches.
        return int(patch * 2 ** sum(self.vae_config["spatio_temporal_scaling"]) if factor is None else factor)

    @property
    def size_multiple(self) -> int:
        return lcm(PIPELINE_MULTIPLE, self.spatial_factor)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape that LTX-Video does not support.

        Frames must be 8n + 1: the pipeline silently drops the rest.
        """
        return [*side_errors(shape, self.size_multiple), *frame_count_errors(shape.frames, self.temporal_factor)]

    @property
    def frame_rate(self) -> float:
        return self.fps or get_call_default(self.pipeline_class, "frame_rate")

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Apply the recipe's frame rate. Raises `DitLoraError` for one-step samples whose timestep would be NaN."""
        # Check now: otherwise validation samples would fail in the middle of a run.
        require_min_steps(self.scheduler, recipe.validation.inference_steps, "validation.inference_steps")
        return replace(super().copy_with_recipe_settings(recipe, training_options), fps=recipe.data.fps)

    def copy_with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        # Frames per second are one of the common fields of the header.
        fps = metadata.get("video", {}).get("fps", self.fps)
        return replace(super().copy_with_training_metadata(metadata), fps=fps)


@dataclass(frozen=True, kw_only=True)
class LTXVideoEncoders(Encoders):
    """Text encoder and VAE of an LTX-Video checkpoint for text-to-video."""

    info: LTXVideoInfo
    vae_class = AutoencoderKLLTXVideo
    transform = "ltx-video-1: pixels / 127.5 - 1, posterior mean and logvar, and the VAE's statistics, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(self.info.text_tokens, self.info.transformer_config["caption_channels"], dtype)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 as the pipeline uses it: T5 attends to its padding, which a mask then hides from the transformer."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            embeddings, mask, _, _ = pipeline.encode_prompt(
                caption, do_classifier_free_guidance=False, max_sequence_length=self.info.text_tokens, device=device
            )
            return {"prompt_embeds": embeddings, "prompt_attention_mask": mask}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """A clip's posterior and the VAE's means and deviations (2, C), which are in its weights but in no config."""
        # (2, C). Stored with every sample, so that training needs no VAE.
        statistics = torch.stack([vae.latents_mean, vae.latents_std])
        return {**encode_video(vae, pixels), "latent_statistics": statistics}


@dataclass(frozen=True, kw_only=True)
class LTXVideoDenoiser(FlowDenoiser):
    """LTX-Video's transformer and loss, for text-to-video and image-to-video.

    The tasks differ only in the conditioning.
    """

    info: LTXVideoInfo
    transformer_class: ClassVar[Any] = LTXVideoTransformer3DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # Every latent is one token.
        return compute_mu(self.info.scheduler, prod(size[1:]))

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        return normalize_latents(latents, batch, self.info.vae_config["scaling_factor"])

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, C); equal to one call of the stock pipeline."""
        # Without random tensors, every sample keeps its image, at the posterior's mean.
        conditioned = self.conditioning.insert_clean_latents(noisy, batch, {})
        return self.predict_in_training(transformer, conditioned, timesteps, batch, {})

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        text = batch["prompt_embeds"]
        frames, height, width = batch["latent_mean"].shape[2:]
        info, spatial = self.info, self.info.spatial_factor
        # The dtype of the text is that of the pipeline's latents.
        return transformer(
            hidden_states=noisy.to(text.dtype),
            encoder_hidden_states=text,
            timestep=self.conditioning.token_timesteps(timesteps, batch, random_tensors),
            encoder_attention_mask=move_to_device(batch["prompt_attention_mask"], text.device),
            num_frames=frames,
            height=height,
            width=width,
            # Seconds per latent frame, and pixels per latent.
            rope_interpolation_scale=(info.temporal_factor / info.frame_rate, spatial, spatial),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class LTXVideoSampler(Sampler):
    """LTX-Video's pipeline arguments, for text-to-video and image-to-video."""

    info: LTXVideoInfo
    frames_argument = "num_frames"

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        decode_kwargs = _DECODE_KWARGS if self.info.vae_config["timestep_conditioning"] else {}
        return {**super().shape_kwargs(shape), **decode_kwargs}

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """LTX-Video's pipeline argument for frames per second.

        Raises `DitLoraError` for a single step if its timestep would be NaN.
        """
        require_min_steps(self.info.scheduler, sampling.inference_steps, f"{self.info.path.name}: inference steps")
        return {} if sampling.fps is None else {"frame_rate": sampling.fps}

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        """Generate one video with torch's global generator seeded, and restore its state afterwards.

        The decoder of 0.9.1 draws noise from that generator.
        """
        # fork_rng always covers the CPU's generator; add that of the current GPU.
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(sampling.seed)
            return super().generate(pipeline, prompt_kwargs, sampling)


def normalize_latents(latents: torch.Tensor, batch: TensorMap, scaling_factor: float = 1.0) -> torch.Tensor:
    """Normalise latents (B, C, F, H, W) with the VAE's statistics, which are the same in every row of a batch."""
    # (B, 2, C): the first row's two vectors.
    mean, deviation = batch["latent_statistics"][0]
    return LTXPipeline._normalize_latents(latents, mean, deviation, scaling_factor)


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """Pack LTX-Video latents (B, C, F, H, W) into tokens (B, S, C) with the pipeline's method."""
    return LTXPipeline._pack_latents(latents)
