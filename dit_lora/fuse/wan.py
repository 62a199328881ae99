"""Wan's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_wan.py (WanTransformerBlock, WanAttnProcessor).

Shapes: B batch, S video tokens, K tokens that are attended to, D width, H heads; G rows of modulation a sample.
"""

from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from dit_lora.fuse.attention import FusedProcessor, attend
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
    rotary_emb: Rotary,
) -> torch.Tensor:
    """Video tokens (B, S, D) after both attentions and feed-forward, as `WanTransformerBlock.forward`.

    The residual stream keeps its dtype; the modulation is fp32.
    """
    shift, scale, gate, shift_ff, scale_ff, gate_ff = _modulation(block, temb)
    normed, (x,) = joint_ada_norm(
        (Stream(hidden_states, shift, scale),), norm="layer", eps=block.norm1.eps
    )
    y = block.attn1(normed, None, None, rotary_emb)
    if isinstance(block.norm2, nn.Identity):
        normed = x = _gated(x, gate, y)
    else:
        weight, bias, eps = block.norm2.weight, block.norm2.bias, block.norm2.eps
        normed, x = ada_norm(x, weight=weight, bias=bias, norm="layer", eps=eps, y=y, gate=gate)
    y = block.attn2(normed, encoder_hidden_states, None, None)
    normed, x = ada_norm(x, shift_ff, scale_ff, norm="layer", eps=block.norm3.eps, y=y)
    return _gated(x, gate_ff, block.ffn(normed))


def _modulation(block: Any, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Shift, scale and gate of attention, then of the feed-forward: (B, G, D) of temb (B, 6, D) or (B, S, 6, D)."""
    temb = temb.float()
    if temb.ndim == 3:  # one row a sample
        temb = temb[:, None]
    return (block.scale_shift_table + temb).unbind(2)


def _gated(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x, gate.to(x.dtype), y)


class WanProcessor(FusedProcessor):
    """`WanAttnProcessor` of text and video: q and k normed across heads and rotated in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if self.is_stock or attn.fused_projections:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
        if encoder_hidden_states is None:
            query, key, value = project((attn.to_q, attn.to_k, attn.to_v), hidden_states)
        else:
            (query,) = project((attn.to_q,), hidden_states)
            key, value = project((attn.to_k, attn.to_v), encoder_hidden_states)
        query = self._normed(attn, query, attn.norm_q, rotary_emb)
        key = self._normed(attn, key, attn.norm_k, rotary_emb)
        value = value.unflatten(2, (attn.heads, -1))
        attended = attend(query, key, value, attention_mask, self.backend).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended))

    def _normed(
        self, attn: Any, projected: torch.Tensor, norm: Any, rotary: Rotary | None
    ) -> torch.Tensor:
        """q or k (B, S, D) as (B, S, H, D / H): normed across heads, then rotated."""
        if not self.fusion.is_on("qk_norm_rope"):
            heads = norm(projected).unflatten(2, (attn.heads, -1))
            return heads if rotary is None else _rotated(heads, *rotary)
        cos, sin = (table.squeeze(2) for table in rotary) if rotary is not None else (None, None)
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


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1) turned by tables (1, S, 1, D / H) that hold each angle twice."""
    a, b = heads.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(heads)


def _block_why_not(block: Any) -> str | None:
    norms = (block.norm1, block.norm2, block.norm3)
    other = [norm for norm in norms if type(norm) not in (FP32LayerNorm, nn.Identity)]
    return f"one of its norms is a {type(other[0]).__name__}" if other else None


def _attention_why_not(attn: Any) -> str | None:
    if attn.add_k_proj is not None:
        return "it attends to an image too"
    other = [norm for norm in (attn.norm_q, attn.norm_k) if type(norm) is not nn.RMSNorm]
    return f"one of its norms is a {type(other[0]).__name__}" if other else None


FORWARDS = (
    ForwardPatch(
        "diffusers.models.transformers.transformer_wan.WanTransformerBlock",
        "ada_norm",
        block_forward,
        _block_why_not,
    ),
)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.transformers.transformer_wan.WanAttnProcessor",
        ATTENTION,
        WanProcessor,
        _attention_why_not,
        also=qk_always,
    ),
)
