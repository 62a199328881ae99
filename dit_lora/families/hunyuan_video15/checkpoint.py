"""HunyuanVideo-1.5 text-to-video: flow matching conditioned on Qwen2.5-VL, and on ByT5 for text in quotes.

Prompts and denoising call the stock pipeline's own code
(diffusers/pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py). The network's inputs for an image are zeros, as
there: latents of the image, their mask, and the image's embeddings.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import (
    Checkpoint,
    CheckpointInfo,
    Encoders,
    Sampler,
    TensorMap,
    Tensors,
    TensorSpec,
    TextEncoder,
)
from dit_lora.families.captions import make_caption_encoder
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, read_flow_scheduler
from dit_lora.families.guider import accept_guidance_scale
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import frame_count_errors, is_named_distilled, side_errors
from dit_lora.numerics.streams import move_to_device

TRAINING_SHIFT = 3.0
"""`train_timestep_shift` of Tencent's train.py, which draws a logit-normal density. Samples use the scheduler's."""
# Constants of the pipeline: prompt_template_encode_start_idx, tokenizer_max_length, tokenizer_2_max_length and
# vision_num_semantic_tokens.
_TEMPLATE_TOKENS = 108
MAX_TEXT_TOKENS = 1000
_MAX_QUOTE_TOKENS = 256
_IMAGE_TOKENS = 729
_TEXT_TENSORS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Info(CheckpointInfo):
    """Info (configs, supported shapes) of a HunyuanVideo-1.5 checkpoint."""

    pipeline_class: ClassVar[Any] = HunyuanVideo15Pipeline
    text_tokens: ClassVar[int] = MAX_TEXT_TOKENS

    @property
    def size_multiple(self) -> int:
        return int(self.vae_config["spatial_compression_ratio"])

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        name = recipe.model.path
        if recipe.has_distillation_safeguard or not is_named_distilled(name, "distill"):
            return []
        return [
            f"distilled: {name} is distilled by its name (no file of it says so): training it directly breaks "
            "sampling without guidance. Train hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v and sample "
            "from this one with validation.model, or set train.target: guided"
        ]

    def load_partial_pipeline(self, **components: Any) -> Any:
        if components.get("vae", self) is not None:
            return super().load_partial_pipeline(**components)
        # The pipeline's constructor reads the VAE's config, so it cannot be built with None.
        with torch.device("meta"):
            vae = HunyuanVideo15Encoders.vae_class.from_config(dict(self.vae_config))
        pipeline = super().load_partial_pipeline(**components | {"vae": vae})
        # Weights on the meta device cannot be moved to another one.
        pipeline.register_modules(vae=None)
        return pipeline

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        temporal = self.vae_config["temporal_compression_ratio"]
        return [*side_errors(shape, self.size_multiple), *frame_count_errors(shape.frames, temporal)]


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Encoders(Encoders):
    info: HunyuanVideo15Info
    vae_class = AutoencoderKLHunyuanVideo15
    transform = "hunyuan-video-1.5-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        path = self.info.path
        return {
            **super().text_cache_key(),
            "text_encoder_2": path / "text_encoder_2",
            "tokenizer_2": path / "tokenizer_2",
            # With the template's.
            "tokens": _TEMPLATE_TOKENS + MAX_TEXT_TOKENS,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        config = self.info.transformer_config
        return {
            "prompt_embeds": (torch.Size((MAX_TEXT_TOKENS, config["text_embed_dim"])), dtype),
            "prompt_embeds_mask": (torch.Size((MAX_TEXT_TOKENS,)), torch.bool),
            "prompt_embeds_2": (torch.Size((_MAX_QUOTE_TOKENS, config["text_embed_2_dim"])), dtype),
            "prompt_embeds_mask_2": (torch.Size((_MAX_QUOTE_TOKENS,)), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load both text encoders. Captions are padded to the pipeline's lengths and have masks."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            text, mask, quotes, quotes_mask = pipeline.encode_prompt(caption, device, dtype)
            return dict(zip(_TEXT_TENSORS, (text, mask.bool(), quotes, quotes_mask.bool()), strict=True))

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Denoiser(FlowDenoiser):
    info: HunyuanVideo15Info
    transformer_class: ClassVar[Any] = HunyuanVideo15Transformer3DModel

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents; equal to one call of the stock pipeline."""
        text = batch["prompt_embeds"]
        noisy = noisy.to(text.dtype)
        image_width = self.info.transformer_config["image_embed_dim"]
        return transformer(
            # (B, 2 C + 1, F, H, W): no image, and a mask without a given frame.
            hidden_states=torch.cat([noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])], dim=1),
            # Zeros tell the transformer that the task is text-to-video. It reads them, and both masks, so they are not
            # fake tensors where memory is counted.
            image_embeds=torch.zeros((len(text), _IMAGE_TOKENS, image_width), dtype=text.dtype, device=text.device),
            # Rounded to the latents' dtype, as in the pipeline: in bf16 the network sees 8 bits of the timestep.
            timestep=timesteps.to(text.dtype),
            encoder_hidden_states=text,
            # Masks may stay on the host (`HOST_TENSORS`).
            encoder_attention_mask=move_to_device(batch["prompt_embeds_mask"], text.device),
            encoder_hidden_states_2=batch["prompt_embeds_2"],
            encoder_attention_mask_2=move_to_device(batch["prompt_embeds_mask_2"], text.device),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Sampler(Sampler):
    info: HunyuanVideo15Info
    frames_argument = "num_frames"
    guidance_batch_size = 1  # the guider calls the transformer once for each condition

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        return accept_guidance_scale(self._load_pipeline(dtype, transformer, text))


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a HunyuanVideo-1.5 checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=("vae", "text_encoder", "text_encoder_2"),
        transformer_class=HunyuanVideo15Transformer3DModel,
        vae_class=AutoencoderKLHunyuanVideo15,
    )
    objective = build_flow_matching(read_flow_scheduler(model, fields["path"]))
    _require_text_to_video(model, fields["transformer_config"], fields["vae_config"])
    info = HunyuanVideo15Info(**fields)
    denoiser = HunyuanVideo15Denoiser(info=info, objective=replace(objective, shift=TRAINING_SHIFT))
    return Checkpoint.from_denoiser(denoiser, HunyuanVideo15Encoders, HunyuanVideo15Sampler)


def _require_text_to_video(model: ModelConfig, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    """Raise `DitLoraError` for wrong channels, patches above 1, and transformers that the pipeline cannot call."""
    channels = vae["latent_channels"]
    expected = {
        "in_channels": 2 * channels + 1,
        "out_channels": channels,
        "patch_size": 1,
        "patch_size_t": 1,
        "task_type": "t2v",
        # Transformers with it (super resolution, few steps) take a second timestep.
        "use_meanflow": False,
    }
    problems = [
        f"transformer: {name} must be {value}; got {transformer[name]}"
        for name, value in expected.items()
        if transformer[name] != value
    ]
    if problems:
        raise DitLoraError(format_list(f"{model.path}: this is not a text-to-video checkpoint", problems))
