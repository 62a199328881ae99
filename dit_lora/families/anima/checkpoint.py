"""Anima text-to-image: flow matching on Qwen-Image's latents, conditioned on Qwen3 and the tokens of T5.

The checkpoint is for Diffusers' `AnimaModularPipeline`; prompts and denoising call its blocks' own code
(diffusers/modular_pipelines/anima). A small network, the text conditioner, makes the transformer's text of Qwen3's
last hidden state and the ids of T5's tokens; T5 itself is not used. The conditioner stays frozen, as Anima's card
asks, so the cache holds its output.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size. Latents are (B, C, 1, H, W).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AnimaModularPipeline, AnimaTextConditioner, AutoencoderKLQwenImage, CosmosTransformer3DModel
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.anima.mask_resize import provide_mask_resize
from dit_lora.families.base import Checkpoint, TensorMap, Tensors, TensorSpec, TextEncoder
from dit_lora.families.captions import make_caption_encoder
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, read_flow_scheduler
from dit_lora.families.modular import ModularSampler
from dit_lora.families.opening import fill_config_defaults, read_checkpoint, read_component_config
from dit_lora.families.qwen_latents import QwenLatentsEncoders, QwenLatentsInfo
from dit_lora.families.refusals import image_frames_errors, position_limit_errors, side_errors
from dit_lora.numerics.objectives import FlowMatching

provide_mask_resize()
MAX_TEXT_TOKENS: int = inspect.signature(AnimaTextEncoderStep.encode_prompt).parameters["max_sequence_length"].default
"""Number of tokens that prompts are truncated to, by Qwen3's tokenizer and by T5's: the pipeline's default."""
TRAINING_SHIFT = 1.0
"""Shift of the noise levels in training: none, as in the trainer of Anima's author. The pipeline samples at 3.

Source: tdrussell/diffusion-pipe, models/cosmos_predict2.py, `prepare_inputs`, whose `shift` is off by default.
"""


@dataclass(frozen=True, kw_only=True)
class AnimaInfo(QwenLatentsInfo):
    """Info (configs, supported shapes) of an Anima checkpoint."""

    text_rows: int
    """Length T of every caption's embeddings: the text conditioner appends zeros, which the transformer attends to."""
    pipeline_class: ClassVar[Any] = AnimaModularPipeline
    text_tokens: ClassVar[int] = MAX_TEXT_TOKENS

    @property
    def size_multiple(self) -> int:
        patch_size = self.transformer_config["patch_size"]
        return int(patch_size[-1] * 2 ** len(self.vae_config["temperal_downsample"]))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        sizes = zip(self.transformer_config["max_size"], self.transformer_config["patch_size"], strict=True)
        # The rotary embedding has one table for frames, rows and columns.
        max_side = self.size_multiple * max(size // patch for size, patch in sizes)
        return [
            *side_errors(shape, self.size_multiple),
            *position_limit_errors({"height": (shape.height, max_side), "width": (shape.width, max_side)}, "max_size"),
            *image_frames_errors(shape.frames, "Anima"),
        ]


@dataclass(frozen=True, kw_only=True)
class AnimaEncoders(QwenLatentsEncoders):
    info: AnimaInfo
    # Its tokens are the rows of the embeddings. Qwen3 has the same limit.
    tokenizer_folder = "t5_tokenizer"
    text_postprocessors: ClassVar[Mapping[str, Any]] = {"text_conditioner": AnimaTextConditioner}

    def text_cache_key(self) -> Mapping[str, Any]:
        parts = {name: self.info.path / name for name in ("t5_tokenizer", "text_conditioner")}
        return {**super().text_cache_key(), **parts, "tokens": MAX_TEXT_TOKENS}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (self.info.text_rows, self.info.transformer_config["text_embed_dim"])
        return {"prompt_embeds": (torch.Size(size), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen3, both tokenizers and the text conditioner, as the pipeline's blocks use them."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            text: dict[str, Any] = AnimaTextEncoderStep.encode_prompt(
                pipeline,
                caption,
                prepare_unconditional_embeds=False,
                max_sequence_length=MAX_TEXT_TOKENS,
                device=device,
            )
            embeddings = AnimaTextConditioningStep._condition_prompt_embeds(
                pipeline,
                **{name: tensor for name, tensor in text.items() if not name.startswith("negative_")},
                device=device,
                conditioning_dtype=pipeline.text_conditioner.dtype,
                output_dtype=dtype,
            )
            return {"prompt_embeds": embeddings}

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class AnimaDenoiser(FlowDenoiser):
    info: AnimaInfo
    transformer_class: ClassVar[Any] = CosmosTransformer3DModel

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of latents; equal to one call of the transformer by the pipeline's blocks."""
        text = batch["prompt_embeds"]
        return transformer(
            hidden_states=noisy.to(text.dtype),
            # Round before dividing, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
            timestep=timesteps.to(text.dtype) / self.num_train_timesteps,
            encoder_hidden_states=text,
            # No part of a picture is padding. The transformer resizes the mask, so its size does not matter.
            padding_mask=text.new_zeros(1, 1, *noisy.shape[-2:]),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class AnimaSampler(ModularSampler):
    info: AnimaInfo
    workflow = "text2image"
    text_blocks = ("text_encoder", "denoise.text_conditioning")


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an Anima checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=("vae", "text_encoder", "text_conditioner"),
        transformer_class=CosmosTransformer3DModel,
        vae_class=AutoencoderKLQwenImage,
    )
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(
            f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting), for which AnimaModularPipeline "
            "has no rule; Anima's checkpoints have one shift"
        )
    conditioner = fill_config_defaults(AnimaTextConditioner, read_component_config(fields["path"], "text_conditioner"))
    _require_matching_parts(model, fields["transformer_config"], fields["vae_config"], conditioner)
    objective = FlowMatching(TRAINING_SHIFT, scheduler["num_train_timesteps"])
    info = AnimaInfo(**fields, scheduler=scheduler, text_rows=conditioner["min_sequence_length"])
    denoiser = AnimaDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, AnimaEncoders, AnimaSampler)


def _require_matching_parts(
    model: ModelConfig, transformer: Mapping[str, Any], vae: Mapping[str, Any], conditioner: Mapping[str, Any]
) -> None:
    """Raise `DitLoraError` if configs contradict each other, or if captions would differ in their number of rows."""
    for option, value, expected, source in (
        ("in_channels of its transformer", transformer["in_channels"], vae["z_dim"], "z_dim of its vae"),
        ("out_channels of its transformer", transformer["out_channels"], vae["z_dim"], "z_dim of its vae"),
        ("patch_size of its transformer", list(transformer["patch_size"]), [1, 2, 2], "Anima's"),
        (
            "target_dim of its text_conditioner",
            conditioner["target_dim"],
            transformer["text_embed_dim"],
            "text_embed_dim of its transformer",
        ),
    ):
        if value != expected:
            raise DitLoraError(
                f"{model.path}: the parts of this checkpoint do not fit: {option} must be {expected}, {source}; got "
                f"{value}"
            )
    rows = conditioner["min_sequence_length"]
    if rows < MAX_TEXT_TOKENS:
        raise DitLoraError(
            f"{model.path}: min_sequence_length of its text_conditioner must be {MAX_TEXT_TOKENS} or more, so that "
            f"all captions have one length; got {rows}"
        )
