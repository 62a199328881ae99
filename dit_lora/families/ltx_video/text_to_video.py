"""LTX-Video text-to-video: flow matching on packed latents, conditioned by T5, at positions in seconds.

Prompts, packing, normalisation, the shift and denoising are the stock pipeline's own code, called here
(diffusers/pipelines/ltx/pipeline_ltx.py).

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size, S video tokens (F H W).
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

PIPELINE_MULTIPLE = 32  # check_inputs of both pipelines, whatever the autoencoder
# Advised for decoders that are told a timestep (diffusers' page on LTX-Video); the pipelines' defaults are 0.
_DECODING = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@dataclass(frozen=True, kw_only=True)
class LTXVideoCheckpoint(FlowCheckpoint):
    """One LTX-Video checkpoint as text-to-video."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled up with its defaults."""
    fps: float | None = None
    """Frames a second, of which positions are made; None for the pipeline's default."""
    task_given: bool = False
    """True where the recipe chose another task than the checkpoint's own pipeline has."""
    pipeline_class: ClassVar[Any] = LTXPipeline
    transformer_class: ClassVar[Any] = LTXVideoTransformer3DModel
    transform = (
        "ltx-video-1: pixels / 127.5 - 1, posterior mean and logvar, and the VAE's statistics, fp32"
    )
    takes: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.takes, "model.task")

    @property
    def spatial_factor(self) -> int:
        """Pixels to a side of a latent."""
        return self._factor("spatial_compression_ratio", self.vae_config["patch_size"])

    @property
    def temporal_factor(self) -> int:
        """Frames to a latent, but for the first, which is one frame's."""
        return self._factor("temporal_compression_ratio", self.vae_config["patch_size_t"])

    def _factor(self, name: str, patch: int) -> int:
        # As AutoencoderKLLTXVideo computes what its config leaves out.
        given = self.vae_config[name]
        return int(
            patch * 2 ** sum(self.vae_config["spatio_temporal_scaling"]) if given is None else given
        )

    @property
    def side_step(self) -> int:
        return lcm(PIPELINE_MULTIPLE, self.spatial_factor)

    def wrong_shape(self, shape: VideoShape) -> list[str]:
        """Frames are 8n + 1: the pipeline drops those beyond, without a word."""
        return [
            *wrong_sides(shape, self.side_step),
            *wrong_frames(shape.frames, self.temporal_factor),
        ]

    def for_recipe(self, recipe: Recipe) -> Self:
        """Take frames a second; refuse samples of a single step where that gives NaN."""
        require_steps(
            self.scheduler, recipe.validation.inference_steps, "validation.inference_steps"
        )
        return replace(super().for_recipe(recipe), fps=recipe.data.fps)

    def with_header(self, made: Mapping[str, Any]) -> Self:
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
        """T5 as the pipeline uses it: it sees its pads, which the mask then hides from the transformer."""
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
        """Keeps the posterior's mean and logvar, (C, F, H, W), and what normalises them. It encodes in fp32 whatever `dtype` is."""
        vae = memory.load(AutoencoderKLLTXVideo, self.path, torch.float32, device)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return self.encoded(vae, pixels)

        return encode

    def encoded(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """Return a clip's posterior, and the VAE's means and deviations (2, C): they are weights of it, and in no config."""
        statistics = torch.stack([vae.latents_mean, vae.latents_std])
        return {**encode_video(vae, pixels), "latent_statistics": statistics}

    def mu(self, size: torch.Size) -> float:
        return mu_by_tokens(self.scheduler, prod(size[1:]))

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """Return the draws of any flow matching, with noise for packed latents (S, C)."""
        channels, *grid = batch["latent_mean"].shape[1:]
        return {**super().draws(batch), "noise": partial(normal, (prod(grid), channels))}

    def clean_latents(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Drawn, normalised as the pipeline undoes it before it decodes, and packed: (B, S, C)."""
        latents = drawn(batch["latent_mean"], batch["latent_logvar"], given["posterior"])
        return packed(normalised(latents, batch, self.vae_config["scaling_factor"]))

    def masked(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Packed as the latents are, (B, S, C)."""
        latents = batch["latent_mean"]
        weights = loss_weights(batch, self.mask_floor, latents)
        return None if weights is None else packed(weights.expand_as(latents))

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the velocity of packed latents (B, S, C); one call equals one of the stock pipeline's."""
        return self.call(transformer, noisy, timesteps, batch)

    def call(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Call the network; `timesteps` (B,), or (B, S) where tokens have their own."""
        text = batch["prompt_embeds"]
        frames, height, width = batch["latent_mean"].shape[2:]
        spatial = self.spatial_factor
        return transformer(
            hidden_states=noisy.to(text.dtype),
            encoder_hidden_states=text,
            timestep=timesteps,
            encoder_attention_mask=moved(batch["prompt_attention_mask"], text.device),
            num_frames=frames,
            height=height,
            width=width,
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
        """Return frames a second; refuse a single step, of which the scheduler makes NaN where it ends at a given level."""
        require_steps(self.scheduler, how.inference_steps, f"{self.path.name}: inference steps")
        return {} if how.fps is None else {"frame_rate": how.fps}

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        """Make one video; 0.9.1's decoder draws noise of torch's own generator, which is seeded for it and left as it was."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(how.seed)
            return super().generate(pipeline, conditions, how)

    def index_changes(self) -> dict[str, Any]:
        """Return the pipeline, where another task was trained than the checkpoint's own."""
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
    """Return latents (B, C, F, H, W) by the VAE's statistics, which are the same in every row of a batch."""
    mean, deviation = batch["latent_statistics"][0]
    return LTXPipeline._normalize_latents(latents, mean, deviation, scaling_factor)


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Return latents (B, C, F, H, W) as tokens (B, S, C), by the pipeline's own means."""
    return LTXPipeline._pack_latents(latents)
