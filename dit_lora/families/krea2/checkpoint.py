"""Krea 2 text-to-image: Qwen-Image's latents, conditioned by layers of Qwen3-VL side by side.

Prompts, packing, positions, the shift and denoising are the stock pipeline's own code, called here
(diffusers/pipelines/krea2/pipeline_krea2.py).

Shapes: B batch, T text tokens, L layers of the text encoder, D their width, S image tokens, P packed channels.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from torch import nn
from transformers import AutoTokenizer

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.opening import local_checkpoint, read_index, require_whole_weights
from dit_lora.families.qwen_latents import PACKED, QwenLatentsCheckpoint, qwen_latents_fields
from dit_lora.families.text.chat_template import template_limit
from dit_lora.families.text.mask import cut_text
from dit_lora.numerics.streams import moved

DISTILLED_MU = 1.15  # Krea2Pipeline.__call__, where `is_distilled`


@dataclass(frozen=True, kw_only=True)
class Krea2Checkpoint(QwenLatentsCheckpoint):
    """One Krea 2 checkpoint, Raw or Turbo."""

    distilled: bool
    """`is_distilled` of model_index.json: it makes images in eight steps, without guidance."""
    layers: tuple[int, ...]
    """The hidden states of the text encoder that the transformer takes, by their place (0 is the embedding's output)."""
    pipeline_class: ClassVar[Any] = Krea2Pipeline
    transformer_class: ClassVar[Any] = Krea2Transformer2DModel
    guided_batch = 1  # a second call
    guided_above = 0.0  # its scale is the paper's minus one

    def for_recipe(self, recipe: Recipe) -> Self:
        if self.distilled and not recipe.lora.under:
            raise DitLoraError(
                f"{self.path.name} is step-distilled (is_distilled in its model_index.json), and training on it undoes "
                "that; train krea/Krea-2-Raw, whose adapter loads into both, and sample from this one with "
                "validation.model; or give an adapter that undoes it in lora.under"
            )
        return super().for_recipe(recipe)

    def mu(self, size: torch.Size) -> float:
        return DISTILLED_MU if self.distilled else super().mu(size)

    @property
    def text_tokens(self) -> int:
        """Number of tokens of every caption, pads and the template's end among them: the pipeline's default."""
        tokens: int = (
            inspect.signature(Krea2Pipeline.__call__).parameters["max_sequence_length"].default
        )
        return tokens

    def text_limit(self) -> TextLimit:
        tokenizer = load_pretrained(AutoTokenizer, self.path / "tokenizer")
        return template_limit(Krea2Pipeline, tokenizer, self.text_tokens)

    def text_facts(self) -> Mapping[str, Any]:
        return {**super().text_facts(), "tokens": self.text_tokens, "layers": list(self.layers)}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        tokens, width = self.text_tokens, self.transformer_config["text_hidden_dim"]
        return {
            "prompt_embeds": (torch.Size((tokens, len(self.layers), width)), dtype),
            "prompt_embeds_mask": (torch.Size((tokens,)), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Qwen3-VL as the pipeline uses it: pads in the middle, before the template's end, at no position of their own."""
        pipeline = self.text_pipeline(dtype, device)

        @torch.no_grad()
        def encode(captions: Sequence[str]) -> Tensors:
            # One by one: a caption's tensors do not depend on its neighbours.
            encoded = [
                pipeline.encode_prompt(caption, device=device, max_sequence_length=self.text_tokens)
                for caption in captions
            ]
            embeddings, masks = zip(*encoded, strict=True)
            return {"prompt_embeds": torch.cat(embeddings), "prompt_embeds_mask": torch.cat(masks)}

        return encode

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        """Return latents (B, C, 1, H, W) in squares of two by two, (B, S, P), by the pipeline's own means."""
        # A method of the pipeline's instance, which asks it for one number.
        pipeline: Any = SimpleNamespace(patch_size=PACKED)
        batch, channels, _, height, width = latents.shape
        packed: torch.Tensor = Krea2Pipeline._pack_latents(
            pipeline, latents, batch, channels, height, width
        )
        return packed

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the velocity of packed latents (B, S, P); one call equals one of the stock pipeline's.

        The pipeline's text is as long as a caption can be; here it is as long as the batch's longest.
        """
        text, mask = cut_text(batch["prompt_embeds"], batch["prompt_embeds_mask"])
        dtype, device = text.dtype, text.device
        prediction: torch.Tensor = transformer(
            hidden_states=noisy.to(dtype),
            encoder_hidden_states=text,
            # Divided before it is rounded, as the pipeline does: in bf16 the network sees 8 bits of it.
            timestep=(timesteps / self.train_timesteps).to(dtype),
            position_ids=Krea2Pipeline.prepare_position_ids(
                text.shape[1], *self.grid(batch), device
            ),
            encoder_attention_mask=None if mask is None else moved(mask, device),
            return_dict=False,
        )[0]
        return prediction

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        negative = {f"negative_{name}": tensor for name, tensor in (empty or {}).items()}
        return {**prompt, **negative}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Krea2Checkpoint:
    """Read the configs; refuse another pipeline, another scheduler, parts that do not fit, torn weights."""
    path = local_checkpoint(model)
    index = read_index(model, path, family.pipeline_names)
    require_whole_weights(model, path, "vae", "text_encoder")
    fields = qwen_latents_fields(model, Krea2Transformer2DModel)
    layers = _layers(index)
    taken = fields["transformer_config"]["num_text_layers"]
    wrong = []
    if len(layers) != taken:
        wrong.append(
            f"text_encoder_select_layers must be {taken}, as many as its transformer takes (num_text_layers); "
            f"got {len(layers)}"
        )
    if index.get("patch_size", PACKED) != PACKED:
        wrong.append(f"patch_size must be {PACKED}; got {index['patch_size']}")
    if wrong:
        raise DitLoraError(listed(f"{model.path}: the parts of this checkpoint do not fit", wrong))
    return Krea2Checkpoint(
        **fields, distilled=bool(index.get("is_distilled", False)), layers=layers
    )


def _layers(index: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the places of the hidden states that a model_index.json names; without, those that the pipeline takes."""
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
