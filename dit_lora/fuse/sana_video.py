"""SANA-Video blocks on fused ops, as `sana` with rotary positions and a convolution over time.

Source of the arithmetic: diffusers, models/transformers/transformer_sana_video.py (SanaVideoTransformerBlock,
GLUMBTempConv, SanaLinearAttnProcessor3_0, SanaAttnProcessor2_0).

Shapes: B batch, F frames, S tokens (F * H * W of them), T text tokens, D width, G groups of tokens that share a
modulation: 1, or a group a token.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import Recomputable, plain
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_if_normed
from dit_lora.fuse.sana import (
    Rotary,
    SanaLinearProcessor,
    SanaProcessor,
    mix,
    through_block,
    wrapped_depthwise,
    wrapped_norm,
)
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
    rotary_emb: Rotary | None = None,
) -> torch.Tensor:
    """Tokens (B, S, D) after both attentions and the feed-forward, as `SanaVideoTransformerBlock.forward`."""
    assert timestep is not None
    rows = timestep.reshape(len(hidden_states), timestep.shape[1], 6, -1)
    tables = (block.scale_shift_table[None, None] + rows).unbind(dim=2)

    def feed_forward(tokens: torch.Tensor) -> torch.Tensor:
        return block.ff(tokens.unflatten(1, (frames, height, width))).flatten(1, 3)

    text = {
        "encoder_hidden_states": encoder_hidden_states,
        "attention_mask": encoder_attention_mask,
    }
    return through_block(block, hidden_states, tables, text, feed_forward, rotary_emb=rotary_emb)


def feed_forward(ff: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """`GLUMBTempConv.forward`: (B, F, H, W, D) to the same."""
    batch, frames, height, width, channels = hidden_states.shape
    output = mix(ff, hidden_states.reshape(-1, height, width, channels))
    pixels = output.view(batch, frames, height * width, channels).permute(0, 3, 1, 2)
    output = (pixels + ff.conv_temp(pixels)).permute(0, 2, 3, 1).view(hidden_states.shape)
    if ff.norm_type == "rms_norm":
        output = ff.norm(output.movedim(1, -1)).movedim(-1, 1)
    if ff.residual_connection:
        output = output + hidden_states
    return output


class SanaVideoLinearProcessor(SanaLinearProcessor):
    """`SanaLinearAttnProcessor3_0`: the numerator is rotated, the denominator is not; no limit in fp16."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
        *,
        normed: Recomputable | None = None,
    ) -> torch.Tensor:
        if self.is_stock or encoder_hidden_states is not None or rotary_emb is None:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb=rotary_emb
            )
        cos, sin = (table.squeeze(2) for table in rotary_emb)
        return self.attended(attn, hidden_states, (cos, sin), normed)


def _saturated(attn: Any) -> str | None:
    return "its output saturates" if isinstance(attn.processor, SaturatingProcessor) else None


_MODULE = "diffusers.models.transformers.transformer_sana_video"
FORWARDS = (
    ForwardPatch(f"{_MODULE}.SanaVideoTransformerBlock", "ada_norm", block_forward, wrapped_norm),
    ForwardPatch(f"{_MODULE}.GLUMBTempConv", "silu_dwconv_glu", feed_forward, wrapped_depthwise),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_MODULE}.SanaAttnProcessor2_0", ATTENTION, SanaProcessor, plain, also=qk_if_normed
    ),
    ProcessorPatch(
        f"{_MODULE}.SanaLinearAttnProcessor3_0",
        "relu_linear_attention",
        SanaVideoLinearProcessor,
        _saturated,
        also=qk_if_normed,
    ),
)
