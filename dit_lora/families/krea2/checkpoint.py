"""Krea 2 text-to-image: latents of Qwen-Image's autoencoder, conditioned on several layers of Qwen3-VL.

Prompts, packing, positions, the shift and denoising call the stock pipeline's own code
(diffusers/pipelines/krea2/pipeline_krea2.py).

Shapes: B batch, T text tokens, L layers of the text encoder, D their width, S image tokens, P packed channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from torch import nn

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint, Sampler, TensorMap, Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.families.captions import compute_caption_token_limit, make_caption_encoder, trim_text_padding
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu
from dit_lora.families.latents import PACK_SIZE, compute_token_grid
from dit_lora.families.qwen_latents import QwenLatentsEncoders, QwenLatentsInfo, read_qwen_latents_checkpoint
from dit_lora.families.refusals import KEEP_DISTILLATION
from dit_lora.numerics.streams import move_to_device

DISTILLED_MU = 1.15  # Krea2Pipeline.__call__, if `is_distilled`


@dataclass(frozen=True, kw_only=True)
class Krea2Info(QwenLatentsInfo):
    """Info (configs, supported shapes) of a Krea 2 checkpoint, Raw or Turbo."""

    is_distilled: bool
    """`is_distilled` of model_index.json: the checkpoint samples in eight steps without guidance."""
    text_encoder_layers: tuple[int, ...]
    """Indices of the text encoder's hidden states that condition the transformer (0 is the embedding's output)."""
    pipeline_class: ClassVar[Any] = Krea2Pipeline

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        # First: a distilled checkpoint is refused whatever else the recipe says.
        if self.is_distilled and not recipe.has_distillation_safeguard:
            raise DitLoraError(
                f"{self.path.name} is step-distilled (is_distilled in its model_index.json), and training on it "
                "undoes that; train krea/Krea-2-Raw, whose adapter loads into both, and sample from this one with "
                f"validation.model; or {KEEP_DISTILLATION}"
            )
        return super().copy_with_recipe_settings(recipe, training_options)


@dataclass(frozen=True, kw_only=True)
class Krea2Encoders(QwenLatentsEncoders):
    info: Krea2Info

    def load_text_limit(self) -> TextLimit:
        # Load only the tokenizer: the text encoder has billions of weights.
        return compute_caption_token_limit(Krea2Pipeline, self.load_tokenizer(), self.info.text_tokens)

    def text_cache_key(self) -> Mapping[str, Any]:
        return {
            **super().text_cache_key(),
            "tokens": self.info.text_tokens,
            # Another choice of layers gives other embeddings for the same text encoder.
            "layers": list(self.info.text_encoder_layers),
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        tokens, width = self.info.text_tokens, self.info.transformer_config["text_hidden_dim"]
        return {
            "prompt_embeds": (torch.Size((tokens, len(self.info.text_encoder_layers), width)), dtype),
            "prompt_embeds_mask": (torch.Size((tokens,)), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen3-VL as the pipeline uses it: padding comes before the template's end and takes up no positions."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # (1, T, L, D) and (1, T)
            embeddings, mask = pipeline.encode_prompt(
                caption, device=device, max_sequence_length=self.info.text_tokens
            )
            return {"prompt_embeds": embeddings, "prompt_embeds_mask": mask}

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class Krea2Denoiser(FlowDenoiser):
    info: Krea2Info
    transformer_class: ClassVar[Any] = Krea2Transformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        if self.info.is_distilled:
            return DISTILLED_MU
        # Packing makes one token of 2 x 2 latents.
        return compute_mu(self.info.scheduler, size[-2] * size[-1] // PACK_SIZE**2)

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """Pack Krea 2 latents (B, C, 1, H, W) in squares of two by two, (B, S, P), with the pipeline's method."""
        # An instance method of the pipeline, which reads only `patch_size`.
        pipeline: Any = SimpleNamespace(patch_size=PACK_SIZE)
        batch, channels, _, height, width = latents.shape
        return Krea2Pipeline._pack_latents(pipeline, latents, batch, channels, height, width)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline.

        The pipeline pads text to the maximum caption length; here it is cut to the longest caption of the batch.
        """
        text, mask = trim_text_padding(batch["prompt_embeds"], batch["prompt_embeds_mask"])
        dtype, device, grid = text.dtype, text.device, compute_token_grid(batch["latent_mean"])
        return transformer(
            hidden_states=noisy.to(dtype),
            encoder_hidden_states=text,
            # Divide before rounding, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
            timestep=(timesteps / self.num_train_timesteps).to(dtype),
            position_ids=Krea2Pipeline.prepare_position_ids(text.shape[1], *grid, device),
            encoder_attention_mask=None if mask is None else move_to_device(mask, device),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class Krea2Sampler(Sampler):
    info: Krea2Info
    output_field = "images"
    guidance_batch_size = 1  # guidance is a second call
    guidance_threshold = 0.0  # its guidance scale is the paper's minus one


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Krea 2 checkpoint. Raises as `DiffusionFamily.open` does."""
    index, fields = read_qwen_latents_checkpoint(model, family, Krea2Transformer2DModel)
    layers = _select_text_encoder_layers(index)
    # Both counts come from different files: the transformer's config and model_index.json.
    num_layers = fields["transformer_config"]["num_text_layers"]
    problems = []
    if len(layers) != num_layers:
        problems.append(
            f"text_encoder_select_layers must be {num_layers}, as many as its transformer takes (num_text_layers); "
            f"got {len(layers)}"
        )
    if index.get("patch_size", PACK_SIZE) != PACK_SIZE:
        problems.append(f"patch_size must be {PACK_SIZE}; got {index['patch_size']}")
    if problems:
        raise DitLoraError(format_list(f"{model.path}: the parts of this checkpoint do not fit", problems))
    info = Krea2Info(**fields, is_distilled=bool(index.get("is_distilled", False)), text_encoder_layers=layers)
    denoiser = Krea2Denoiser(info=info, objective=build_flow_matching(info.scheduler))
    return Checkpoint.from_denoiser(denoiser, Krea2Encoders, Krea2Sampler)


def _select_text_encoder_layers(index: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the text encoder's hidden states that model_index.json selects, or the pipeline's default."""
    # Build the pipeline without components, so that its own code fills in the default layers.
    nothing: Any = None
    pipeline: Any = Krea2Pipeline(
        scheduler=nothing,
        vae=nothing,
        text_encoder=nothing,
        tokenizer=nothing,
        transformer=nothing,
        text_encoder_select_layers=index.get("text_encoder_select_layers"),
    )
    return tuple(pipeline.text_encoder_select_layers)
