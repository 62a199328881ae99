"""LTX-Video's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_ltx.py (LTXVideoTransformerBlock,
LTXVideoAttnProcessor).

Shapes: B batch, S video tokens, K tokens that are attended to, D width, H heads; G rows of modulation a sample, 1 or S.
"""

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_lora.fuse.attention import FusedProcessor, attend, heads_mask
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora.fuse.lora import project
from dit_lora_kernels.ada_norm import Stream, ada_norm, joint_ada_norm
from dit_lora_kernels.qk_norm_rope import qk_norm_rope

Rotary = tuple[torch.Tensor, torch.Tensor]


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Video tokens (B, S, D) after both attentions and feed-forward, as `LTXVideoTransformerBlock.forward`."""
    rows = temb.unflatten(-1, (len(block.scale_shift_table), -1))  # (B, G, 6, D)
    modulation = block.scale_shift_table.to(temb.device) + rows
    shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation.unbind(dim=2)
    norm, norm_ff = block.norm1, block.norm2
    normed, (x,) = joint_ada_norm(
        (Stream(hidden_states, shift, scale),), norm.weight, norm.bias, norm="rms", eps=norm.eps
    )
    y = block.attn1(
        hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
    )
    x = torch.addcmul(x, gate, y)  # fp32 from here on where the table is, as in the stock block
    y = block.attn2(
        x,
        encoder_hidden_states=encoder_hidden_states,
        image_rotary_emb=None,
        attention_mask=encoder_attention_mask,
    )
    normed, x = ada_norm(
        x, shift_ff, scale_ff, norm_ff.weight, norm_ff.bias, norm="rms", eps=norm_ff.eps, y=y
    )
    return torch.addcmul(x, gate_ff, block.ff(normed))


class LTXProcessor(FusedProcessor):
    """`LTXVideoAttnProcessor` with q and k normed across heads and rotated in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if self.is_stock:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is None:
            query, key, value = project((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        else:
            (query,) = project((attn.to_q,), hidden_states)
            key, value = project((attn.to_k, attn.to_v), source)
        query = self._normed(attn, query, attn.norm_q, image_rotary_emb)
        key = self._normed(attn, key, attn.norm_k, image_rotary_emb)
        value = value.unflatten(2, (attn.heads, -1))
        mask = heads_mask(attn, attention_mask, source)
        attended = attend(query, key, value, mask, self.backend).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended))

    def _normed(
        self, attn: Any, projected: torch.Tensor, norm: Any, rotary: Rotary | None
    ) -> torch.Tensor:
        """q or k (B, S, D) as (B, S, H, D / H): normed across heads, then rotated by tables over D."""
        if self.fusion.is_on("qk_norm_rope"):
            cos, sin = rotary if rotary is not None else (None, None)
            return qk_norm_rope(
                projected.unflatten(2, (attn.heads, -1)),
                norm.weight,
                None,
                cos,
                sin,
                norm="rms",
                eps=norm.eps,
                across_heads=True,
                from_output=self.from_output,
            )
        normed = norm(projected)
        if rotary is not None:
            from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

            normed = apply_rotary_emb(normed, rotary)
        return normed.unflatten(2, (attn.heads, -1))


def _block_why_not(block: Any) -> str | None:
    other = [norm for norm in (block.norm1, block.norm2) if type(norm) is not RMSNorm]
    return f"one of its norms is a {type(other[0]).__name__}" if other else None


def _attention_why_not(attn: Any) -> str | None:
    other = [norm for norm in (attn.norm_q, attn.norm_k) if type(norm) is not nn.RMSNorm]
    return f"one of its norms is a {type(other[0]).__name__}" if other else None


FORWARDS = (
    ForwardPatch(
        "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock",
        "ada_norm",
        block_forward,
        _block_why_not,
    ),
)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.transformers.transformer_ltx.LTXVideoAttnProcessor",
        ATTENTION,
        LTXProcessor,
        _attention_why_not,
        also=qk_always,
    ),
)
