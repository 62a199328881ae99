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
from dit_lora.families.base import Sampling, TensorMap, Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.families.flow_scheduler import require_min_steps
from dit_lora.families.opening import get_call_default
from dit_lora.families.qwen_latents import QwenLatentsCheckpoint
from dit_lora.families.text.captions import make_caption_encoder
from dit_lora.families.text.limit import load_text_limit
from dit_lora.families.text.mask import cut_text
from dit_lora.numerics.streams import move_to_device


@dataclass(frozen=True, kw_only=True)
class QwenImageCheckpoint(QwenLatentsCheckpoint):
    """A Qwen-Image text-to-image checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImagePipeline
    transformer_class: ClassVar[Any] = QwenImageTransformer2DModel
    guidance_batch_size = 1  # guidance is a second call

    def apply_recipe(self, recipe: Recipe) -> Self:
        require_min_steps(self.scheduler, recipe.validation.inference_steps, "validation.inference_steps")
        return super().apply_recipe(recipe)

    @property
    def text_tokens(self) -> int:
        """Number of tokens that captions are padded to: the default of the pipeline's `__call__`."""
        return get_call_default(self.pipeline_class, "max_sequence_length")

    def load_text_limit(self) -> TextLimit:
        """The limit on caption tokens, not counting the chat template's tokens around the caption."""
        return load_text_limit(self.path, self.text_tokens)

    def text_cache_key(self) -> Mapping[str, Any]:
        stock = build_empty_pipeline(self.pipeline_class)
        return {
            **super().text_cache_key(),
            "tokens": self.text_tokens,
            "template": stock.prompt_template_encode,
            "dropped": stock.prompt_template_encode_start_idx,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (self.text_tokens, self.transformer_config["joint_attention_dim"])
        return {"prompt_embeds": (torch.Size(size), dtype), "prompt_mask": (torch.Size(size[:1]), torch.bool)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen2.5-VL as the pipeline uses it. Captions are padded with zeros and have a mask."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # Encode without other captions, so that nothing is padded, then pad to the cache's length.
            embeddings, _ = pipeline.encode_prompt(caption, device=device, max_sequence_length=self.text_tokens)
            # (1, count, D) -> (1, T, D)
            count = embeddings.shape[1]
            padding = (0, 0, 0, self.text_tokens - count)
            mask = torch.arange(self.text_tokens, device=device) < count
            return {"prompt_embeds": functional.pad(embeddings, padding), "prompt_mask": mask[None]}

        return make_caption_encoder(encode_caption)

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
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline."""
        return self.run_transformer(transformer, noisy, timesteps, batch, [self.token_grid(batch)])

    def run_transformer(
        self,
        transformer: nn.Module,
        hidden: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
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
            encoder_hidden_states_mask=None if mask is None else move_to_device(mask, text.device),
            img_shapes=[shapes] * len(hidden),
            return_dict=False,
        )[0]

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt, "negative_prompt": ""}
        return _embedding_kwargs("", prompt) | (_embedding_kwargs("negative_", empty_prompt) if empty_prompt else {})

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        """Generate one image; the guidance scale is the pipeline's `true_cfg_scale`.

        The pipeline's `guidance_scale` is for an embedding that no published checkpoint has.
        """
        require_min_steps(self.scheduler, sampling.inference_steps, f"{self.path.name}: inference steps")

        def call_pipeline(*, guidance_scale: float, **arguments: Any) -> Any:
            if guidance_scale <= 1:  # the pipeline warns about a prompt that it does not use
                arguments = {n: a for n, a in arguments.items() if not n.startswith("negative_")}
            return pipeline(**arguments, true_cfg_scale=guidance_scale)

        return super().generate(call_pipeline, prompt_kwargs, sampling)


def build_empty_pipeline(pipeline_class: Any) -> Any:
    """The pipeline without components, to read the prompt templates."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(**{name: None for name in parameters if name != "self"})


def _embedding_kwargs(prefix: str, prompt: Tensors) -> dict[str, torch.Tensor]:
    """Pipeline arguments for embeddings, cut to the length that the pipeline would have given the prompts."""
    embeddings, mask = cut_text(prompt["prompt_embeds"], prompt["prompt_mask"])
    if mask is None:  # the pipeline warns if the mask is missing
        mask = torch.ones(embeddings.shape[:2], dtype=torch.bool)
    return {f"{prefix}prompt_embeds": embeddings, f"{prefix}prompt_embeds_mask": mask.to(embeddings.device)}
