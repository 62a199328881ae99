"""HunyuanVideo's blocks and attention on fused ops; blocks that replace tokens keep their own forward.

Source of the arithmetic: diffusers, models/transformers/transformer_hunyuan_video.py (HunyuanVideoTransformerBlock,
HunyuanVideoSingleTransformerBlock, HunyuanVideoAttnProcessor2_0), models/normalization.py (AdaLayerNormZero,
AdaLayerNormZeroSingle).

Shapes: B batch, V video tokens, T text tokens, D width, H heads.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import Recomputable, attend
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora.fuse.two_streams import (
    Rotary,
    TwoStreamProcessor,
    attention_why_not,
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
    attention_mask: torch.Tensor | None = None,
    freqs_cis: Rotary | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (B, V, D) and text (B, T, D) after attention and feed-forward, as `HunyuanVideoTransformerBlock`."""
    video, x, modulation = enter(block.norm1, hidden_states, temb)
    text, context, text_modulation = enter(block.norm1_context, encoder_hidden_states, temb)
    attended, attended_text = block.attn(
        hidden_states=video.tensor,
        encoder_hidden_states=text.tensor,
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
        **spared(block.attn, video, text),
    )
    return (
        leave(block.norm2, block.ff, x, attended, modulation),
        leave(block.norm2_context, block.ff_context, context, attended_text, text_modulation),
    )


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: Rotary | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (B, V, D) and text (B, T, D), as `HunyuanVideoSingleTransformerBlock`; joined by their norm alone."""
    video = hidden_states.shape[1]
    shift, scale, gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)
    streams = [Stream(x, shift, scale) for x in (hidden_states, encoder_hidden_states)]
    normed, (x, context) = modulated(streams, eps=block.norm.norm.eps)
    with normed.not_kept():
        inner = block.proj_mlp(normed.tensor)
    inner = block.act_mlp(inner)
    attended = block.attn(
        hidden_states=normed.tensor[:, :video],
        encoder_hidden_states=normed.tensor[:, video:],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
        **spared(block.attn, normed),
    )
    joint = torch.cat([torch.cat(attended, dim=1), inner], dim=2)
    output, gate = block.proj_out(joint), gate[:, None]
    return (
        torch.addcmul(x, gate, output[:, :video]),
        torch.addcmul(context, gate, output[:, video:]),
    )


class HunyuanVideoProcessor(TwoStreamProcessor):
    """`HunyuanVideoAttnProcessor2_0` with q and k normed and the video's rotated in one pass; text comes last."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        recomputable: tuple[Recomputable, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.is_stock or encoder_hidden_states is None:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        video, shape = hidden_states.shape[1], (attn.heads, -1)
        of_video, of_text = each(recomputable)
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        if attn.add_q_proj is None:
            if of_video is not None:
                joint = of_video.tensor
            else:
                joint = torch.cat([hidden_states, encoder_hidden_states], dim=1)
            query, key, value = self.heads(layers, norms, joint, shape, image_rotary_emb, of_video)
        else:
            heads = self.heads(layers, norms, hidden_states, shape, image_rotary_emb, of_video)
            text_heads = self.heads(
                (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
                (attn.norm_added_q, attn.norm_added_k),
                encoder_hidden_states,
                shape,
                recomputable=of_text,
            )
            query, key, value = (
                torch.cat(pair, dim=1) for pair in zip(heads, text_heads, strict=True)
            )
        attended = attend(query, key, value, attention_mask, self.backend).flatten(2)
        attended, text = attended[:, :video], attended[:, video:]
        if attn.to_out is not None:
            attended = attn.to_out[1](attn.to_out[0](attended))
        if attn.to_add_out is not None:
            text = attn.to_add_out(text)
        return attended, text


def _block_why_not(block: Any) -> str | None:
    return norms_why_not(
        block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context
    )


def _single_why_not(block: Any) -> str | None:
    return norms_why_not(block.norm.norm)


_HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video"
FORWARDS = (
    ForwardPatch(
        f"{_HUNYUAN}.HunyuanVideoTransformerBlock", "ada_norm", block_forward, _block_why_not
    ),
    ForwardPatch(
        f"{_HUNYUAN}.HunyuanVideoSingleTransformerBlock",
        "ada_norm",
        single_forward,
        _single_why_not,
    ),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_HUNYUAN}.HunyuanVideoAttnProcessor2_0",
        ATTENTION,
        HunyuanVideoProcessor,
        attention_why_not,
        also=qk_always,
    ),
)
