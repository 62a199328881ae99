"""Qwen-Image text-to-image: flow matching on packed latents, conditioned on Qwen2.5-VL's last hidden state.

Prompts, packing, the shift by resolution and denoising call the stock pipeline's own code
(diffusers/pipelines/qwenimage/pipeline_qwenimage.py).

Shapes: B batch, T text tokens, D text width, H and W latent size, S image tokens (H W / 4), P packed channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import nn
from torch.nn import functional

from dit_lora.families.base import Sampler, Sampling, TensorMap, Tensors, TensorSpec, TextEncoder
from dit_lora.families.captions import get_caption_spec, make_caption_encoder, trim_text_padding
from dit_lora.families.flow_matching import FlowDenoiser, compute_mu, require_min_steps
from dit_lora.families.latents import PACK_SIZE, compute_token_grid
from dit_lora.families.opening import build_empty_pipeline
from dit_lora.families.qwen_latents import QwenLatentsEncoders, QwenLatentsInfo
from dit_lora.numerics.streams import move_to_device


@dataclass(frozen=True, kw_only=True)
class QwenImageInfo(QwenLatentsInfo):
    """Info (configs, supported shapes) of a Qwen-Image text-to-image checkpoint."""

    pipeline_class: ClassVar[Any] = QwenImagePipeline


@dataclass(frozen=True, kw_only=True)
class QwenImageEncoders(QwenLatentsEncoders):
    info: QwenImageInfo

    def text_cache_key(self) -> Mapping[str, Any]:
        template = get_template_cache_key(self.info.pipeline_class)
        return {**super().text_cache_key(), "tokens": self.info.text_tokens, **template}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        width = self.info.transformer_config["joint_attention_dim"]
        return get_caption_spec(self.info.text_tokens, width, dtype, "prompt_mask")

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen2.5-VL as Qwen-Image's pipeline uses it. Captions are padded with zeros and have a mask."""
        pipeline, num_tokens = self.load_text_pipeline(dtype, device), self.info.text_tokens

        def encode_caption(caption: str) -> Tensors:
            # Encode without other captions, so that nothing is padded, then pad to the cache's length.
            embeddings, _ = pipeline.encode_prompt(caption, device=device, max_sequence_length=num_tokens)
            return pad_caption(embeddings, num_tokens)

        return make_caption_encoder(encode_caption)


@dataclass(frozen=True, kw_only=True)
class QwenImageDenoiser(FlowDenoiser):
    info: QwenLatentsInfo
    transformer_class: ClassVar[Any] = QwenImageTransformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # Packing makes one token of 2 x 2 latents. Tokens of references do not count.
        return compute_mu(self.info.scheduler, size[-2] * size[-1] // PACK_SIZE**2)

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer: Any = super().load_transformer(dtype)
        rope = transformer.pos_embed
        if rope.pos_freqs.is_meta:
            # The model is on the meta device. Its RoPE tables are neither weights nor buffers, and their values are
            # needed.
            with torch.device("cpu"):
                transformer.pos_embed = type(rope)(rope.theta, rope.axes_dim, rope.scale_rope)
        return transformer

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline."""
        text, mask = trim_text_padding(batch["prompt_embeds"], batch["prompt_mask"])
        arguments = {
            "hidden_states": noisy.to(text.dtype),  # the dtype of the pipeline's latents
            # Round before dividing, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
            "timestep": timesteps.to(text.dtype) / 1000,
            "encoder_hidden_states": text,
            # None if nothing is padded, as in the pipeline: attention then has more and faster backends.
            "encoder_hidden_states_mask": None if mask is None else move_to_device(mask, text.device),
            # One list of (frames, rows, columns) per sample: the noisy image comes first, then references.
            "img_shapes": [[(1, *compute_token_grid(batch["latent_mean"]))]] * len(noisy),
        }
        prediction = transformer(**self.conditioning.append_conditioning_tokens(arguments, batch), return_dict=False)[
            0
        ]
        # Keep the output for the noisy tokens only.
        return prediction[:, : noisy.shape[1]]


@dataclass(frozen=True, kw_only=True)
class QwenImageSampler(Sampler):
    info: QwenLatentsInfo
    output_field = "images"
    guidance_batch_size = 1  # guidance is a second call

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            # The pipeline uses guidance only if it gets a negative prompt.
            return {"prompt": prompt, "negative_prompt": ""}
        return _embedding_kwargs("", prompt) | (_embedding_kwargs("negative_", empty_prompt) if empty_prompt else {})

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        """Generate one image with Qwen-Image; the guidance scale is the pipeline's `true_cfg_scale`.

        The pipeline's `guidance_scale` is for an embedding that no published checkpoint has.
        """
        require_min_steps(self.info.scheduler, sampling.inference_steps, f"{self.info.path.name}: inference steps")

        def call_pipeline(*, guidance_scale: float, **arguments: Any) -> Any:
            if guidance_scale <= 1:  # the pipeline warns about a prompt that it does not use
                arguments = {n: a for n, a in arguments.items() if not n.startswith("negative_")}
            return pipeline(**arguments, true_cfg_scale=guidance_scale)

        return super().generate(call_pipeline, prompt_kwargs, sampling)


def get_template_cache_key(pipeline_class: Any) -> dict[str, Any]:
    """Part of the text cache key: the prompt template, and the number of its tokens that the pipeline drops."""
    stock = build_empty_pipeline(pipeline_class)
    return {"template": stock.prompt_template_encode, "dropped": stock.prompt_template_encode_start_idx}


def pad_caption(embeddings: torch.Tensor, num_tokens: int) -> Tensors:
    """Pad a caption's embeddings (1, count, D) with zeros to (1, T, D), and add the mask of its tokens."""
    count = embeddings.shape[1]
    mask = torch.arange(num_tokens, device=embeddings.device) < count
    return {"prompt_embeds": functional.pad(embeddings, (0, 0, 0, num_tokens - count)), "prompt_mask": mask[None]}


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """Pack Qwen-Image latents (B, C, 1, H, W) in squares of two by two, (B, S, P), with the pipeline's method."""
    batch, channels, _, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents, batch, channels, height, width)


def _embedding_kwargs(prefix: str, prompt: Tensors) -> dict[str, torch.Tensor]:
    """Qwen-Image's pipeline arguments for prompt embeddings.

    Truncates them to the length that the pipeline itself uses for the prompts.
    """
    embeddings, mask = trim_text_padding(prompt["prompt_embeds"], prompt["prompt_mask"])
    if mask is None:  # the pipeline warns if the mask is missing
        mask = torch.ones(embeddings.shape[:2], dtype=torch.bool)
    return {f"{prefix}prompt_embeds": embeddings, f"{prefix}prompt_embeds_mask": mask.to(embeddings.device)}
