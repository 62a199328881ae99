"""Kandinsky 5.0 text-to-video: flow matching on HunyuanVideo's latents, conditioned on Qwen2.5-VL and CLIP.

Prompts, scales of positions and denoising call the stock pipeline's own code
(diffusers/pipelines/kandinsky5/pipeline_kandinsky.py). The pipeline hides no padding from the transformer, so samples
are predicted one by one, each with its own text.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5T2VPipeline, Kandinsky5Transformer3DModel
from diffusers.utils import is_ftfy_available
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.pretrained import load_pretrained
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
from dit_lora.families.captions import (
    get_caption_spec,
    list_missing_ftfy_warnings,
    make_caption_encoder,
    unpad_captions,
)
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, read_flow_scheduler
from dit_lora.families.flux.checkpoint import TEXT_COMPONENTS
from dit_lora.families.opening import build_empty_pipeline, read_checkpoint
from dit_lora.families.qwen_image.checkpoint import pad_caption
from dit_lora.families.qwen_image.picture_text import PictureProcessor
from dit_lora.families.refusals import frame_count_errors, is_named_distilled, position_limit_errors, side_errors

PIPELINE_MULTIPLE = 16  # required by check_inputs of the pipeline
_PATCH_SIZE = (1, 2, 2)  # assumed by the pipeline's positions
_MAX_POSITIONS = 128  # per axis, the default of Kandinsky5RoPE3D, which no config changes
# Words in the names of checkpoints that are sampled without guidance, or in 16 steps.
_DISTILLED_WORDS = ("nocfg", "distilled")


@dataclass(frozen=True, kw_only=True)
class Kandinsky5Info(CheckpointInfo):
    """Info (configs, supported shapes) of a Kandinsky 5.0 text-to-video checkpoint."""

    pipeline_class: ClassVar[Any] = Kandinsky5T2VPipeline

    @property
    def size_multiple(self) -> int:
        return lcm(PIPELINE_MULTIPLE, self.vae_config["spatial_compression_ratio"] * _PATCH_SIZE[-1])

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape that Kandinsky 5.0 does not support.

        Frames must be 4n + 1: the pipeline silently drops the rest.
        """
        temporal = self.vae_config["temporal_compression_ratio"]
        max_side = _MAX_POSITIONS * _PATCH_SIZE[-1] * self.vae_config["spatial_compression_ratio"]
        ends = {
            "frames": (shape.frames, (_MAX_POSITIONS - 1) * temporal + 1),
            "height": (shape.height, max_side),
            "width": (shape.width, max_side),
        }
        return [
            *side_errors(shape, self.size_multiple),
            *frame_count_errors(shape.frames, temporal),
            *position_limit_errors(ends, "max_pos of Kandinsky5RoPE3D"),
        ]

    def pipeline_components(self) -> dict[str, Any]:
        return {"tokenizer": load_pretrained(PictureProcessor, self.path / "tokenizer")}

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        name = recipe.model.path
        matches = [word for word in _DISTILLED_WORDS if is_named_distilled(name, word)]
        if self.from_scratch is not None or recipe.has_distillation_safeguard or not matches:
            return []
        return [
            f"distilled: {name} is distilled by its name ({matches[0]}; no file of it says so): training it directly "
            "breaks sampling without guidance. Train kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers and "
            "sample from this one with validation.model, or set train.target: guided"
        ]


