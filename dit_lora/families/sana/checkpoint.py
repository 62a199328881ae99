"""Sana text-to-image, 1.0 and 1.5, all sizes: flow matching on latents of DC-AE, conditioned on Gemma 2.

Prompts and denoising call the stock pipeline's own code (diffusers/pipelines/sana/pipeline_sana.py). SANA-Video is
derived from these classes in `sana_video.checkpoint`.

Shapes: B batch, T text tokens, C latent channels, H and W latent size.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    UniPCMultistepScheduler,
)
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
from dit_lora.families.captions import build_text_attention_bias, get_caption_spec, make_caption_encoder
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser
from dit_lora.families.opening import (
    get_call_default,
    load_or_init_transformer,
    read_checkpoint,
    read_component_config,
)
from dit_lora.families.refusals import image_frames_errors, side_errors
from dit_lora.families.sana.attention import keep_linear_attention_fp32
from dit_lora.guard.stored_precision import read_stored_dtype
from dit_lora.numerics.objectives import FlowMatching

PIPELINE_MULTIPLE = 32  # required by check_inputs of both pipelines, for any autoencoder
# Key in a model_index.json that we write. Diffusers ignores keys that begin with an underscore.
_TRAINED_IN_KEY = "_trained_in"
# Checkpoints that Sana's model zoo lists as fp16 (NVlabs/Sana, asset/docs/model_zoo.md). Those in bf16 end in _BF16 or
# are SANA1.5.
_FP16_TRAINED_NAME = re.compile(r"Sana_(600M|1600M)_(512|1024)px(_MultiLing)?(_diffusers)?")


@dataclass(frozen=True, kw_only=True)
class SanaInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a Sana text-to-image checkpoint."""

    should_saturate: bool = False
    """True if it was trained in fp16, whose range its linear attention relies on."""
    pipeline_class: ClassVar[Any] = SanaPipeline

    @property
    def size_multiple(self) -> int:
        # DC-AE halves the sides between its stages.
        factor = 2 ** (len(self.vae_config["encoder_block_out_channels"]) - 1)
        return lcm(PIPELINE_MULTIPLE, factor * self.transformer_config["patch_size"])

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return [*side_errors(shape, self.size_multiple), *image_frames_errors(shape.frames, "Sana")]

    def model_index_changes(self) -> dict[str, Any]:
        """Changes to model_index.json that record fp16 training.

        A fully trained model is stored in fp32 but still relies on fp16's range.
        """
        return {_TRAINED_IN_KEY: "fp16"} if self.should_saturate else {}


@dataclass(frozen=True, kw_only=True)
class SanaEncoders(Encoders):
    info: SanaInfo
    vae_class: ClassVar[Any] = AutoencoderDC
    transform = "sana-1: pixels / 127.5 - 1, latent"

    def text_cache_key(self) -> Mapping[str, Any]:
        # The instruction is encoded with every caption, so the embeddings depend on it.
        return {**super().text_cache_key(), "tokens": self.info.text_tokens, "instruction": self._instruction}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        width = self.info.transformer_config["caption_channels"]
        return get_caption_spec(self.info.text_tokens, width, dtype, mask_dtype=torch.int64)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Gemma as Sana's pipeline uses it, with an instruction before each caption.

        Of the result, the first and the last 299 tokens are kept. "" is encoded without the instruction, like the
        pipeline's negative prompt.
        """
        pipeline, instruction = self.load_text_pipeline(dtype, device), self._instruction

        def encode_caption(caption: str) -> Tensors:
            # (1, T, D) and (1, T)
            embeddings, mask, _, _ = pipeline.encode_prompt(
                caption,
                do_classifier_free_guidance=False,
                device=device,
                max_sequence_length=self.info.text_tokens,
                complex_human_instruction=instruction if caption else None,
            )
            return {"prompt_embeds": embeddings, "prompt_attention_mask": mask}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        # DC-AE has no posterior. Latents are (C, H, W).
        return {"latent_mean": vae.encode(pixels.to(vae.device).float() / 127.5 - 1).latent[0]}

    @property
    def _instruction(self) -> Sequence[str]:
        return get_call_default(self.info.pipeline_class, "complex_human_instruction")


@dataclass(frozen=True, kw_only=True)
class SanaDenoiser(FlowDenoiser):
    info: SanaInfo
    transformer_class: ClassVar[Any] = SanaTransformer2DModel

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer = super().load_transformer(dtype)
        keep_linear_attention_fp32(transformer, should_saturate=self.info.should_saturate)
        return transformer

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents; equal to one call of the stock pipeline."""
        return predict_velocity(self.info, transformer, noisy, timesteps, batch)


