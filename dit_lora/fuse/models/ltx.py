"""LTX-Video's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_ltx.py (LTXVideoTransformerBlock,
LTXVideoAttnProcessor).

Shapes: B batch, S video tokens, K key tokens, D width, H heads; G modulation rows per sample, 1 or S.
"""

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm

from dit_lora.fuse.attention import RotaryTables, reshape_mask
from dit_lora.fuse.models.across_heads import AcrossHeadsProcessor, find_rms_norm_problem
from dit_lora.fuse.models.streams import normalize_stream
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op, make_norm_class_check
from dit_lora_kernels.ada_norm import AdaNormInputs


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Forward of `LTXVideoTransformerBlock`: video tokens (B, S, D) after both attentions and feed-forward."""
    rows = temb.unflatten(-1, (len(block.scale_shift_table), -1))  # (B, G, 6, D)
    # Each block adds its own table to the shared rows. G is 1, or S if each token has its own timestep.
    modulation = block.scale_shift_table.to(temb.device) + rows
    shift, scale, gate, shift_ff, scale_ff, gate_ff = modulation.unbind(dim=2)
    normed, x = normalize_stream(block.norm1, AdaNormInputs(hidden_states, shift, scale), "rms")
    y = block.attn1(hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
    x = torch.addcmul(x, gate, y)  # fp32 from here on if the table is, as in the stock block
    y = block.attn2(
        x, encoder_hidden_states=encoder_hidden_states, image_rotary_emb=None, attention_mask=encoder_attention_mask
    )
    # The next norm adds the attention to the text, without a gate.
    normed, x = normalize_stream(block.norm2, AdaNormInputs(x, shift_ff, scale_ff, y), "rms")
    return torch.addcmul(x, gate_ff, block.ff(normed))


class LTXProcessor(AcrossHeadsProcessor):
    """`LTXVideoAttnProcessor` that norms q and k across heads and rotates them in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: RotaryTables | None = None,
    ) -> torch.Tensor:
        if self.should_use_stock_processor:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        mask = reshape_mask(attn, attention_mask, source)
        return self.compute_attention(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)

    def convert_rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """LTX-Video's rotary tables (B, S, D), unchanged.

        The kernel takes a row with the angles of all heads for each token.
        """
        return cos, sin

    def apply_rotary_tables(self, attn: Any, query_or_key: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        """Rotate q or k (B, S, D) with the stock code of LTX-Video, with tables of the same width."""
        # Imported late: a model's module is imported with the model, not with all patches.
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        return apply_rotary_emb(query_or_key, rotary)


_LTX = "diffusers.models.transformers.transformer_ltx"
_FIND_BLOCK_PROBLEM = make_norm_class_check(("norm1", "norm2"), RMSNorm)
FORWARDS = (ForwardPatch(f"{_LTX}.LTXVideoTransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),)
PROCESSORS = (
    ProcessorPatch(
        f"{_LTX}.LTXVideoAttnProcessor", ATTENTION, LTXProcessor, find_rms_norm_problem, get_extra_ops=get_qk_op
    ),
)
