"""Wan text-to-video: 2.1 (1.3B, 14B), the experts of 2.2 A14B, and 2.2 TI2V-5B without an image.

Prompts and denoising call the stock pipeline's own code (diffusers/pipelines/wan/pipeline_wan.py).

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.utils import is_ftfy_available
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.families.base import CheckpointInfo, Encoders, Sampler, TensorMap, TensorSpec, TextEncoder
from dit_lora.families.captions import list_missing_ftfy_warnings, make_padded_encoder
from dit_lora.families.flow_matching import FlowDenoiser
from dit_lora.families.opening import read_component_config
from dit_lora.families.refusals import frame_count_errors, position_limit_errors, side_errors

PIPELINE_MULTIPLE = 16  # required by check_inputs of both pipelines, for any autoencoder
# Components that stay in the pipeline that encodes captions.
_TEXT_COMPONENTS = ("text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True, kw_only=True)
class WanInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a Wan checkpoint for text-to-video."""

    expert_boundary: float | None = None
    """Noise level from which `transformer` denoises; below it, `transformer_2` does. None with a single expert."""
    pipeline_class: ClassVar[Any] = WanPipeline
    # `text_tokens` must be the default of the pipeline's `__call__`, not of `encode_prompt`: attention to an image
    # assumes that the last 512 tokens are text (transformer_wan.py, WanAttnProcessor).

    # Only TI2V-5B trains both tasks; `open_checkpoint` refuses another task for the others.
    supported_options: ClassVar[tuple[str, ...]] = ("model.task",)

    @property
    def expert_names(self) -> Mapping[str, str]:
        return {} if self.expert_boundary is None else EXPERT_NAMES

    @property
    def size_multiple(self) -> int:
        _, patch_height, patch_width = self.transformer_config["patch_size"]
        spatial = self.vae_config["scale_factor_spatial"]
        return lcm(PIPELINE_MULTIPLE, spatial * lcm(patch_height, patch_width))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape that Wan does not support.

        Frames must be 4n + 1: the VAE silently drops the rest.
        """
        temporal = self.vae_config["scale_factor_temporal"]
        return [
            *side_errors(shape, self.size_multiple),
            *frame_count_errors(shape.frames, temporal),
            *self._position_limit_errors(shape),
        ]

    def _position_limit_errors(self, shape: VideoShape) -> list[str]:
        max_positions = self.transformer_config["rope_max_seq_len"]
        # (time, height, width)
        patches = self.transformer_config["patch_size"]
        spatial, temporal = (self.vae_config[f"scale_factor_{axis}"] for axis in ("spatial", "temporal"))
        ends = {
            # The first latent frame is one frame; each further one is `temporal` frames.
            "frames": (shape.frames, (max_positions * patches[0] - 1) * temporal + 1),
            "height": (shape.height, max_positions * patches[1] * spatial),
            "width": (shape.width, max_positions * patches[2] * spatial),
        }
        return position_limit_errors(ends, "rope_max_seq_len")


@dataclass(frozen=True, kw_only=True)
class WanEncoders(Encoders):
    """Text encoder and VAE of a Wan checkpoint for text-to-video."""

    info: WanInfo
    vae_class = AutoencoderKLWan
    transform = "wan-1: pixels / 127.5 - 1, posterior mean and logvar"

    def text_cache_key(self) -> Mapping[str, Any]:
        # If ftfy is installed, the pipeline cleans prompts with it first, which also straightens quotes
        # (prompt_clean).
        return {**super().text_cache_key(), "tokens": self.info.text_tokens, "ftfy": is_ftfy_available()}

    def list_caption_warnings(self, captions: Iterable[str]) -> list[str]:
        return list_missing_ftfy_warnings(captions, "Wan")

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (self.info.text_tokens, self.info.transformer_config["text_dim"])
        return {"prompt_embeds": (torch.Size(size), dtype)}

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load Wan's pipeline with only its text encoder: no transformer and no image encoder."""
        # Entries of components are [library, class]; other entries are options of the pipeline.
        index = read_component_config(self.info.path)
        components = [name for name, value in index.items() if isinstance(value, list)]
        unused = dict.fromkeys(name for name in components if name not in _TEXT_COMPONENTS)
        return self._load_text_pipeline(dtype, device, **unused)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load UMT5 as the pipeline uses it: with its attention mask, and zeros for masked tokens."""
        return make_padded_encoder(self.load_text_pipeline(dtype, device), self.info.text_tokens, device)


@dataclass(frozen=True, kw_only=True)
class WanDenoiser(FlowDenoiser):
    """Wan's transformer and loss, for all tasks. The tasks differ only in the conditioning."""

    info: WanInfo
    transformer_class: ClassVar[Any] = WanTransformer3DModel

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents; equal to one call of the stock pipeline.

        For TI2V-5B without an image, the pipeline repeats the timestep for every token. One timestep per sample gives
        the same result without computing the modulation of every token.
        """
        # Without random tensors, every sample keeps its image.
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
        # (B,), or (B, F) where the first frame is given clean.
        timesteps = self.conditioning.token_timesteps(timesteps, batch, random_tensors)
        if timesteps.ndim == 2:
            # One timestep per latent frame. The pipeline takes one per token: (B, F) -> (B, S).
            _, patch_height, patch_width = self.info.transformer_config["patch_size"]
            tokens = (noisy.shape[3] // patch_height) * (noisy.shape[4] // patch_width)
            timesteps = timesteps[:, :, None].expand(-1, -1, tokens).flatten(1)
        # 2.1 and A14B with an image: mask and condition are further channels.
        hidden = self.conditioning.append_channels(noisy, batch, random_tensors)
        prompt_embeds = batch["prompt_embeds"]
        image_embeds = batch.get("image_embeds")
        if image_embeds is not None:
            # (B, images, P, width) -> (B * images, P, width), as the transformer expects.
            image_embeds = image_embeds.flatten(0, -3).to(prompt_embeds.dtype)
        return transformer(
            hidden_states=hidden.to(prompt_embeds.dtype),
            timestep=timesteps,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class WanSampler(Sampler):
    """Wan's pipeline arguments for text-to-video."""

    info: WanInfo
    frames_argument = "num_frames"

    @property
    def fp32_components(self) -> tuple[str, ...]:
        """Components of Wan's pipeline that stay in fp32: the VAE, as in Diffusers' examples."""
        return ("vae",)

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), "max_sequence_length": self.info.text_tokens}
