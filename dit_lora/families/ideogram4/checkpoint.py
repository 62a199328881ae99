"""Ideogram 4 text-to-image: flow matching on FLUX.2's autoencoder, conditioned on 13 layers of Qwen3-VL.

Prompts, the sequence of text and image, the shift by resolution and denoising call the stock pipeline's own code
(diffusers/pipelines/ideogram4/pipeline_ideogram4.py). The network's time and velocity are reversed. A second
transformer, which sees no text, serves guidance. It gets no adapter, as in Diffusers' script and in musubi-tuner.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size, S image tokens (H W / 4), P
packed channels (4 C).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLFlux2, Ideogram4Pipeline, Ideogram4Transformer2DModel
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS, _resolution_aware_mu
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.safetensors_files import read_header
from dit_lora.errors import DitLoraError
from dit_lora.families.base import (
    Checkpoint,
    CheckpointInfo,
    Encoders,
    Sampler,
    Sampling,
    TensorMap,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
)
from dit_lora.families.captions import get_caption_spec, make_unpadded_encoder, unpad_captions
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, read_flow_scheduler
from dit_lora.families.ideogram4.text import MAX_TEXT_TOKENS, EmbeddedPromptPipeline, count_prompt_tokens
from dit_lora.families.latents import PACK_SIZE, compute_token_grid, encode_picture
from dit_lora.families.opening import get_call_default, read_checkpoint
from dit_lora.families.refusals import image_frames_errors, side_errors
from dit_lora.numerics.noise_levels import NoiseLevelDistribution
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.numerics.streams import move_to_device


@dataclass(frozen=True, kw_only=True)
class Ideogram4Info(CheckpointInfo):
    """Info (configs, supported shapes) of an Ideogram 4 checkpoint."""

    pipeline_class: ClassVar[Any] = Ideogram4Pipeline

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor, times its patches of 2 x 2 latents.
        return int(2 ** len(self.vae_config["block_out_channels"]))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return [*side_errors(shape, self.size_multiple), *image_frames_errors(shape.frames, "Ideogram 4")]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        if recipe.train.target == "guided":
            raise DitLoraError(
                "train.target: guided: Ideogram 4's guidance compares with its unconditional transformer, which is "
                "not loaded in training; remove it"
            )
        return super().copy_with_recipe_settings(recipe, training_options)

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        note = "data.caption_dropout: Ideogram 4 is never sampled with an empty caption; set it to 0"
        return [note] if recipe.data.caption_dropout else []


@dataclass(frozen=True, kw_only=True)
class Ideogram4Encoders(Encoders):
    info: Ideogram4Info
    vae_class = AutoencoderKLFlux2
    transform = "ideogram4-1: pixels / 127.5 - 1, posterior mean, normalised in squares of two by two, fp32"

    def load_text_limit(self) -> TextLimit:
        """Load Ideogram 4's caption limit, not counting the chat template's tokens around the caption."""
        tokenizer = self.load_tokenizer()
        return TextLimit(tokenizer, MAX_TEXT_TOKENS - count_prompt_tokens(tokenizer, ""))

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": MAX_TEXT_TOKENS, "layers": list(QWEN3_VL_ACTIVATION_LAYERS)}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(MAX_TEXT_TOKENS, self.info.transformer_config["llm_features_dim"], dtype)

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        unused = dict.fromkeys(("unconditional_transformer", "prompt_enhancer_head"))
        return EmbeddedPromptPipeline(**self._load_text_pipeline(dtype, device, **unused).components)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen3-VL as the pipeline uses it. The cache pads embeddings on the right and keeps a mask."""
        pipeline = self.load_text_pipeline(dtype, device)
        return make_unpadded_encoder(lambda caption: pipeline.embed_caption(caption).to(dtype), MAX_TEXT_TOKENS)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """Mean of an image's posterior, (C, H, W), normalised: the inverse of the end of the pipeline."""
        latents = encode_picture(vae, pixels)["latent_mean"].float()
        shift, variance = (
            # From one value for each packed channel, (y, x, C), to (C, H, W).
            values.float().view(PACK_SIZE, PACK_SIZE, -1).permute(2, 0, 1).tile(1, *compute_token_grid(latents))
            for values in (vae.bn.running_mean, vae.bn.running_var)
        )
        return {"latent_mean": (latents - shift) / (variance + vae.config.batch_norm_eps).sqrt()}


