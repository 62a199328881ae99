"""SANA-Video blocks on fused ops: as in `sana`, with rotary positions and a convolution over time.

Source of the arithmetic: diffusers, models/transformers/transformer_sana_video.py (SanaVideoTransformerBlock,
GLUMBTempConv, SanaLinearAttnProcessor3_0, SanaAttnProcessor2_0).

Shapes: B batch, F frames, S tokens (F * H * W of them), T text tokens, D width, G groups of tokens that share a
modulation: 1, or one group per token.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, find_plain_attention_problem
from dit_lora.fuse.models.sana import (
    SanaLinearProcessor,
    SanaProcessor,
    apply_convolutions,
    find_depthwise_problem,
    find_norm_problem,
    run_sana_block,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op_if_normed
from dit_lora.numerics.saturation import SaturatingProcessor


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rotary_emb: RotaryTables | None = None,
) -> torch.Tensor:
    """Forward of `SanaVideoTransformerBlock`: tokens (B, S, D) after both attentions and the feed-forward."""
    assert timestep is not None
    # One row for the whole sample, or one per token if frames have their own timesteps.
    rows = timestep.reshape(len(hidden_states), timestep.shape[1], 6, -1)
    tables = (block.scale_shift_table[None, None] + rows).unbind(dim=2)

    def feed_forward(tokens: torch.Tensor) -> torch.Tensor:
        # (B, S, D) to (B, F, H, W, D) and back.
        return block.ff(tokens.unflatten(1, (frames, height, width))).flatten(1, 3)

    text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
    return run_sana_block(block, hidden_states, tables, text, feed_forward, rotary_emb=rotary_emb)


def feed_forward(ff: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of `GLUMBTempConv`, (B, F, H, W, D) to the same."""
    # Frames as samples up to the convolution over time, whose images are (B, D, F, H * W).
    batch, frames, height, width, channels = hidden_states.shape
    output = apply_convolutions(ff, hidden_states.reshape(-1, height, width, channels))
    pixels = output.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
    # Call the module, with its adapters and hooks: the convolution over time is not part of the kernel.
    output = (pixels + ff.conv_temp(pixels)).permute(0, 2, 3, 1).view(hidden_states.shape)
    if ff.norm_type == "rms_norm":
        output = ff.norm(output.movedim(1, -1)).movedim(-1, 1)
    if ff.residual_connection:
        output = output + hidden_states
    return output


class SanaVideoLinearProcessor(SanaLinearProcessor):
    """`SanaLinearAttnProcessor3_0`: the numerator is rotated, the denominator is not; fp16 output is not clipped."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
        *,
        normed: RecomputableTensor | None = None,
    ) -> torch.Tensor:
        if self.should_use_stock_processor or encoder_hidden_states is not None or rotary_emb is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb=rotary_emb)
        # (1, S, 1, head width) to (1, S, head width): all heads share the tables.
        cos, sin = (table.squeeze(2) for table in rotary_emb)
        return self.compute_attention(attn, hidden_states, (cos, sin), normed)


def _find_saturation_problem(attn: Any) -> str | None:
    """Reason why a layer keeps a stock processor that clips its output; None for other processors.

    The fused one here does not clip.
    """
    return "its output saturates" if isinstance(attn.processor, SaturatingProcessor) else None


_MODULE = "diffusers.models.transformers.transformer_sana_video"
FORWARDS = (
    ForwardPatch(f"{_MODULE}.SanaVideoTransformerBlock", "ada_norm", block_forward, find_norm_problem),
    ForwardPatch(f"{_MODULE}.GLUMBTempConv", "silu_dwconv_glu", feed_forward, find_depthwise_problem),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_MODULE}.SanaAttnProcessor2_0",
        ATTENTION,
        SanaProcessor,
        find_plain_attention_problem,
        get_extra_ops=get_qk_op_if_normed,
    ),
    ProcessorPatch(
        f"{_MODULE}.SanaLinearAttnProcessor3_0",
        "relu_linear_attention",
        SanaVideoLinearProcessor,
        _find_saturation_problem,
        get_extra_ops=get_qk_op_if_normed,
    ),
)
