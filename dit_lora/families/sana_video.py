"""SANA-Video text-to-video: Sana's objective and text on the latents of Wan's autoencoder.

Prompts, positions and denoising are the stock pipeline's and transformer's own code
(diffusers/pipelines/sana_video/pipeline_sana_video.py).

Shapes: B batch, T text tokens, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
    load_or_init,
    read_component_config,
    refuse_options,
    to_uint8,
)
from dit_lora.families.sana import (
    LORA_TARGETS,
    flow_losses,
    open_sana,
    stock_pipeline,
    wrong_sides,
)
from dit_lora.families.sana_attention import keep_linear_attention_fp32
from dit_lora.families.sana_text import (
    gemma_conditions,
    gemma_encoder,
    gemma_facts,
    gemma_limit,
    gemma_spec,
)
from dit_lora.families.tiny_sana import build_sana_video
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Streams, moved, normal
from dit_lora.objectives import FlowMatching, LossOutput
from dit_lora.pretrained import load_pretrained

# Changes whenever the same pixels would be encoded otherwise; part of each clip's cache key.
VIDEO_TRANSFORM = "sana-video-1: pixels / 127.5 - 1, posterior mean and logvar"
_PIPELINE_MULTIPLE = 32  # SanaVideoPipeline.check_inputs, whatever the autoencoder
# flow_shift of NVlabs/Sana configs/sana_video_config/Sana_2000M_480px_AdamW_fsdp.yaml. The published scheduler
# has 8, for sampling (inference_flow_shift there: 7 at 98c4a1db): at higher noise than it was trained at.
_TRAIN_SHIFT = 3.0

# AutoencoderKLWan's defaults; the published config is older than these two keys.
_WAN_FACTORS = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}


@dataclass(frozen=True)
class SanaVideoCheckpoint:
    """One SANA-Video text-to-video checkpoint with Wan's autoencoder."""

    path: Path
    transformer_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    objective: FlowMatching
    from_scratch: Mapping[str, Any] | None = None
    pipeline_class: ClassVar[Any] = SanaVideoPipeline

    @property
    def train_timesteps(self) -> int:
        return self.objective.train_timesteps

    @property
    def side_step(self) -> int:
        spatial = self.vae_config["scale_factor_spatial"]
        _, patch_height, patch_width = self.transformer_config["patch_size"]
        return lcm(_PIPELINE_MULTIPLE, spatial * lcm(patch_height, patch_width))

    def text_limit(self) -> TextLimit:
        return gemma_limit(self.path, SanaVideoPipeline)

    def check_shape(self, shape: VideoShape) -> None:
        temporal = self._temporal_factor
        wrong = wrong_sides(shape, self.side_step)
        if (shape.frames - 1) % temporal:
            below = (shape.frames - 1) // temporal * temporal + 1
            wrong.append(
                f"data.frames must be {temporal}n + 1; got {shape.frames}, "
                f"nearest {below} and {below + temporal}"
            )
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} cannot take this shape", wrong))

    def for_recipe(self, recipe: Recipe) -> "SanaVideoCheckpoint":
        self.check_shape(VideoShape.of(recipe.data))
        refuse_options(recipe)
        return self

    def text_facts(self) -> dict[str, Any]:
        return gemma_facts(self.path, SanaVideoPipeline)

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": VIDEO_TRANSFORM}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return gemma_spec(SanaVideoPipeline, self.transformer_config["caption_channels"], dtype)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Captions as they are: a motion score is part of one, ` motion score: 30.` at its end."""
        return gemma_encoder(SanaVideoPipeline, self.path, dtype, device)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Keeps the posterior's mean and logvar, (C, F, H, W). It encodes in fp32 whatever `dtype` is."""
        vae: Any = load_pretrained(
            AutoencoderKLWan, self.path, subfolder="vae", dtype=torch.float32, use_safetensors=True
        ).to(device)
        memory.set(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            video = pixels.to(device).float() / 127.5 - 1
            posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
            return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}

        return encode

    def load_transformer(self, dtype: torch.dtype) -> SanaVideoTransformer3DModel:
        transformer = load_or_init(SanaVideoTransformer3DModel, self.path, dtype, self.from_scratch)
        keep_linear_attention_fp32(transformer, saturates=False)
        return transformer

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Velocity losses at logit-normal, shifted noise levels; noising, target and loss are fp32."""
        mean, logvar = batch["latent_mean"].float(), batch["latent_logvar"].float()
        posterior_noise = moved(normal(mean.shape[1:], streams("posterior")), mean.device)
        latents = mean + torch.exp(0.5 * logvar) * posterior_noise

        def predict(noisy: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
            return self.predict(transformer, noisy, timesteps, batch)

        return flow_losses(self.objective, predict, self._normalised(latents), streams)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCFHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The network's velocity for noisy latents; one call equals one of the stock pipeline's."""
        prompt_embeds = batch["prompt_embeds"]
        return transformer(
            noisy_BCFHW.to(prompt_embeds.dtype),
            encoder_hidden_states=prompt_embeds,
            encoder_attention_mask=batch["prompt_attention_mask"],
            timestep=timesteps,
            return_dict=False,
        )[0]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> SanaVideoPipeline:
        """With the autoencoder in fp32."""
        return stock_pipeline(SanaVideoPipeline, self.path, dtype, transformer, text)

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        return gemma_conditions(prompt, empty)

    def index_changes(self) -> dict[str, Any]:
        return {}

    def as_trained(self, index: Mapping[str, Any]) -> "SanaVideoCheckpoint":
        return self

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        # Without binning: the shape that was asked for, not the nearest of the pipeline's list.
        frames = pipeline(
            **conditions,
            frames=how.shape.frames,
            height=how.shape.height,
            width=how.shape.width,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            use_resolution_binning=False,
            output_type="np",
        ).frames[0]
        return to_uint8(frames)

    @property
    def _temporal_factor(self) -> int:
        return self.vae_config["scale_factor_temporal"]

    def _normalised(self, latents_BCFHW: torch.Tensor) -> torch.Tensor:
        """Per channel, the inverse of what the pipeline does before it decodes."""
        mean, std = (
            torch.tensor(self.vae_config[name], device=latents_BCFHW.device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return (latents_BCFHW - mean) / std


class SanaVideo:
    """SANA-Video text-to-video, the checkpoints with Wan's autoencoder (2B, 480p)."""

    name = "sana_video"
    lora_targets = LORA_TARGETS
    group_patterns: Mapping[str, tuple[str, ...]] = {
        "connector": (
            "patch_embedding.*",
            "time_embed.*",
            "caption_projection.*",
            "caption_norm.*",
            "scale_shift_table",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    }
    tiny_variants = ("sana-video",)
    pipeline_names = ("SanaVideoPipeline",)

    def open(self, model: ModelConfig) -> SanaVideoCheckpoint:
        opened = open_sana(model, self.name, SanaVideoPipeline)
        vae = read_component_config(opened["path"], "vae")
        kind = vae.get("_class_name")
        if kind != AutoencoderKLWan.__name__:
            raise DitLoraError(
                f"{model.path} has the autoencoder {kind}; family sana_video trains checkpoints with "
                f"{AutoencoderKLWan.__name__} (2B, 480p)"
            )
        opened["objective"] = replace(opened["objective"], shift=_TRAIN_SHIFT)
        return SanaVideoCheckpoint(**opened, vae_config={**_WAN_FACTORS, **vae})

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_sana_video(out, seed=seed)


FAMILY = SanaVideo()
