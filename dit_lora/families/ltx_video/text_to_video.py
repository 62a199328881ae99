"""LTX-Video text-to-video: flow matching on packed latents, conditioned on T5, with positions in seconds.

Prompts, packing, normalisation, the shift and denoising call the stock pipeline's own code
(diffusers/pipelines/ltx/pipeline_ltx.py).

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size, S video tokens
(F H W).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
)
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.flow_scheduler import mu_by_tokens, require_steps
from dit_lora.families.loss_mask import loss_weights
from dit_lora.families.opening import default_of
from dit_lora.families.posterior import drawn, encode_video
from dit_lora.families.refusals import wrong_frames, wrong_sides
from dit_lora.families.text.captions import as_arguments, one_by_one
from dit_lora.families.text.limit import text_limit
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Draws, moved, normal

PIPELINE_MULTIPLE = 32  # required by check_inputs of both pipelines, for any autoencoder
# Recommended for decoders with a timestep (Diffusers' page on LTX-Video); the pipelines' defaults are 0.
_DECODING = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@dataclass(frozen=True, kw_only=True)
class LTXVideoCheckpoint(FlowCheckpoint):
    """An LTX-Video checkpoint for text-to-video."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    fps: float | None = None
    """Frames per second, from which positions are computed. None for the pipeline's default."""
    task_given: bool = False
    """True if the recipe selects another task than the checkpoint's pipeline."""
    pipeline_class: ClassVar[Any] = LTXPipeline
    transformer_class: ClassVar[Any] = LTXVideoTransformer3DModel
    transform = (
        "ltx-video-1: pixels / 127.5 - 1, posterior mean and logvar, and the VAE's statistics, fp32"
    )
    takes: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.takes, "model.task")

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along a side."""
        return self._factor("spatial_compression_ratio", self.vae_config["patch_size"])

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame, except the first, which is a single frame."""
        return self._factor("temporal_compression_ratio", self.vae_config["patch_size_t"])

    def _factor(self, name: str, patch: int) -> int:
        # If the config leaves the ratio out, compute it as AutoencoderKLLTXVideo does.
        factor = self.vae_config[name]
        # Each downsampling stage doubles the factor of the patches.
        return int(
            patch * 2 ** sum(self.vae_config["spatio_temporal_scaling"])
            if factor is None
            else factor
        )

    @property
    def side_step(self) -> int:
        return lcm(PIPELINE_MULTIPLE, self.spatial_factor)

    def wrong_shape(self, shape: VideoShape) -> list[str]:
        """Frames must be 8n + 1: the pipeline silently drops the rest."""
        return [
            *wrong_sides(shape, self.side_step),
            *wrong_frames(shape.frames, self.temporal_factor),
        ]

    def for_recipe(self, recipe: Recipe) -> Self:
        """Apply frames per second. Raises `DitLoraError` for one-step samples whose timestep would be NaN."""
        # Check now: otherwise validation samples would fail in the middle of a run.
        require_steps(
            self.scheduler, recipe.validation.inference_steps, "validation.inference_steps"
        )
        return replace(super().for_recipe(recipe), fps=recipe.data.fps)

    def with_header(self, made: Mapping[str, Any]) -> Self:
        # Frames per second are one of the common fields of the header.
        fps = made.get("video", {}).get("fps", self.fps)
        return replace(super().with_header(made), fps=fps)

    def text_limit(self) -> TextLimit:
        return text_limit(self.path, self.text_tokens)

    def text_facts(self) -> Mapping[str, Any]:
        return {**super().text_facts(), "tokens": self.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        tokens, width = self.text_tokens, self.transformer_config["caption_channels"]
        return {
            "prompt_embeds": (torch.Size((tokens, width)), dtype),
            "prompt_attention_mask": (torch.Size((tokens,)), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 as the pipeline uses it: T5 attends to its padding, which a mask then hides from the transformer."""
        pipeline = self.text_pipeline(dtype, device)

        def encode_one(caption: str) -> Tensors:
            embeddings, mask, _, _ = pipeline.encode_prompt(
                caption,
                do_classifier_free_guidance=False,
                max_sequence_length=self.text_tokens,
                device=device,
            )
            return {"prompt_embeds": embeddings, "prompt_attention_mask": mask}

        return one_by_one(encode_one)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the posterior's mean and logvar, (C, F, H, W), and the VAE's statistics.

        It encodes in fp32 regardless of `dtype`.
        """
        vae = memory.load(AutoencoderKLLTXVideo, self.path, torch.float32, device)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return self.encoded(vae, pixels)

        return encode

    def encoded(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """A clip's posterior and the VAE's means and deviations (2, C), which are in its weights but in no config."""
        # (2, C). Stored with every sample, so that training needs no VAE.
        statistics = torch.stack([vae.latents_mean, vae.latents_std])
        return {**encode_video(vae, pixels), "latent_statistics": statistics}

    def mu(self, size: torch.Size) -> float:
        # Every latent is one token.
        return mu_by_tokens(self.scheduler, prod(size[1:]))

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """The random tensors of flow matching, with noise for packed latents (S, C)."""
        channels, *grid = batch["latent_mean"].shape[1:]
        return {**super().draws(batch), "noise": partial(normal, (prod(grid), channels))}

    def clean_latents(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Latents sampled from the posterior, normalised and packed, (B, S, C): the inverse of decoding."""
        latents = drawn(batch["latent_mean"], batch["latent_logvar"], given["posterior"])
        return packed(normalised(latents, batch, self.vae_config["scaling_factor"]))

    def masked(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Loss weights from masks, packed like the latents, (B, S, C); None without masks."""
        latents = batch["latent_mean"]
        # (B, 1, 1, H, W), expanded to all channels and frames before packing.
        weights = loss_weights(batch, self.mask_floor, latents)
        return None if weights is None else packed(weights.expand_as(latents))

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, C); equal to one call of the stock pipeline."""
        return self.call(transformer, noisy, timesteps, batch)

    def call(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run the transformer. `timesteps` is (B,), or (B, S) for one timestep per token."""
        text = batch["prompt_embeds"]
        frames, height, width = batch["latent_mean"].shape[2:]
        spatial = self.spatial_factor
        # The dtype of the text is that of the pipeline's latents.
        return transformer(
            hidden_states=noisy.to(text.dtype),
            encoder_hidden_states=text,
            timestep=timesteps,
            encoder_attention_mask=moved(batch["prompt_attention_mask"], text.device),
            num_frames=frames,
            height=height,
            width=width,
            # Seconds per latent frame, and pixels per latent.
            rope_interpolation_scale=(self.temporal_factor / self.frame_rate, spatial, spatial),
            return_dict=False,
        )[0]

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        return as_arguments(prompt, empty)

    def arguments(self, shape: VideoShape) -> dict[str, Any]:
        return {
            "num_frames": shape.frames,
            "height": shape.height,
            "width": shape.width,
            **(_DECODING if self.vae_config["timestep_conditioning"] else {}),
        }

    def settings(self, how: Sampling) -> dict[str, Any]:
        """Frames per second. Raises `DitLoraError` for a single step if its timestep would be NaN."""
        require_steps(self.scheduler, how.inference_steps, f"{self.path.name}: inference steps")
        return {} if how.fps is None else {"frame_rate": how.fps}

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        """Generate one video with torch's global generator seeded, and restore its state afterwards.

        The decoder of 0.9.1 draws noise from that generator.
        """
        # fork_rng always covers the CPU's generator; add that of the current GPU.
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(how.seed)
            return super().generate(pipeline, conditions, how)

    def index_changes(self) -> dict[str, Any]:
        """The pipeline class, if another task than the checkpoint's was trained."""
        return {"_class_name": self.pipeline_class.__name__} if self.task_given else {}

    @property
    def frame_rate(self) -> float:
        rate: float = self.fps or default_of(self.pipeline_class, "frame_rate")
        return rate

    @property
    def text_tokens(self) -> int:
        """Number of tokens of every caption: the pipeline's default."""
        tokens: int = default_of(self.pipeline_class, "max_sequence_length")
        return tokens


def normalised(
    latents: torch.Tensor, batch: Mapping[str, torch.Tensor], scaling_factor: float = 1.0
) -> torch.Tensor:
    """Normalise latents (B, C, F, H, W) with the VAE's statistics, which are the same in every row of a batch."""
    # (B, 2, C): the first row's two vectors.
    mean, deviation = batch["latent_statistics"][0]
    return LTXPipeline._normalize_latents(latents, mean, deviation, scaling_factor)


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Pack latents (B, C, F, H, W) into tokens (B, S, C) with the pipeline's own method."""
    return LTXPipeline._pack_latents(latents)