@dataclass(frozen=True, kw_only=True)
class Ideogram4Denoiser(FlowDenoiser):
    info: Ideogram4Info
    transformer_class: ClassVar[Any] = Ideogram4Transformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        height, width = (side * self.info.size_multiple // PACK_SIZE for side in size[-2:])
        return _resolution_aware_mu(height, width, base_mu=get_call_default(Ideogram4Pipeline, "mu"))

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        # The cached ones are normalised.
        return latents

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """Pack latents (B, C, H, W) into tokens (B, S, P): the inverse of the pipeline's unpacking.

        FLUX.2 has another order.
        """
        batch, channels, height, width = latents.shape
        squares = latents.view(batch, channels, height // PACK_SIZE, PACK_SIZE, width // PACK_SIZE, PACK_SIZE)
        # (B, C, rows, y, columns, x) to (B, rows, columns, y, x, C)
        return squares.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline.

        Captions are padded on the left to the longest one of the batch, the pipeline's `max_sequence_length`.
        """
        captions = unpad_captions(batch["prompt_embeds"], batch["prompt_attention_mask"])
        num_text, grid = max(map(len, captions)), compute_token_grid(batch["latent_mean"])
        features, *ids = EmbeddedPromptPipeline.encode_prompt(captions, *grid, num_text, torch.device("cpu"))
        position_ids, segment_ids, indicator = (move_to_device(tensor, noisy.device) for tensor in ids)
        output = transformer(
            # Zeros in place of the text.
            hidden_states=nn.functional.pad(noisy, (0, 0, num_text, 0)).to(features.dtype),
            # From 0 at pure noise to 1 at a clean image. Rounded last, as in the pipeline.
            timestep=(1.0 - timesteps / self.num_train_timesteps).to(features.dtype),
            encoder_hidden_states=features,
            position_ids=position_ids,
            segment_ids=segment_ids,
            indicator=indicator,
            return_dict=False,
        )[0]
        # The network's time and velocity are reversed.
        return -output[:, num_text:]  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Ideogram4Sampler(Sampler):
    info: Ideogram4Info
    output_field = "images"
    guidance_batch_size = 1  # guidance is a call of the other transformer
    num_guidance_transformers = 1

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        stock = self._load_pipeline(dtype, transformer, text, prompt_enhancer_head=None)
        return EmbeddedPromptPipeline(**stock.components)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Arguments of the pipeline, without an empty prompt: the unconditional transformer sees no text."""
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return {"prompt": unpad_captions(prompt["prompt_embeds"], prompt["prompt_attention_mask"])}

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        # By default the pipeline has a guidance for each of 48 steps, and refuses another one beside it.
        return {"guidance_schedule": None}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an Ideogram 4 checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=("vae", "text_encoder", "unconditional_transformer"),
        transformer_class=Ideogram4Transformer2DModel,
    )
    # Ideogram's nf4 says so in its config. Its fp8 has the published layout, with one layer for query, key and value.
    files = (fields["path"] / "transformer").glob("*.safetensors")
    has_published_layout = any(".attention.qkv." in name for file in files for name in read_header(file).tensors)
    if has_published_layout or "quantization_config" in fields["transformer_config"]:
        raise DitLoraError(
            f"{model.path} is Ideogram's fp8 or nf4, or quantized otherwise; give a copy in 16 bits in Diffusers' "
            "layout, and model.quantize if it does not fit"
        )
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(f"{model.path}: use_dynamic_shifting of its scheduler: Ideogram4Pipeline shifts by itself")
    info = Ideogram4Info(**fields)
    # The pipeline's schedule, with which Diffusers' script trains: logit-normal, its mean moved by
    # `compute_shift_mu`, which is the logarithm of a shift.
    levels = NoiseLevelDistribution(std=get_call_default(Ideogram4Pipeline, "std"))
    denoiser = Ideogram4Denoiser(info=info, objective=FlowMatching(None, scheduler["num_train_timesteps"], levels))
    return Checkpoint.from_denoiser(denoiser, Ideogram4Encoders, Ideogram4Sampler)
