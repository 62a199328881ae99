"""AuraFlow text-to-image: flow matching on latents of Stable Diffusion XL's VAE, conditioned on Pile-T5.

Prompts and denoising call the stock pipeline's own code (diffusers/pipelines/aura_flow/pipeline_aura_flow.py).

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
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
from dit_lora.families.captions import make_caption_encoder
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, read_flow_scheduler
from dit_lora.families.latents import encode_picture
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import image_frames_errors, position_limit_errors, side_errors


@dataclass(frozen=True, kw_only=True)
class AuraFlowInfo(CheckpointInfo):
    """Info (configs, supported shapes) of an AuraFlow checkpoint."""

    pipeline_class: ClassVar[Any] = AuraFlowPipeline

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor times the patch size.
        factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        return int(factor * self.transformer_config["patch_size"])

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        # Positions are cut from the centre of a learned square table.
        max_side = math.isqrt(self.transformer_config["pos_embed_max_size"]) * self.size_multiple
        sides = {"height": (shape.height, max_side), "width": (shape.width, max_side)}
        return [
            *side_errors(shape, self.size_multiple),
            *position_limit_errors(sides, "pos_embed_max_size"),
            *image_frames_errors(shape.frames, "AuraFlow"),
        ]


@dataclass(frozen=True, kw_only=True)
class AuraFlowEncoders(Encoders):
    info: AuraFlowInfo
    vae_class = AutoencoderKL
    transform = "aura-flow-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        width = self.info.transformer_config["joint_attention_dim"]
        return {"prompt_embeds": (torch.Size((self.info.text_tokens, width)), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Pile-T5 as the pipeline uses it: the embeddings of padding are zero, and are attended to."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # (1, T, D)
            embeddings = pipeline.encode_prompt(
                caption,
                do_classifier_free_guidance=False,
                device=device,
                max_sequence_length=self.info.text_tokens,
            )[0]
            return {"prompt_embeds": embeddings}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_picture(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class AuraFlowDenoiser(FlowDenoiser):
    info: AuraFlowInfo
    transformer_class: ClassVar[Any] = AuraFlowTransformer2DModel

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of latents (B, C, H, W); equal to one call of the stock pipeline."""
        prompt_embeds = batch["prompt_embeds"]
        dtype = prompt_embeds.dtype  # also the dtype of the pipeline's latents and timesteps
        return transformer(
            noisy.to(dtype),
            encoder_hidden_states=prompt_embeds,
            timestep=(timesteps / self.num_train_timesteps).to(dtype),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class AuraFlowSampler(Sampler):
    info: AuraFlowInfo
    output_field = "images"

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        arguments = super().prompt_kwargs(prompt, empty_prompt)
        # The pipeline asks for a mask next to embeddings. It only masks embeddings that it computes itself.
        for name in [name for name in arguments if name.endswith("prompt_embeds")]:
            arguments[name.replace("embeds", "attention_mask")] = torch.ones(arguments[name].shape[:2])
        return arguments


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an AuraFlow checkpoint.

    Raises `DitLoraError` for another pipeline or scheduler, or broken weight files.
    """
    _, fields = read_checkpoint(model, family.pipeline_names, transformer_class=AuraFlowTransformer2DModel)
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(f"{model.path}: its scheduler shifts by size, which AuraFlow's pipeline cannot do")
    denoiser = AuraFlowDenoiser(info=AuraFlowInfo(**fields), objective=build_flow_matching(scheduler))
    # All roles share the denoiser's info.
    return Checkpoint.from_denoiser(denoiser, AuraFlowEncoders, AuraFlowSampler)
