"""ERNIE-Image text-to-image: flow matching on FLUX.2's latents, conditioned on Ministral 3's second to last layer.

Prompts, patches and denoising call the stock pipeline's own code
(diffusers/pipelines/ernie_image/pipeline_ernie_image.py). Its prompt enhancer, a second language model that rewrites
prompts before they are encoded, is neither loaded nor used: training and samples see captions as they are.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size. The network sees patches of 2 x 2
latents, (B, 4 C, H / 2, W / 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLFlux2, ErnieImagePipeline, ErnieImageTransformer2DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
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
from dit_lora.families.captions import get_caption_spec, get_unpadded_kwargs, make_unpadded_encoder, trim_text_padding
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, read_flow_scheduler
from dit_lora.families.latents import encode_picture
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import image_frames_errors, is_named_distilled, side_errors
from dit_lora.numerics.streams import move_to_device

MAX_TEXT_TOKENS = 512
"""Number of tokens that captions are truncated to, and padded to in the cache.

The pipeline has no limit but the tokenizer's, and the cache needs one. It is the other families' of this kind.
"""
# A constant of the pipeline's decoding (ErnieImagePipeline.__call__); the VAE's config has another value.
_BATCH_NORM_EPS = 1e-5
# The prompt enhancer's components.
_ENHANCER: Mapping[str, Any] = {"pe": None, "pe_tokenizer": None}


@dataclass(frozen=True, kw_only=True)
class ErnieImageInfo(CheckpointInfo):
    """Info (configs, supported shapes) of an ERNIE-Image checkpoint."""

    pipeline_class: ClassVar[Any] = ErnieImagePipeline
    text_tokens: ClassVar[int] = MAX_TEXT_TOKENS

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor, which includes its patches of 2 x 2 latents, times the transformer's patch.
        return int(2 ** len(self.vae_config["block_out_channels"]) * self.transformer_config["patch_size"])

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return [*side_errors(shape, self.size_multiple), *image_frames_errors(shape.frames, "ERNIE-Image")]

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        name = recipe.model.path
        if self.from_scratch is not None or recipe.has_distillation_safeguard or not is_named_distilled(name):
            return []
        return [
            f"distilled: {name} is ERNIE-Image-Turbo by its name (no file of it says so): training it directly breaks "
            "sampling in eight steps. Train baidu/ERNIE-Image and sample from this one with validation.model, or set "
            "train.target: guided"
        ]


@dataclass(frozen=True, kw_only=True)
class ErnieImageEncoders(Encoders):
    info: ErnieImageInfo
    vae_class = AutoencoderKLFlux2
    transform = (
        "ernie-image-1: pixels / 127.5 - 1, posterior mean and logvar, normalised in patches of two by two, fp32"
    )

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": MAX_TEXT_TOKENS}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(MAX_TEXT_TOKENS, self.info.transformer_config["text_in_dim"], dtype)

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        return _limit_text(self._load_text_pipeline(dtype, device, **_ENHANCER))

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Ministral 3 as ERNIE-Image's pipeline uses it: captions without a template or padding.

        The cache pads embeddings with zeros to one length and keeps a mask.
        """
        pipeline = self.load_text_pipeline(dtype, device)
        return make_unpadded_encoder(lambda caption: pipeline.encode_prompt(caption, device)[0], MAX_TEXT_TOKENS)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """Posterior of an image, (C, H, W), normalised with the VAE's statistics of each place in a patch.

        It is the inverse of the end of the pipeline.
        """
        posterior = {name: _patchify(tensor[None].float()) for name, tensor in encode_picture(vae, pixels).items()}
        shift, variance = (values.float().view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
        variance = variance + _BATCH_NORM_EPS
        normalized = {
            "latent_mean": (posterior["latent_mean"] - shift) / variance.sqrt(),
            "latent_logvar": posterior["latent_logvar"] - variance.log(),
        }
        return {name: ErnieImagePipeline._unpatchify_latents(tensor)[0] for name, tensor in normalized.items()}


@dataclass(frozen=True, kw_only=True)
class ErnieImageDenoiser(FlowDenoiser):
    info: ErnieImageInfo
    transformer_class: ClassVar[Any] = ErnieImageTransformer2DModel

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        # The cached ones are normalised.
        return latents

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return _patchify(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of patches; equal to one call of the stock pipeline.

        The transformer gets the text's length of each sample, and masks its padding.
        """
        mask = batch["prompt_attention_mask"]
        text, _ = trim_text_padding(batch["prompt_embeds"], mask)
        return transformer(
            hidden_states=noisy.to(text.dtype),
            # Rounded to the latents' dtype, as in the pipeline: in bf16 the network sees 8 bits of the timestep.
            timestep=timesteps.to(text.dtype),
            text_bth=text,
            text_lens=move_to_device(mask.sum(1), text.device),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class ErnieImageSampler(Sampler):
    info: ErnieImageInfo
    output_field = "images"

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        return _limit_text(self._load_pipeline(dtype, transformer, text, **_ENHANCER))

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return get_unpadded_kwargs(prompt, empty_prompt)


def _patchify(latents: torch.Tensor) -> torch.Tensor:
    """Patches (B, 4 C, H / 2, W / 2) of latents (B, C, H, W), made with the pipeline's method."""
    return ErnieImagePipeline._patchify_latents(latents)


def _limit_text(pipeline: Any) -> Any:
    """The pipeline with its tokenizer, if any, set to truncate prompts to `MAX_TEXT_TOKENS`."""
    if pipeline.tokenizer is not None:
        pipeline.tokenizer.model_max_length = min(pipeline.tokenizer.model_max_length, MAX_TEXT_TOKENS)
    return pipeline


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an ERNIE-Image checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(model, family.pipeline_names, transformer_class=ErnieImageTransformer2DModel)
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(
            f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting), for which ErnieImagePipeline "
            "has no rule; ERNIE-Image's checkpoints have one shift"
        )
    info = ErnieImageInfo(**fields)
    denoiser = ErnieImageDenoiser(info=info, objective=build_flow_matching(scheduler))
    return Checkpoint.from_denoiser(denoiser, ErnieImageEncoders, ErnieImageSampler)
