"""Stable Diffusion 3 and 3.5 text-to-image: flow matching, conditioned on two CLIPs and T5.

Prompts and denoising call the stock pipeline's own code
(diffusers/pipelines/stable_diffusion_3/pipeline_stable_diffusion_3.py).

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families.base import (
    TEXT_COMPONENTS,
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
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu, read_flow_scheduler
from dit_lora.families.latents import encode_picture
from dit_lora.families.opening import read_checkpoint, read_component_config
from dit_lora.families.refusals import image_frames_errors, position_limit_errors, side_errors


@dataclass(frozen=True, kw_only=True)
class SD3Info(CheckpointInfo):
    """Info (configs, supported shapes) of a Stable Diffusion 3 or 3.5 checkpoint."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    clip_tokens: int
    """Number of CLIP tokens, which come before T5's."""
    pipeline_class: ClassVar[Any] = StableDiffusion3Pipeline

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor times the patch size.
        factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        return int(factor * self.transformer_config["patch_size"])

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        # Positions are cut from the centre of a larger square table.
        max_side = self.transformer_config["pos_embed_max_size"] * self.size_multiple
        ends = {"height": (shape.height, max_side), "width": (shape.width, max_side)}
        return [
            *side_errors(shape, self.size_multiple),
            *position_limit_errors(ends, "pos_embed_max_size"),
            *image_frames_errors(shape.frames, "Stable Diffusion 3"),
        ]

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """Default LoRA targets of SD3.

        They are the family's, the text queries of all blocks but the last, and the second attention of 3.5 medium. No
        layer reads the text after the last block, so an adapter on its queries there would never learn. Diffusers'
        script adapts them anyway. Since it names only `attn.`, it skips the `attn2` that 3.5 medium introduced.
        """
        config = self.transformer_config
        # Without the last block.
        blocks = range(config["num_layers"] - 1)
        queries = [f"transformer_blocks.{i}.attn.add_q_proj" for i in blocks]
        second = ("to_q", "to_k", "to_v", "to_out.0") if config["dual_attention_layers"] else ()
        return (*defaults, *queries, *(f"attn2.{name}" for name in second))


@dataclass(frozen=True, kw_only=True)
class SD3Encoders(Encoders):
    info: SD3Info
    vae_class = AutoencoderKL
    tokenizer_folder = "tokenizer_3"  # T5's. The CLIPs read the first 77 tokens of a caption.
    transform = "sd3-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        folders = {name: self.info.path / name for name in TEXT_COMPONENTS}
        return {**folders, "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        # CLIP's and T5's tokens follow each other in one sequence.
        config, tokens = self.info.transformer_config, self.info.clip_tokens + self.info.text_tokens
        return {
            "prompt_embeds": (torch.Size((tokens, config["joint_attention_dim"])), dtype),
            "pooled_prompt_embeds": (torch.Size((config["pooled_projection_dim"],)), dtype),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load both CLIPs and T5 as SD3's pipeline uses them; they and the transformer attend to all padding."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # (1, T, D) and (1, pooled width)
            embeddings, _, pooled, _ = pipeline.encode_prompt(
                prompt=caption,
                prompt_2=None,
                prompt_3=None,
                device=device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.info.text_tokens,
            )
            return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_picture(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class SD3Denoiser(FlowDenoiser):
    info: SD3Info
    transformer_class: ClassVar[Any] = SD3Transformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # The published schedulers have one shift; for others, the pipeline computes it from the number of patches.
        if not self.info.scheduler["use_dynamic_shifting"]:
            return super().compute_shift_mu(size)
        # Every patch is one token.
        num_patches = size[-2] * size[-1] // self.info.transformer_config["patch_size"] ** 2
        return compute_mu(self.info.scheduler, num_patches)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of latents (B, C, H, W); equal to one call of the stock pipeline."""
        prompt_embeds = batch["prompt_embeds"]
        return transformer(
            hidden_states=noisy.to(prompt_embeds.dtype),  # the dtype of the pipeline's latents
            timestep=timesteps,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=batch["pooled_prompt_embeds"],
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class SD3Sampler(Sampler):
    info: SD3Info
    output_field = "images"


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an SD3 checkpoint. Raises as `DiffusionFamily.open` does."""
    # Only the encoders among the text components have weights.
    weights = ("vae", *TEXT_COMPONENTS[::2])
    _, fields = read_checkpoint(model, family.pipeline_names, weights=weights, transformer_class=SD3Transformer2DModel)
    path = fields["path"]
    scheduler = read_flow_scheduler(model, path)
    info = SD3Info(
        **fields,
        scheduler=scheduler,
        clip_tokens=read_component_config(path, "text_encoder")["max_position_embeddings"],
    )
    denoiser = SD3Denoiser(info=info, objective=build_flow_matching(scheduler))
    return Checkpoint.from_denoiser(denoiser, SD3Encoders, SD3Sampler)
