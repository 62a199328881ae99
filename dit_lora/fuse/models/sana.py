"""Sana blocks on fused ops: tokens stay channels last from one residual to the next, through the convolutions too.

Source of the arithmetic: diffusers, models/transformers/sana_transformer.py (SanaTransformerBlock, GLUMBConv,
SanaAttnProcessor2_0) and models/attention_processor.py (SanaLinearAttnProcessor2_0). What SANA-Video does alike is
here as functions and classes that `sana_video` uses.

Shapes: B batch, S tokens (H * W of them), T text tokens, D width, G groups of tokens that share a modulation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn
from torch.nn import functional

from dit_lora.fuse.attention import (
    FusedProcessor,
    Recomputable,
    Rotary,
    SharedInputProcessor,
    plain,
    project_qkv,
)
from dit_lora.fuse.lora import is_hooked
from dit_lora.fuse.models.streams import norm_stream
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, Fusion, ProcessorPatch, qk_if_normed
from dit_lora.numerics.attention_calls import attention_call
from dit_lora.numerics.saturation import SaturatingProcessor, saturate
from dit_lora_kernels.ada_norm import Stream
from dit_lora_kernels.relu_linear_attention import relu_linear_attention
from dit_lora_kernels.silu_dwconv_glu import silu_dwconv_glu


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    height: int | None = None,
    width: int | None = None,
) -> torch.Tensor:
    """Return tokens (B, S, D) after both attentions and the feed-forward, as `SanaTransformerBlock` does."""
    assert timestep is not None
    tables = block.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)

    def feed_forward(tokens: torch.Tensor) -> torch.Tensor:
        # The module's own layout by a view: its fused forward permutes back, and no copy is made on the way.
        image = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return block.ff(image).flatten(2, 3).permute(0, 2, 1)

    text = {
        "encoder_hidden_states": encoder_hidden_states,
        "attention_mask": encoder_attention_mask,
    }
    return through_block(block, hidden_states, tables.chunk(6, dim=1), text, feed_forward)


def through_block(
    block: Any,
    hidden_states: torch.Tensor,
    tables: Sequence[torch.Tensor],
    text: dict[str, Any],
    feed_forward: Callable[[torch.Tensor], torch.Tensor],
    **extra: Any,
) -> torch.Tensor:
    """Run what the blocks of Sana and SANA-Video share, (B, S, D) to the same.

    `tables` are shift, scale and gate of both branches, (B, G, D); `extra` and `text` are arguments of the first and of
    the second attention. Where fp32 tables meet a bf16 stream, the stream is fp32 from the first gate on, as in the
    stock block.
    """
    shift, scale, gate, ff_shift, ff_scale, ff_gate = tables
    stream = Stream(hidden_states, shift, scale)
    tokens, hidden_states = norm_stream(block.norm1, stream)
    if isinstance(block.attn1.processor, SanaLinearProcessor):
        # The norm's backward keeps its input: its output need not be kept for the adapters.
        extra["normed"] = Recomputable(tokens, partial(_norm_again, block.norm1, stream))
    # Not in the norm before the feed-forward: attention to the text takes the sum, not normed.
    hidden_states = torch.addcmul(hidden_states, gate, block.attn1(tokens, **extra))
    attended = None if block.attn2 is None else block.attn2(hidden_states, **text)
    stream = Stream(hidden_states, ff_shift, ff_scale, attended)
    tokens, hidden_states = norm_stream(block.norm2, stream)
    return torch.addcmul(hidden_states, ff_gate, feed_forward(tokens))


def _norm_again(norm: nn.LayerNorm, stream: Stream) -> torch.Tensor:
    """Return the normed stream (B, S, D) alone, the same bits as before."""
    return norm_stream(norm, stream)[0]


def wrapped_norm(block: Any) -> str | None:
    """Return why the block's norms are not LayerNorms as it was built with, such as an adapter's wrapper around one."""
    norms = (getattr(block, name, None) for name in ("norm1", "norm2"))
    return None if all(type(n) is nn.LayerNorm for n in norms) else "its norms are not LayerNorm"


def feed_forward(ff: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what `GLUMBConv` does, (B, D, H, W) to the same; without copies where both are channels last in memory."""
    # Channels last: the 1x1 convolutions are products, the norm is over the last dimension, and nothing is moved.
    image = hidden_states.permute(0, 2, 3, 1)
    output = mix(ff, image)
    if ff.norm_type == "rms_norm":
        output = ff.norm(output)
    if ff.residual_connection:
        output = output + image
    return output.permute(0, 3, 1, 2)


def mix(ff: Any, image: torch.Tensor) -> torch.Tensor:
    """Run `conv_inverted` to `conv_point`, (B, H, W, D) to the same."""
    hidden = _pointwise(ff.conv_inverted, image)
    hidden = silu_dwconv_glu(hidden, ff.conv_depth.weight, ff.conv_depth.bias)
    return _pointwise(ff.conv_point, hidden)


