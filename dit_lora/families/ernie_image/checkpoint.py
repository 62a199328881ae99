"""ERNIE-Image text-to-image: flow matching on FLUX.2's latents, conditioned on Ministral 3's second to last layer.

Prompts, patches and denoising call the stock pipeline's own code
(diffusers/pipelines/ernie_image/pipeline_ernie_image.py). Its prompt enhancer, a second language model that rewrites
prompts before they are encoded, is neither loaded nor used: training and samples see captions as they are.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size. The network sees patches of 2 x 2
latents, (B, 4 C, H / 2, W / 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLFlux2, ErnieImagePipeline, ErnieImageTransformer2DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.pretrained import load_pretrained
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
    TextLimit,
)
from dit_lora.families.captions import load_text_limit, make_unpadded_encoder, trim_text_padding, unpad_captions
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, read_flow_scheduler
from dit_lora.families.latents import compute_packed_loss_weights, encode_picture, sample_posterior
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import image_frames_errors, is_named_distilled, side_errors
from dit_lora.numerics.streams import DrawFunctions, draw_normal_noise, move_to_device

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

    def load_text_limit(self) -> TextLimit:
        return load_text_limit(self.info.path, MAX_TEXT_TOKENS)

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": MAX_TEXT_TOKENS}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (MAX_TEXT_TOKENS, self.info.transformer_config["text_in_dim"])
        return {
            "prompt_embeds": (torch.Size(size), dtype),
            "prompt_attention_mask": (torch.Size(size[:1]), torch.bool),
        }

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = load_pretrained(
            self.info.pipeline_class,
            self.info.path,
            transformer=None,
            vae=None,
            dtype=dtype,
            use_safetensors=True,
            **_ENHANCER,
        )
        return _limit_text(pipeline.to(device))

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

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        patches = _patchify(torch.empty(batch["latent_mean"].shape, device="meta"))
        return {**super().get_random_input_samplers(batch), "noise": partial(draw_normal_noise, patches.shape[1:])}

    def clean_latents(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """ERNIE-Image's clean training patches, sampled from the posterior. The cached latents are normalized."""
        return _patchify(sample_posterior(batch["latent_mean"], batch["latent_logvar"], random_tensors["posterior"]))

    def compute_mask_loss_weights(self, batch: TensorMap) -> torch.Tensor | None:
        return compute_packed_loss_weights(batch, self.mask_floor, _patchify)

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
        # The pipeline takes a list of embeddings without padding, one per caption.
        captions = _unpad(prompt)
        arguments: dict[str, Any] = {"prompt_embeds": captions}
        if empty_prompt:
            empty = _unpad(empty_prompt)
            arguments["negative_prompt_embeds"] = empty * (len(captions) // len(empty))
        return arguments


def _patchify(latents: torch.Tensor) -> torch.Tensor:
    """Patches (B, 4 C, H / 2, W / 2) of latents (B, C, H, W), made with the pipeline's method."""
    return ErnieImagePipeline._patchify_latents(latents)


def _unpad(text: Tensors) -> list[torch.Tensor]:
    return unpad_captions(text["prompt_embeds"], text["prompt_attention_mask"])


def _limit_text(pipeline: Any) -> Any:
    """The pipeline with its tokenizer, if any, set to truncate prompts to `MAX_TEXT_TOKENS`."""
    if pipeline.tokenizer is not None:
        pipeline.tokenizer.model_max_length = min(pipeline.tokenizer.model_max_length, MAX_TEXT_TOKENS)
    return pipeline


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an ERNIE-Image checkpoint.

    Raises `DitLoraError` for another pipeline or scheduler, or broken weight files.
    """
    _, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=("vae", "text_encoder"),
        transformer_class=ErnieImageTransformer2DModel,
    )
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(
            f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting), for which ErnieImagePipeline "
            "has no rule; ERNIE-Image's checkpoints have one shift"
        )
    info = ErnieImageInfo(**fields)
    return Checkpoint(
        info=info,
        encoders=ErnieImageEncoders(info=info),
        denoiser=ErnieImageDenoiser(info=info, objective=build_flow_matching(scheduler)),
        sampler=ErnieImageSampler(info=info),
    )