@dataclass(frozen=True, kw_only=True)
class SanaSampler(Sampler):
    info: SanaInfo
    output_field = "images"
    fp32_components: ClassVar[tuple[str, ...]] = ("vae",)

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        """Load Sana's pipeline with the autoencoder in fp32, as Sana's and Diffusers' own scripts do.

        The transformer is clamped to fp16's range if the checkpoint relies on it.
        """
        if transformer is None and self.info.should_saturate:
            # Weights that were trained in fp16 are always loaded, never random.
            transformer = load_or_init_transformer(SanaTransformer2DModel, self.info.path, dtype, None)
            keep_linear_attention_fp32(transformer, should_saturate=True)
        return super().pipeline(dtype, transformer, text)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        arguments = super().prompt_kwargs(prompt, empty_prompt)
        # The pipeline rejects its default, "", together with embeddings.
        return {**arguments, "negative_prompt": None} if empty_prompt else arguments

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        # Without binning, which would replace the shape by the nearest of the pipeline's list.
        return {**super().shape_kwargs(shape), "use_resolution_binning": False}


def predict_velocity(
    info: CheckpointInfo, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
) -> torch.Tensor:
    """One call of a Sana or SANA-Video transformer, as the stock pipelines make it."""
    prompt_embeds = batch["prompt_embeds"]
    # The dtype of the text is that of the pipeline's latents.
    return transformer(
        noisy.to(prompt_embeds.dtype),
        encoder_hidden_states=prompt_embeds,
        encoder_attention_mask=build_text_attention_bias(batch["prompt_attention_mask"], prompt_embeds),
        timestep=timesteps * info.transformer_config.get("timestep_scale", 1.0),
        return_dict=False,
    )[0]


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Sana checkpoint. Raises as `DiffusionFamily.open` does."""
    fields, objective = read_sana_fields(family, model)
    # Random weights were not trained in fp16, so nothing has to be clamped.
    saturates = model.from_scratch is None and is_trained_in_fp16(fields["path"], model)
    info = SanaInfo(**fields, should_saturate=saturates)
    denoiser = SanaDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, SanaEncoders, SanaSampler)


def is_trained_in_fp16(path: Path, model: ModelConfig) -> bool:
    """True if a Sana transformer was trained in fp16, by its files, their dtype, the index or the published name.

    The name is the last test, for a published checkpoint whose fp32 file was the only one downloaded.
    """
    files = sorted((path / "transformer").glob("*.safetensors"))
    return (
        # Files of a variant: diffusion_pytorch_model.fp16.safetensors.
        any(".fp16" in file.name for file in files)
        or read_stored_dtype(files) is torch.float16
        or read_component_config(path).get(_TRAINED_IN_KEY) == "fp16"
        or _FP16_TRAINED_NAME.fullmatch(model.path.rstrip("/").split("/")[-1]) is not None
    )


def read_sana_fields(family: DiffusionFamily, model: ModelConfig) -> tuple[dict[str, Any], FlowMatching]:
    """Read the constructor arguments of `CheckpointInfo` and the objective, for Sana and for SANA-Video."""
    _, fields = read_checkpoint(model, family.pipeline_names)
    return fields, build_flow_objective(model, read_component_config(fields["path"], "scheduler"))


def build_flow_objective(model: ModelConfig, scheduler: Mapping[str, Any]) -> FlowMatching:
    """Flow-matching objective with the shift of the checkpoint's scheduler.

    Solvers call it `flow_shift`, FlowMatchEulerDiscreteScheduler calls it `shift`. If the latter were built from a
    solver's config, its shift would silently be 1.
    """
    name = scheduler.get("_class_name")
    timesteps = scheduler.get("num_train_timesteps", 1000)
    if name == FlowMatchEulerDiscreteScheduler.__name__:
        if scheduler.get("use_dynamic_shifting"):
            raise DitLoraError(
                f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting); Sana's "
                "checkpoints have one shift"
            )
        config: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler)).config
        return FlowMatching(float(config.shift), timesteps)
    # Both are published with Sana checkpoints, and both call the shift `flow_shift`.
    solvers = {kind.__name__: kind for kind in (DPMSolverMultistepScheduler, UniPCMultistepScheduler)}
    if name not in solvers:
        raise DitLoraError(
            f"{model.path}: scheduler {name} is not one that Sana is published with: "
            f"{', '.join([*solvers, FlowMatchEulerDiscreteScheduler.__name__])}"
        )
    config = solvers[name].from_config(dict(scheduler)).config
    if config.prediction_type != "flow_prediction" or not config.use_flow_sigmas:
        raise DitLoraError(
            f"{model.path}: Sana predicts the flow, but its scheduler says prediction_type="
            f"{config.prediction_type}, use_flow_sigmas={config.use_flow_sigmas}"
        )
    return FlowMatching(float(config.flow_shift), timesteps)
