"""Qwen-Image 2.1 text-to-image: flow matching on the latents of an RGBA autoencoder, conditioned on Qwen3-VL.

Text attends to the text before it, image tokens to everything. Prompts, the shift by resolution and denoising call the
stock pipeline's own code (diffusers/pipelines/qwenimage21). Its reference images are not trained.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size, S image tokens (H W).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.families.base import Checkpoint, Sampling, TensorMap, Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.families.captions import get_caption_spec, make_caption_encoder, unpad_captions
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu
from dit_lora.families.latents import PACK_SIZE, encode_video
from dit_lora.families.qwen_image.checkpoint import QwenImageSampler, pad_caption
from dit_lora.families.qwen_image21.known_layout import use_shape_based_layout
from dit_lora.families.qwen_image21.text import MAX_TEXT_TOKENS, load_processor, read_template
from dit_lora.families.qwen_latents import QwenLatentsEncoders, QwenLatentsInfo, read_qwen_latents_checkpoint


@dataclass(frozen=True, kw_only=True)
class QwenImage21Info(QwenLatentsInfo):
    """Info (configs, supported shapes) of a Qwen-Image 2.1 checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImage21Pipeline
    text_tokens: ClassVar[int] = MAX_TEXT_TOKENS
    sample_sigmas: tuple[float, ...] | None
    """Noise levels that Turbo is sampled at, from its model_index.json; None for the base."""

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor, times two: it counts image tokens in squares of two by two.
        return int(PACK_SIZE * 2 ** (len(self.vae_config["dim_mult"]) - 1))

    def pipeline_components(self) -> dict[str, Any]:
        return {"processor": load_processor(self.path)}

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        if self.from_scratch is not None or recipe.has_distillation_safeguard or self.sample_sigmas is None:
            return []
        return [
            f"distilled: {recipe.model.path} is sampled in {len(self.sample_sigmas)} steps of its own, as Turbo is "
            "(sample_sigmas in its model_index.json): training it directly breaks that. Train Qwen/Qwen-Image-2.1 and "
            "sample from this one with validation.model, or set train.target: guided"
        ]


@dataclass(frozen=True, kw_only=True)
class QwenImage21Encoders(QwenLatentsEncoders):
    info: QwenImage21Info
    vae_class = AutoencoderKLQwenImage21
    transform = "qwen-image-2.1-1: pixels / 127.5 - 1, alpha 1, posterior mean and logvar of one frame, fp32"

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        # (1, 3, height, width) to RGBA, as the pipeline gives the VAE an image without an alpha channel.
        opaque = pixels.new_full((len(pixels), 1, *pixels.shape[-2:]), 255)
        return encode_video(vae, torch.cat([pixels, opaque], dim=1))

    def load_text_limit(self) -> TextLimit:
        """Load Qwen-Image 2.1's caption limit, not counting the template's tokens around the caption."""
        processor = load_processor(self.info.path)
        return TextLimit(processor.tokenizer, MAX_TEXT_TOKENS - processor.num_template_tokens)

    def text_cache_key(self) -> Mapping[str, Any]:
        files = {name: self.info.path / name for name in ("text_encoder", "processor")}
        return {**files, "tokens": MAX_TEXT_TOKENS, "template": read_template()}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(MAX_TEXT_TOKENS, self.info.transformer_config["context_in_dim"], dtype, "prompt_mask")

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen3-VL as Qwen-Image 2.1's pipeline uses it. Captions are padded with zeros and have a mask."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # Encode without other captions, so that nothing is padded, then pad to the cache's length.
            embeddings, _, _ = pipeline.encode_prompt(caption, device=device)
            return pad_caption(embeddings, MAX_TEXT_TOKENS)

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class QwenImage21Denoiser(FlowDenoiser):
    info: QwenImage21Info
    transformer_class: ClassVar[Any] = QwenImage21Transformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # One token per latent.
        return compute_mu(self.info.scheduler, size[-2] * size[-1])

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer: Any = super().load_transformer(dtype)
        use_shape_based_layout(transformer)
        return transformer  # type: ignore[no-any-return]

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """Tokens (B, S, C) of latents (B, C, 1, H, W), made with the pipeline's method."""
        batch, channels, _, height, width = latents.shape
        return QwenImage21Pipeline._pack_latents(latents, batch, channels, height, width)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of image tokens (B, S, C), with one call of the transformer for each sample.

        An image's positions begin where its text ends, so padding would move them. The number of calls depends only on
        the batch's size: ranks of DDP and FSDP must make equally many.
        """
        shape, predictions = (1, *batch["latent_mean"].shape[-2:]), []  # (frames, rows, columns)
        for row, text in enumerate(unpad_captions(batch["prompt_embeds"], batch["prompt_mask"])):
            num_text, num_image = text.shape[0], noisy.shape[1]
            # One value for each text token, and for each square of two by two image tokens.
            is_image = torch.arange(num_text + num_image // PACK_SIZE**2, device=text.device) >= num_text
            output = transformer(
                hidden_states=noisy[row : row + 1].to(text.dtype),  # the dtype of the pipeline's latents
                encoder_hidden_states=text[None],
                # Round before dividing, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
                timestep=timesteps[row : row + 1].to(text.dtype) / 1000,
                img_shapes=[[shape]],
                img_mask=is_image[None],
                return_dict=False,
            )[0]
            predictions.append(output[:, num_text:])
        return torch.cat(predictions)


@dataclass(frozen=True, kw_only=True)
class QwenImage21Sampler(QwenImageSampler):
    info: QwenImage21Info

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        sigmas, num_steps = self.info.sample_sigmas, sampling.inference_steps
        if sigmas is None or len(sigmas) == num_steps:
            return {}
        # With the checkpoint's own levels, the pipeline would ignore the number of steps.
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        """Generate one image, without the alpha channel of the pipeline's."""
        return super().generate(pipeline, prompt_kwargs, sampling)[..., :3]


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Qwen-Image 2.1 checkpoint. Raises as `DiffusionFamily.open` does."""
    index, fields = read_qwen_latents_checkpoint(
        model, family, QwenImage21Transformer2DModel, vae_class=AutoencoderKLQwenImage21, pack_size=1
    )
    sigmas = index.get("sample_sigmas")
    info = QwenImage21Info(**fields, sample_sigmas=None if sigmas is None else tuple(sigmas))
    denoiser = QwenImage21Denoiser(info=info, objective=build_flow_matching(info.scheduler))
    return Checkpoint.from_denoiser(denoiser, QwenImage21Encoders, QwenImage21Sampler)
