"""Diffusers' basic transformer block on fused ops, with adaLN-zero (DiT) or adaLN-single (Latte, PixArt).

Source of the arithmetic: diffusers, models/attention.py (BasicTransformerBlock), models/normalization.py
(AdaLayerNormZero). Its attention is `AttnProcessor2_0`, whose patch is in dit_lora/fuse/attention.py.

Shapes: B batch, S tokens, D width.
"""

from typing import Any

import torch
from torch import nn

from dit_lora.fuse.models.streams import normalize_stream
from dit_lora.fuse.patches import ForwardPatch, find_unsupported_norm, get_class_name
from dit_lora_kernels.ada_norm import AdaNormInputs

_ZERO, _SINGLE = "ada_norm_zero", "ada_norm_single"
_ZERO_NORM = "diffusers.models.normalization.AdaLayerNormZero"


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: torch.Tensor | None = None,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Forward of `BasicTransformerBlock`: tokens (B, S, D) after self-attention, cross-attention and feed-forward.

    It calls the stock forward if the feed-forward is chunked or attention gets extra arguments.
    """
    # Only the stock code supports chunks, which save memory, and what these arguments control (GLIGEN).
    if block._chunk_size is not None or cross_attention_kwargs:
        return type(block).forward(
            block,
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            timestep,
            cross_attention_kwargs,
            class_labels,
            added_cond_kwargs,
        )
    shift, scale, gate, shift_ff, scale_ff, gate_ff = _compute_modulation(block, hidden_states, timestep, class_labels)
    # An fp32 table makes the stock block's residual stream fp32.
    x = hidden_states
    if gate.dtype is not x.dtype:
        x = x.to(torch.promote_types(x.dtype, gate.dtype))
    norm, norm_ff = _get_norms(block)
    normed, x = normalize_stream(norm, AdaNormInputs(x, shift, scale))
    y = block.attn1(normed, encoder_hidden_states=None, attention_mask=attention_mask)
    stream = AdaNormInputs(x, shift_ff, scale_ff, y, gate)
    # The second attention takes the residual stream without a norm, so the first one's output is added before it.
    if block.attn2 is not None:
        x = torch.addcmul(x, gate, y)
        y = block.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        stream = AdaNormInputs(x, shift_ff, scale_ff, y)
    normed, x = normalize_stream(norm_ff, stream)
    # (B, D) to (B, 1, D), to broadcast over the tokens.
    gate_ff = gate_ff[:, None] if gate_ff.ndim == 2 else gate_ff
    return torch.addcmul(x, gate_ff, block.ff(normed))


def _compute_modulation(
    block: Any, hidden_states: torch.Tensor, timestep: torch.Tensor | None, class_labels: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Shift, scale and gate of attention, then of the feed-forward: each (B, D), or (B, 1, D) with adaLN-single."""
    # adaLN-single: one projection of the timestep for all blocks, plus a table for each block.
    if block.norm_type == _SINGLE:
        assert timestep is not None
        # (1, 6, D) + (B, 6, D), split into six of (B, 1, D).
        return (block.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)).chunk(6, 1)
    norm = block.norm1
    # Draws the labels to drop from the random state, at the same point as the stock block.
    condition = norm.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype)
    return norm.linear(norm.silu(condition)).chunk(6, 1)


def _get_norms(block: Any) -> tuple[Any, Any]:
    """The LayerNorm modules of a block: the one before attention and the one before the feed-forward."""
    if block.norm_type == _SINGLE:
        return block.norm1, block.norm2
    return block.norm1.norm, block.norm3


def _find_block_problem(block: Any) -> str | None:
    """Reason why a block keeps its stock forward; None if the fused one does the same."""
    if block.norm_type not in (_ZERO, _SINGLE):
        return f"its norm is {block.norm_type}"
    if block.pos_embed is not None:
        return "it adds positions of its own"
    if block.only_cross_attention:
        return "its first attention is to the text"
    if block.norm_type == _ZERO and block.attn2 is not None:
        return "it has a second attention"
    if block.norm_type == _ZERO and get_class_name(block.norm1) != _ZERO_NORM:
        return f"its norm1 is a {type(block.norm1).__name__}"
    return find_unsupported_norm(_get_norms(block), nn.LayerNorm)


FORWARDS = (
    ForwardPatch("diffusers.models.attention.BasicTransformerBlock", "ada_norm", block_forward, _find_block_problem),
)