def _pointwise(conv: Any, image: torch.Tensor) -> torch.Tensor:
    """Return a 1x1 convolution of (B, H, W, channels), as the matrix product that it is; by its module if that does more."""
    # PyTorch's convolution keeps its input for the backward also where its weight is frozen; a product does not.
    if _is_bare(conv):
        return functional.linear(image, conv.weight.flatten(1), conv.bias)
    return conv(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _is_bare(conv: Any) -> bool:
    """Return whether calling it is its convolution and nothing else: no adapter, no hooks."""
    return type(conv) is nn.Conv2d and not is_hooked(conv)


def wrapped_depthwise(ff: Any) -> str | None:
    """Return why the depthwise convolution has to be called; None if its weights can go to the kernel."""
    return None if _is_bare(ff.conv_depth) else "its depthwise convolution has an adapter or hooks"


def _across_heads(
    processor: FusedProcessor, attn: Attention, norm: Any, projected: torch.Tensor
) -> torch.Tensor:
    """Return q or k (B, S, D) after RMSNorm across heads in one pass, or another norm by its module, or none."""
    if norm is None:
        return projected
    # A norm over one head's width would be another function of the same class.
    across = type(norm) is RMSNorm and norm.dim == projected.shape[-1:]
    if not across or not processor.fusion.is_on("qk_norm_rope"):
        return norm(projected)
    heads = projected.unflatten(-1, (attn.heads, -1))
    return processor.norm_and_rotate(heads, norm, None, "rms", across_heads=True).flatten(2)


class SanaProcessor(SharedInputProcessor):
    """`SanaAttnProcessor2_0`: one input for k and v, RMSNorm across heads in one pass."""

    def normed(
        self, attn: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k (B, S, D) after the layer's own norms."""
        query = _across_heads(self, attn, attn.norm_q, query)
        return query, _across_heads(self, attn, attn.norm_k, key)


class SanaLinearProcessor(FusedProcessor):
    """`SanaLinearAttnProcessor2_0` with its sums in fp32 whatever autocast does, and q, k, v of one input."""

    @property
    def is_stock(self) -> bool:
        """True if the stock processor is to be called: also while the kernel of this attention is off."""
        # The base's and one more. Not asked through `super`: Dynamo traces no such property.
        on = self.fusion.is_on(ATTENTION) and self.fusion.is_on("relu_linear_attention")
        return not on or self._parallel_config is not None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        normed: Recomputable | None = None,
    ) -> torch.Tensor:
        if self.is_stock or encoder_hidden_states is not None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask)
        # As the stock processor does: it clips what it returns in fp16.
        output = self.attended(attn, hidden_states, None, normed)
        return saturate(output) if hidden_states.dtype is torch.float16 else output

    def attended(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        rotary: Rotary | None,
        normed: Recomputable | None,
    ) -> torch.Tensor:
        """Return self-attention of (B, S, D), numerator rotated by tables (1, S, head width), and its projection."""
        with nullcontext() if normed is None else normed.not_kept():
            query, key, value = project_qkv(attn, hidden_states, None)
        query = _across_heads(self, attn, attn.norm_q, query)
        key = _across_heads(self, attn, attn.norm_k, key)
        query, key, value = (t.unflatten(-1, (attn.heads, -1)) for t in (query, key, value))

        def again() -> torch.Tensor:
            with attention_call():
                return relu_linear_attention(query, key, value, *(rotary or ())).flatten(2)

        attended = again()
        # Cheap to compute again, and backward has q, k and v: the adapter of the projection need not keep it.
        with Recomputable(attended, again).not_kept():
            projected = attn.to_out[0](attended)
        return attn.to_out[1](projected)


class SaturatingSanaLinearProcessor(SanaLinearProcessor, SaturatingProcessor):
    """The same around a processor that repeats fp16's limit in any dtype."""

    def attended(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        rotary: Rotary | None,
        normed: Recomputable | None,
    ) -> torch.Tensor:
        """Return what the other does, within fp16's range."""
        return saturate(super().attended(attn, hidden_states, rotary, normed))


def _linear_processor(stock: Any, fusion: Fusion, attn: Attention) -> FusedProcessor:
    """Make the processor that does what this stock one does to values beyond fp16's range."""
    if isinstance(stock, SaturatingProcessor):
        return SaturatingSanaLinearProcessor(stock, fusion, attn)
    return SanaLinearProcessor(stock, fusion, attn)


_SANA = "diffusers.models.transformers.sana_transformer"
FORWARDS = (
    ForwardPatch(f"{_SANA}.SanaTransformerBlock", "ada_norm", block_forward, wrapped_norm),
    ForwardPatch(f"{_SANA}.GLUMBConv", "silu_dwconv_glu", feed_forward, wrapped_depthwise),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_SANA}.SanaAttnProcessor2_0", ATTENTION, SanaProcessor, plain, also=qk_if_normed
    ),
    ProcessorPatch(
        "diffusers.models.attention_processor.SanaLinearAttnProcessor2_0",
        "relu_linear_attention",
        _linear_processor,
        also=qk_if_normed,
    ),
)
