"""Flux's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_flux.py (FluxTransformerBlock,
FluxSingleTransformerBlock, FluxAttnProcessor), models/normalization.py (AdaLayerNormZero, AdaLayerNormZeroSingle).

Shapes: B batch, T text tokens, I image tokens, D width, H heads.
"""

from typing import Any

import torch

from dit_lora.fuse.attention import Recomputable, attend
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora.fuse.two_streams import (
    Rotary,
    TwoStreamProcessor,
    attention_why_not,
    clipped,
    each,
    enter,
    leave,
    modulated,
    norms_why_not,
    spared,
)
from dit_lora_kernels.ada_norm import Stream


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Text (B, T, D) and image (B, I, D) after attention and feed-forward, as `FluxTransformerBlock.forward`."""
    image, x, modulation = enter(block.norm1, hidden_states, temb)
    text, context, text_modulation = enter(block.norm1_context, encoder_hidden_states, temb)
    attended, attended_text, *image_prompt = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **spared(block.attn, image, text),
    )
    x = leave(block.norm2, block.ff, x, attended, modulation)
    for prompted in image_prompt:
        x = x + prompted
    context = leave(block.norm2_context, block.ff_context, context, attended_text, text_modulation)
    return clipped(context), x


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Text (B, T, D) and image (B, I, D), as `FluxSingleTransformerBlock.forward`; joined by their norm alone."""
    text = encoder_hidden_states.shape[1]
    shift, scale, gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)
    streams = [Stream(x, shift, scale) for x in (encoder_hidden_states, hidden_states)]
    normed, (context, x) = modulated(streams, eps=block.norm.norm.eps)
    with normed.not_kept():
        inner = block.proj_mlp(normed.tensor)
    inner = block.act_mlp(inner)
    attended = block.attn(
        hidden_states=normed.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **spared(block.attn, normed),
    )
    output, gate = block.proj_out(torch.cat([attended, inner], dim=2)), gate[:, None]
    return (
        clipped(torch.addcmul(context, gate, output[:, :text])),
        clipped(torch.addcmul(x, gate, output[:, text:])),
    )


class FluxProcessor(TwoStreamProcessor):
    """`FluxAttnProcessor` with q and k of each stream normed and rotated in one pass; text comes first."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        recomputable: tuple[Recomputable, ...] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        joint = attn.added_kv_proj_dim is not None
        matching = joint is (encoder_hidden_states is not None)
        if self.is_stock or attn.fused_projections or not matching:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        shape, (of_image, of_text) = (-1, attn.head_dim), each(recomputable)
        heads = self.heads(
            (attn.to_q, attn.to_k, attn.to_v),
            (attn.norm_q, attn.norm_k),
            hidden_states,
            shape,
            _rows(image_rotary_emb, slice(text, None), hidden_states),
            of_image,
        )
        if encoder_hidden_states is None:
            return attend(*heads, attention_mask, self.backend).flatten(2)
        text_heads = self.heads(
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            encoder_hidden_states,
            shape,
            _rows(image_rotary_emb, slice(text), hidden_states),
            of_text,
        )
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(text_heads, heads, strict=True))
        attended = attend(query, key, value, attention_mask, self.backend).flatten(2)
        output = attn.to_out[1](attn.to_out[0](attended[:, text:]))
        return output, attn.to_add_out(attended[:, :text])


def _rows(rotary: Rotary | None, tokens: slice, like: torch.Tensor) -> Rotary | None:
    """The tables' rows (., D / H) of some tokens, where the tokens are."""
    if rotary is None:
        return None
    cos, sin = (table[tokens].to(like.device) for table in rotary)
    return cos, sin


def _block_why_not(block: Any) -> str | None:
    return norms_why_not(
        block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context
    )


def _single_why_not(block: Any) -> str | None:
    return norms_why_not(block.norm.norm)


_FLUX = "diffusers.models.transformers.transformer_flux"
FORWARDS = (
    ForwardPatch(f"{_FLUX}.FluxTransformerBlock", "ada_norm", block_forward, _block_why_not),
    ForwardPatch(
        f"{_FLUX}.FluxSingleTransformerBlock", "ada_norm", single_forward, _single_why_not
    ),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_FLUX}.FluxAttnProcessor",
        ATTENTION,
        FluxProcessor,
        attention_why_not,
        also=qk_always,
    ),
)
