"""Wan's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_wan.py (WanTransformerBlock, WanAttnProcessor).

Shapes: B batch, S video tokens, K key tokens, D width, H heads; G modulation rows per sample, 1 or S.
"""

from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from dit_lora.fuse.attention import RotaryTables, rotate_pairs
from dit_lora.fuse.models.across_heads import AcrossHeadsProcessor, find_rms_norm_problem
from dit_lora.fuse.models.streams import normalize_stream
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op, make_norm_class_check
from dit_lora_kernels.ada_norm import AdaNormInputs


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: RotaryTables,
) -> torch.Tensor:
    """Forward of `WanTransformerBlock`: video tokens (B, S, D) after both attentions and feed-forward.

    The residual stream keeps its dtype; the modulation is fp32.
    """
    temb = temb.float()
    if temb.ndim == 3:  # (B, 6, D): one row for each sample, not (B, S, 6, D)
        temb = temb[:, None]
    # The table (1, 6, D) broadcasts over batch and tokens: six of (B, G, D).
    shift, scale, gate, shift_ff, scale_ff, gate_ff = (block.scale_shift_table + temb).unbind(2)
    # The stock block computes norms in fp32 and rounds them to the stream's dtype; so does the kernel.
    normed, x = normalize_stream(block.norm1, AdaNormInputs(hidden_states, shift, scale))
    y = block.attn1(normed, None, None, rotary_emb)
    # Attention to the text takes the residual stream as it is.
    if isinstance(block.norm2, nn.Identity):
        normed = x = _add_gated_residual(x, gate, y)
    else:
        normed, x = normalize_stream(block.norm2, AdaNormInputs(x, y=y, gate=gate))
    y = block.attn2(normed, encoder_hidden_states, None, None)
    normed, x = normalize_stream(block.norm3, AdaNormInputs(x, shift_ff, scale_ff, y))
    return _add_gated_residual(x, gate_ff, block.ffn(normed))


def _add_gated_residual(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gated residual sum x + gate * y (B, S, D) in x's dtype, which may differ from the gate's."""
    return torch.addcmul(x, gate.to(x.dtype), y)


class WanProcessor(AcrossHeadsProcessor):
    """`WanAttnProcessor` for text and video that norms q and k across heads and rotates them in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> torch.Tensor:
        if self.should_use_stock_processor or attn.fused_projections:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        return self.compute_attention(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def convert_rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """Wan's rotary tables (1, S, 1, D / H) reshaped to (1, S, D / H).

        They hold each angle twice; all heads share them.
        """
        return cos.squeeze(2), sin.squeeze(2)

    def apply_rotary_tables(self, attn: Any, query_or_key: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        """Rotate each head of q or k (B, S, D) with tables (1, S, 1, D / H)."""
        # Diffusers reads cosines at even and sines at odd indices of its doubled tables.
        cos, sin = rotary
        heads = query_or_key.unflatten(2, (attn.heads, -1))
        return rotate_pairs(heads, cos[..., 0::2], sin[..., 1::2]).flatten(2)


def _find_attention_problem(attn: Any) -> str | None:
    """Reason why a Wan attention layer keeps its stock processor; None if the fused one does the same."""
    return "it attends to an image too" if attn.add_k_proj is not None else find_rms_norm_problem(attn)


_WAN = "diffusers.models.transformers.transformer_wan"
_FIND_BLOCK_PROBLEM = make_norm_class_check(("norm1", "norm2", "norm3"), FP32LayerNorm, nn.Identity)
FORWARDS = (ForwardPatch(f"{_WAN}.WanTransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),)
PROCESSORS = (
    ProcessorPatch(
        f"{_WAN}.WanAttnProcessor", ATTENTION, WanProcessor, _find_attention_problem, get_extra_ops=get_qk_op
    ),
)
