"""Latte text-to-video (Latte-1): noise prediction with a learned variance; attention alternates over space and time.

Text, token masks and denoising are those of the stock pipeline (diffusers/pipelines/latte/pipeline_latte.py).
Diffusers has only the text model: Latte's class-conditional and unconditional checkpoints (UCF101, SkyTimelapse,
FaceForensics, Taichi) have no Diffusers class and are not supported. Use the family `video_dit` for classes.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, LattePipeline, LatteTransformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, CheckpointInfo, Encoders, Sampler, Tensors, TensorSpec, TextEncoder
from dit_lora.families.captions import build_text_attention_bias, get_caption_spec, trim_text_padding
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.noise_prediction import (
    FRAMES_TRANSFORM,
    NoiseDenoiser,
    compute_spatial_factor,
    encode_frames,
    has_variance_channels,
    read_noise_objective,
)
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import side_errors

TEXT_TOKENS = 120  # pipeline_latte.py, encode_prompt: max_length


@dataclass(frozen=True, kw_only=True)
class LatteInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a Latte text-to-video checkpoint."""

    pipeline_class: ClassVar[Any] = LattePipeline
    text_tokens: ClassVar[int] = TEXT_TOKENS

    @property
    def size_multiple(self) -> int:
        return compute_spatial_factor(self.vae_config) * self.transformer_config["patch_size"]

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape that Latte does not support.

        Frames must match the temporal position table, or be 1; height and width must be multiples of 16.
        """
        problems = side_errors(shape, self.size_multiple)
        # One frame is trained as an image, without temporal attention between frames.
        frames = self.transformer_config["video_length"]
        if shape.frames not in (1, frames):
            problems.append(
                f"data.frames must be {frames}, as its config's video_length, or 1 for images; got {shape.frames}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class LatteEncoders(Encoders):
    vae_class = AutoencoderKL
    transform = FRAMES_TRANSFORM

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": TEXT_TOKENS}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(TEXT_TOKENS, self.info.transformer_config["caption_channels"], dtype, "prompt_mask")

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 as Latte's pipeline uses it: all 120 tokens with padding, and a mask of the text tokens.

        Captions are only lower-cased: the pipeline's `clean_caption` has no effect unless ftfy and bs4 are installed.
        """
        pipeline = self.load_text_pipeline(dtype, device)

        @torch.no_grad()
        def encode(captions: Sequence[str]) -> Tensors:
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                do_classifier_free_guidance=False,
                mask_feature=False,
                clean_caption=False,
                device=device,
            )
            # encode_prompt returns no mask, so tokenize once more in the same way.
            tokens = pipeline.tokenizer(
                pipeline._text_preprocessing(list(captions)),
                padding="max_length",
                max_length=TEXT_TOKENS,
                truncation=True,
                return_tensors="pt",
            )
            return {"prompt_embeds": embeddings, "prompt_mask": tokens.attention_mask.bool()}

        return encode

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_frames(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class LatteDenoiser(NoiseDenoiser):
    transformer_class: ClassVar[Any] = LatteTransformer3DModel

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCFHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the noise, followed by the variance's fraction: (B, 2 C, F, H, W).

        Each sample attends only to its own text. The pipeline truncates a prompt to its length; here a batch is
        truncated to its longest caption, and an attention bias masks the padding of the others.
        """
        # Truncate to the longest caption of the batch; no mask is left if all have that length.
        embeddings, mask = trim_text_padding(batch["prompt_embeds"], batch["prompt_mask"])
        bias = None if mask is None else build_text_attention_bias(mask, embeddings)
        if bias is not None:  # spatial blocks have one row per frame
            bias = bias.repeat_interleave(noisy_BCFHW.shape[2], dim=0)
        return transformer(
            hidden_states=noisy_BCFHW.to(embeddings.dtype),
            encoder_hidden_states=embeddings,
            encoder_attention_mask=bias,
            timestep=timesteps,
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class LatteSampler(Sampler):
    frames_argument = "video_length"

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Latte's pipeline arguments for a prompt.

        Embeddings have no padding; of the empty prompt, as many tokens are passed.
        """
        if isinstance(prompt, str):
            return {"prompt": prompt, "clean_caption": False}
        # The number of text tokens, end token included.
        num_tokens = int(prompt["prompt_mask"].sum())
        arguments = {"prompt_embeds": prompt["prompt_embeds"][:, :num_tokens], "negative_prompt": None}
        if empty_prompt:
            arguments["negative_prompt_embeds"] = empty_prompt["prompt_embeds"][:, :num_tokens]
        return arguments

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        # Decode one frame at a time, as frames are encoded.
        return {**super().shape_kwargs(shape), "decode_chunk_size": 1}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Latte checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(model, family.pipeline_names, vae_class=AutoencoderKL)
    config = fields["transformer_config"]
    # null means as many as in_channels.
    config["out_channels"] = config.get("out_channels") or config["in_channels"]
    if not has_variance_channels(model.path, config):
        raise DitLoraError(
            f"{model.path}: LattePipeline takes the first half of what its transformer gives as the noise, "
            f"so out_channels must be {2 * config['in_channels']}; got {config['out_channels']}"
        )
    # Older files lack this option: use the model's default.
    config.setdefault("video_length", 16)
    info = LatteInfo(**fields)
    denoiser = LatteDenoiser(info=info, objective=read_noise_objective(model, info.path))
    return Checkpoint.from_denoiser(denoiser, LatteEncoders, LatteSampler)