@dataclass(frozen=True, kw_only=True)
class Kandinsky5Encoders(Encoders):
    info: Kandinsky5Info
    vae_class = AutoencoderKLHunyuanVideo
    transform = "kandinsky-5-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        # All text components, since a change of any of them changes the embeddings.
        folders = {name: self.info.path / name for name in TEXT_COMPONENTS}
        stock = build_empty_pipeline(self.info.pipeline_class)
        template = {"template": stock.prompt_template, "dropped": stock.prompt_template_encode_start_idx}
        return {**folders, **template, "tokens": self.info.text_tokens, "ftfy": is_ftfy_available()}

    def list_caption_warnings(self, captions: Iterable[str]) -> list[str]:
        return list_missing_ftfy_warnings(captions, "Kandinsky 5.0")

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        config = self.info.transformer_config
        return {
            **get_caption_spec(self.info.text_tokens, config["in_text_dim"], dtype, "prompt_mask"),
            "prompt_embeds_clip": (torch.Size((config["in_text_dim2"],)), dtype),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen2.5-VL and CLIP as the pipeline uses them. Captions are padded with zeros and have a mask."""
        pipeline, num_tokens = self.load_text_pipeline(dtype, device), self.info.text_tokens

        def encode_caption(caption: str) -> Tensors:
            # Encode without other captions, so that nothing is padded, then pad to the cache's length.
            # (1, T, D) and (1, CLIP width)
            embeddings, pooled, _ = pipeline.encode_prompt(caption, device=device, max_sequence_length=num_tokens)
            return {**pad_caption(embeddings, num_tokens), "prompt_embeds_clip": pooled}

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class Kandinsky5Denoiser(FlowDenoiser):
    info: Kandinsky5Info
    transformer_class: ClassVar[Any] = Kandinsky5Transformer3DModel

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer: Any = super().load_transformer(dtype)
        # Diffusers keeps this table as a plain attribute on the CPU, and would copy it to the device in every call.
        embeddings = transformer.time_embeddings
        frequencies = embeddings.freqs
        del embeddings.freqs
        embeddings.register_buffer("freqs", frequencies, persistent=False)
        return transformer  # type: ignore[no-any-return]

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of latents (B, C, F, H, W), with one call of the transformer for each sample.

        Padding would be attended to, as the transformer has no mask of text. The number of calls depends only on the
        batch's size: ranks of DDP and FSDP must make equally many.
        """
        text = batch["prompt_embeds"]
        hidden = noisy.to(text.dtype).permute(0, 2, 3, 4, 1)  # (B, F, H, W, C), in the dtype of the pipeline's latents
        if self.info.transformer_config["visual_cond"]:
            # Text-to-video: no frame is given, so the condition and its mask are zero.
            hidden = torch.cat([hidden, torch.zeros_like(hidden), torch.zeros_like(hidden[..., :1])], dim=-1)
        sides = [size * self.info.vae_config["spatial_compression_ratio"] for size in noisy.shape[-2:]]
        grid = [size // patch for size, patch in zip(noisy.shape[2:], _PATCH_SIZE, strict=True)]
        predictions = [
            transformer(
                hidden_states=hidden[row : row + 1],
                encoder_hidden_states=caption[None],
                # Rounded as in the pipeline: in bf16 the network sees 8 bits of the timestep.
                timestep=timesteps[row : row + 1].to(text.dtype),
                pooled_projections=batch["prompt_embeds_clip"][row : row + 1],
                visual_rope_pos=[torch.arange(size, device=text.device) for size in grid],
                text_rope_pos=torch.arange(len(caption), device=text.device),
                # The method does not use its `self`.
                scale_factor=Kandinsky5T2VPipeline._get_scale_factor(None, *sides),
                return_dict=False,
            )
            for row, caption in enumerate(unpad_captions(text, batch["prompt_mask"]))
        ]
        return torch.cat(predictions).permute(0, 4, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Kandinsky5Sampler(Sampler):
    info: Kandinsky5Info
    frames_argument = "num_frames"
    guidance_batch_size = 1  # guidance is a second call

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            # Not the pipeline's own negative prompt: guidance is away from what dropped captions train.
            return {"prompt": prompt, "negative_prompt": ""}
        return _embedding_kwargs("", prompt) | (_embedding_kwargs("negative_", empty_prompt) if empty_prompt else {})

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), "max_sequence_length": self.info.text_tokens}


def _embedding_kwargs(prefix: str, prompt: Tensors) -> dict[str, torch.Tensor]:
    """The pipeline's arguments for the embeddings of one prompt, without their padding."""
    (embeddings,) = unpad_captions(prompt["prompt_embeds"], prompt["prompt_mask"])
    return {
        f"{prefix}prompt_embeds_qwen": embeddings[None],
        f"{prefix}prompt_embeds_clip": prompt["prompt_embeds_clip"],
        f"{prefix}prompt_cu_seqlens": torch.tensor([0, len(embeddings)], dtype=torch.int32),
    }


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Kandinsky 5.0 text-to-video checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=("vae", "text_encoder", "text_encoder_2"),
        transformer_class=Kandinsky5Transformer3DModel,
        vae_class=AutoencoderKLHunyuanVideo,
    )
    _require_supported_configs(model, fields)
    info = Kandinsky5Info(**fields)
    objective = build_flow_matching(read_flow_scheduler(model, info.path))
    denoiser = Kandinsky5Denoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, Kandinsky5Encoders, Kandinsky5Sampler)


def _require_supported_configs(model: ModelConfig, fields: Mapping[str, Any]) -> None:
    config, channels = fields["transformer_config"], fields["vae_config"]["latent_channels"]
    if config["attention_type"] == "nabla":
        raise DitLoraError(
            f"{model.path}: its transformer has sparse attention (attention_type: nabla), as the checkpoints of "
            "ten-second clips and of Pro in HD, which is not trained here; use one of five-second clips, such as "
            "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers"
        )
    expected = {"in_visual_dim": channels, "out_visual_dim": channels, "patch_size": _PATCH_SIZE}
    stored = {**config, "patch_size": tuple(config["patch_size"])}
    problems = [
        f"{name} of its transformer must be {value}; got {stored[name]}"
        for name, value in expected.items()
        if stored[name] != value
    ]
    if problems:
        raise DitLoraError(format_list(f"{model.path}: the parts of this checkpoint do not fit", problems))
