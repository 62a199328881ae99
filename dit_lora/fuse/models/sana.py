"""Sana blocks on fused ops. Tokens stay channels last from one residual to the next, through the convolutions too.

Source of the arithmetic: diffusers, models/transformers/sana_transformer.py (SanaTransformerBlock, GLUMBConv,
SanaAttnProcessor2_0) and models/attention_processor.py (SanaLinearAttnProcessor2_0). `sana_video` uses the functions
and classes here that SANA-Video has in common with Sana.

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
    RecomputableTensor,
    RotaryTables,
    SharedInputProcessor,
    find_plain_attention_problem,
    project_qkv,
)
from dit_lora.fuse.lora import is_hooked
from dit_lora.fuse.models.streams import normalize_stream, recompute_norm
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, FusedModelState, ProcessorPatch, get_qk_op_if_normed
from dit_lora.numerics.attention_calls import attention_call
from dit_lora.numerics.saturation import SaturatingProcessor, saturate
from dit_lora_kernels.ada_norm import AdaNormInputs
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
    """Forward of `SanaTransformerBlock`: tokens (B, S, D) after both attentions and the feed-forward."""
    assert timestep is not None
    # (1, 6, D) + (B, 6, D).
    tables = block.scale_shift_table[None] + timestep.reshape(len(hidden_states), 6, -1)

    def feed_forward(tokens: torch.Tensor) -> torch.Tensor:
        # A view in the layout that the module takes, (B, D, H, W). Its fused forward permutes back: no copy is made.
        image = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return block.ff(image).flatten(2, 3).permute(0, 2, 1)

    text = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
    return run_sana_block(block, hidden_states, tables.chunk(6, dim=1), text, feed_forward)


def run_sana_block(
    block: Any,
    hidden_states: torch.Tensor,
    tables: Sequence[torch.Tensor],
    text: dict[str, Any],
    feed_forward: Callable[[torch.Tensor], torch.Tensor],
    **extra: Any,
) -> torch.Tensor:
    """The computation that blocks of Sana and SANA-Video share: tokens (B, S, D) to (B, S, D).

    If the tables are fp32 and the stream is bf16, the stream is fp32 from the first gate on, as in the stock block.

    Args:
        block: The transformer block.
        hidden_states: Tokens (B, S, D).
        tables: Shift, scale and gate of attention, then of the feed-forward, each (B, G, D).
        text: Keyword arguments of the second attention.
        feed_forward: Maps normed tokens (B, S, D) to the feed-forward's output (B, S, D).
        extra: Keyword arguments of the first attention.
    """
    shift, scale, gate, ff_shift, ff_scale, ff_gate = tables
    stream = AdaNormInputs(hidden_states, shift, scale)
    tokens, hidden_states = normalize_stream(block.norm1, stream)
    if isinstance(block.attn1.processor, SanaLinearProcessor):
        # The norm's backward saves its input, so its output need not be saved for the adapters.
        extra["normed"] = RecomputableTensor(tokens, partial(recompute_norm, normalize_stream, block.norm1, stream))
    # Added here, not in the next norm: attention to the text takes the sum without a norm.
    hidden_states = torch.addcmul(hidden_states, gate, block.attn1(tokens, **extra))
    attended = None if block.attn2 is None else block.attn2(hidden_states, **text)
    stream = AdaNormInputs(hidden_states, ff_shift, ff_scale, attended)
    tokens, hidden_states = normalize_stream(block.norm2, stream)
    return torch.addcmul(hidden_states, ff_gate, feed_forward(tokens))


def find_norm_problem(block: Any) -> str | None:
    """Reason why a Sana block's norms cannot be fused.

    None if they are plain LayerNorms, not wrapped by an adapter.
    """
    norms = (getattr(block, name, None) for name in ("norm1", "norm2"))
    return None if all(type(n) is nn.LayerNorm for n in norms) else "its norms are not LayerNorm"


def feed_forward(ff: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of `GLUMBConv`, (B, D, H, W) to the same. Makes no copies if both are channels last in memory."""
    # (B, H, W, D): the 1x1 convolutions are matrix products and the norm is over the last dimension, without copies.
    image = hidden_states.permute(0, 2, 3, 1)
    output = apply_convolutions(ff, image)
    if ff.norm_type == "rms_norm":
        output = ff.norm(output)
    if ff.residual_connection:
        output = output + image
    return output.permute(0, 3, 1, 2)


def apply_convolutions(ff: Any, image: torch.Tensor) -> torch.Tensor:
    """Run the three convolutions of `GLUMBConv` with the fused kernel: (B, H, W, D) to the same shape."""
    # (B, H, W, D) to the wider hidden channels, which hold gate and value.
    hidden = _apply_pointwise(ff.conv_inverted, image)
    hidden = silu_dwconv_glu(hidden, ff.conv_depth.weight, ff.conv_depth.bias)
    return _apply_pointwise(ff.conv_point, hidden)


