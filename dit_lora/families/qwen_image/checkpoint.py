"""Qwen-Image text-to-image: flow matching on packed latents, conditioned on Qwen2.5-VL's last hidden state.

Prompts, packing, the shift by resolution and denoising call the stock pipeline's own code
(diffusers/pipelines/qwenimage/pipeline_qwenimage.py).

Shapes: B batch, T text tokens, D text width, H and W latent size, S image tokens (H W / 4), P packed channels.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import nn
from torch.nn import functional

from dit_lora.config.recipe import Recipe
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
)
from dit_lora.families.flow_scheduler import require_steps
from dit_lora.families.qwen_latents import QwenLatentsCheckpoint
from dit_lora.families.text.captions import one_by_one
from dit_lora.families.text.limit import text_limit
from dit_lora.families.text.mask import cut_text
from dit_lora.numerics.streams import moved


@dataclass(frozen=True, kw_only=True)
class QwenImageCheckpoint(QwenLatentsCheckpoint):
    """A Qwen-Image text-to-image checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImagePipeline
    transformer_class: ClassVar[Any] = QwenImageTransformer2DModel
    guided_batch = 1  # guidance is a second call

    def for_recipe(self, recipe: Recipe) -> Self:
        require_steps(
            self.scheduler, recipe.validation.inference_steps, "validation.inference_steps"
        )
        return super().for_recipe(recipe)

    @property
    def text_tokens(self) -> int:
        """Number of tokens that captions are padded to: the default of the pipeline's `__call__`."""
        arguments = inspect.signature(self.pipeline_class.__call__).parameters
        tokens: int = arguments["max_sequence_length"].default
        return tokens

    def text_limit(self) -> TextLimit:
        """Number of caption tokens. Template tokens before the caption are dropped, those after it truncated first."""
        return text_limit(self.path, self.text_tokens)

    def text_facts(self) -> Mapping[str, Any]:
        stock = bare(self.pipeline_class)
        return {
            **super().text_facts(),
            "tokens": self.text_tokens,
            "template": stock.prompt_template_encode,
            "dropped": stock.prompt_template_encode_start_idx,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (self.text_tokens, self.transformer_config["joint_attention_dim"])
        return {
            "prompt_embeds": (torch.Size(size), dtype),
            "prompt_mask": (torch.Size(size[:1]), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen2.5-VL as the pipeline uses it. Captions are padded with zeros and have a mask."""
        pipeline = self.text_pipeline(dtype, device)

        def encode_one(caption: str) -> Tensors:
            # Encode without other captions, so that nothing is padded, then pad to the cache's length.
            embeddings, _ = pipeline.encode_prompt(
                caption, device=device, max_sequence_length=self.text_tokens
            )
            # (1, count, D) -> (1, T, D)
            count = embeddings.shape[1]
            padding = (0, 0, 0, self.text_tokens - count)
            mask = torch.arange(self.text_tokens, device=device) < count
            return {"prompt_embeds": functional.pad(embeddings, padding), "prompt_mask": mask[None]}

        return one_by_one(encode_one)

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer: Any = super().load_transformer(dtype)
        rope = transformer.pos_embed
        if rope.pos_freqs.is_meta:
            # The model is on the meta device. Its RoPE tables are neither weights nor buffers, and their values are
            # needed.
            with torch.device("cpu"):
                transformer.pos_embed = type(rope)(rope.theta, rope.axes_dim, rope.scale_rope)
        return transformer

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline."""
        return self.call(transformer, noisy, timesteps, batch, [self.grid(batch)])

    def call(
        self,
        transformer: nn.Module,
        hidden: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        grids: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Run the transformer on tokens (B, S, P) of images with these rows and columns, the noisy image first."""
        text, mask = cut_text(batch["prompt_embeds"], batch["prompt_mask"])
        shapes = [(1, *grid) for grid in grids]
        return transformer(
            hidden_states=hidden.to(text.dtype),  # the dtype of the pipeline's latents
            # Round before dividing, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
            timestep=timesteps.to(text.dtype) / 1000,
            encoder_hidden_states=text,
            # None if nothing is padded, as in the pipeline: attention then has more and faster backends.
            encoder_hidden_states_mask=None if mask is None else moved(mask, text.device),
            img_shapes=[shapes] * len(hidden),
            return_dict=False,
        )[0]

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt, "negative_prompt": ""}
        return _embedded("", prompt) | (_embedded("negative_", empty) if empty else {})

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        """Generate one image; the guidance scale is the pipeline's `true_cfg_scale`.

        The pipeline's `guidance_scale` is for an embedding that no published checkpoint has.
        """
        require_steps(self.scheduler, how.inference_steps, f"{self.path.name}: inference steps")

        def called(*, guidance_scale: float, **arguments: Any) -> Any:
            if guidance_scale <= 1:  # the pipeline warns about a prompt that it does not use
                arguments = {n: a for n, a in arguments.items() if not n.startswith("negative_")}
            return pipeline(**arguments, true_cfg_scale=guidance_scale)

        return super().generate(called, conditions, how)


def bare(pipeline_class: Any) -> Any:
    """The pipeline without components, to read the prompt templates."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(**{name: None for name in parameters if name != "self"})


def _embedded(prefix: str, prompt: Tensors) -> dict[str, torch.Tensor]:
    """Pipeline arguments for embeddings, cut to the length that the pipeline would have given the prompts."""
    embeddings, mask = cut_text(prompt["prompt_embeds"], prompt["prompt_mask"])
    if mask is None:  # the pipeline warns if the mask is missing
        mask = torch.ones(embeddings.shape[:2], dtype=torch.bool)
    return {
        f"{prefix}prompt_embeds": embeddings,
        f"{prefix}prompt_embeds_mask": mask.to(embeddings.device),
    }