def _apply_pointwise(conv: Any, image: torch.Tensor) -> torch.Tensor:
    """A 1x1 convolution of (B, H, W, channels) as a matrix product; calls the module if that does more."""
    # PyTorch's convolution saves its input for backward even if its weight is frozen; a matrix product does not.
    if _is_plain_conv(conv):
        return functional.linear(image, conv.weight.flatten(1), conv.bias)
    return conv(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _is_plain_conv(conv: Any) -> bool:
    """True if calling a convolution module runs only its convolution: no adapter, no hooks."""
    return type(conv) is nn.Conv2d and not is_hooked(conv)


def find_depthwise_problem(ff: Any) -> str | None:
    """Why the depthwise convolution must be called as a module; None if the kernel can use its weights."""
    return None if _is_plain_conv(ff.conv_depth) else "its depthwise convolution has an adapter or hooks"


def _normalize_across_heads(
    processor: FusedProcessor, attn: Attention, norm: Any, query_or_key: torch.Tensor
) -> torch.Tensor:
    """q or k (B, S, D) after RMSNorm across heads in one pass.

    Other norms are called as modules; None returns the input.
    """
    if norm is None:
        return query_or_key
    # The same class could also norm over the width of one head, which is not the same function.
    across = type(norm) is RMSNorm and norm.dim == query_or_key.shape[-1:]
    if not across or not processor.fusion.is_on("qk_norm_rope"):
        return norm(query_or_key)
    heads = query_or_key.unflatten(-1, (attn.heads, -1))
    return processor.norm_and_rotate(heads, norm, None, "rms", across_heads=True).flatten(2)


class SanaProcessor(SharedInputProcessor):
    """`SanaAttnProcessor2_0` with one projection call for k and v, and RMSNorm across heads in one pass."""

    def normalize_qk(
        self, attn: Attention, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k (B, S, D) after the attention layer's norms."""
        query = _normalize_across_heads(self, attn, attn.norm_q, query)
        return query, _normalize_across_heads(self, attn, attn.norm_k, key)


class SanaLinearProcessor(FusedProcessor):
    """`SanaLinearAttnProcessor2_0` with sums in fp32 even under autocast, and one projection call for q, k and v."""

    @property
    def should_use_stock_processor(self) -> bool:
        """True if a layer must run its stock linear attention.

        This is also so while the linear attention kernel is off.
        """
        # The base class's conditions and one more. `super` is not used: Dynamo cannot trace such a property.
        is_enabled = self.fusion.is_on(ATTENTION) and self.fusion.is_on("relu_linear_attention")
        return not is_enabled or self._parallel_config is not None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        normed: RecomputableTensor | None = None,
    ) -> torch.Tensor:
        if self.should_use_stock_processor or encoder_hidden_states is not None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask)
        # The stock processor clips its fp16 output too.
        output = self.compute_attention(attn, hidden_states, None, normed)
        return saturate(output) if hidden_states.dtype is torch.float16 else output

    def compute_attention(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        rotary: RotaryTables | None,
        normed: RecomputableTensor | None,
    ) -> torch.Tensor:
        """Linear self-attention of tokens (B, S, D) and its output projection.

        `rotary` tables (1, S, head width) rotate the numerator.
        """
        with nullcontext() if normed is None else normed.skip_saving_activation():
            query, key, value = project_qkv(attn, hidden_states, None)
        query = _normalize_across_heads(self, attn, attn.norm_q, query)
        key = _normalize_across_heads(self, attn, attn.norm_k, key)
        query, key, value = (t.unflatten(-1, (attn.heads, -1)) for t in (query, key, value))

        def compute_heads() -> torch.Tensor:
            with attention_call():
                return relu_linear_attention(query, key, value, *(rotary or ())).flatten(2)

        attended = compute_heads()
        # Cheap to recompute, and q, k and v are saved for backward: the projection's adapter need not save it.
        with RecomputableTensor(attended, compute_heads).skip_saving_activation():
            projected = attn.to_out[0](attended)
        return attn.to_out[1](projected)


class SaturatingSanaLinearProcessor(SanaLinearProcessor, SaturatingProcessor):
    """`SanaLinearProcessor` for a stock processor that clips to fp16's range in every dtype."""

    def compute_attention(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        rotary: RotaryTables | None,
        normed: RecomputableTensor | None,
    ) -> torch.Tensor:
        """Linear attention of tokens (B, S, D), with its output clipped to fp16's range."""
        return saturate(super().compute_attention(attn, hidden_states, rotary, normed))


def _make_linear_processor(stock: Any, fusion: FusedModelState, attn: Attention) -> FusedProcessor:
    # Values beyond fp16's range must be treated as this stock processor does.
    if isinstance(stock, SaturatingProcessor):
        return SaturatingSanaLinearProcessor(stock, fusion, attn)
    return SanaLinearProcessor(stock, fusion, attn)


_SANA = "diffusers.models.transformers.sana_transformer"
FORWARDS = (
    ForwardPatch(f"{_SANA}.SanaTransformerBlock", "ada_norm", block_forward, find_norm_problem),
    ForwardPatch(f"{_SANA}.GLUMBConv", "silu_dwconv_glu", feed_forward, find_depthwise_problem),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_SANA}.SanaAttnProcessor2_0",
        ATTENTION,
        SanaProcessor,
        find_plain_attention_problem,
        get_extra_ops=get_qk_op_if_normed,
    ),
    ProcessorPatch(
        "diffusers.models.attention_processor.SanaLinearAttnProcessor2_0",
        "relu_linear_attention",
        _make_linear_processor,
        get_extra_ops=get_qk_op_if_normed,
    ),
)
