"""Sana's linear attention in fp32, even under autocast, clamped to fp16's range if a checkpoint relies on it.

The arithmetic is Diffusers' own: its processor is called with autocast disabled around everything except the
projections. The processor casts q, k and v to fp32, but under autocast its matrix products, and with them the sums
over all tokens, would run in bf16 again.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from dit_lora.numerics.saturation import SaturatingProcessor, saturate


class Fp32LinearAttention:
    """Wraps a stock linear-attention processor so that its fp32 part ignores autocast.

    Without autocast, its result is bitwise equal to the stock processor's.
    """

    def __init__(self, processor: Callable[..., torch.Tensor]) -> None:
        self.stock = processor

    # Attention.forward passes only the arguments that this signature names.
    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        # Only SANA-Video's processor has this argument.
        rotary = {} if rotary_emb is None else {"rotary_emb": rotary_emb}
        kind = hidden_states.device.type
        if not torch.is_autocast_enabled(kind):
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, **rotary)
        outer = _wrap_for_autocast(attn, kind, torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return self.stock(outer, hidden_states, encoder_hidden_states, attention_mask, **rotary)


class SaturatingLinearAttention(Fp32LinearAttention, SaturatingProcessor):
    """Linear attention in fp32 whose output is clamped at +-65504. Diffusers' processor does that only in fp16."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        return saturate(super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb))


def keep_linear_attention_fp32(transformer: nn.Module, *, should_saturate: bool) -> None:
    """Wrap the processor of every self-attention layer of a Sana model. The wrappers are not saved with the model."""
    wrap = SaturatingLinearAttention if should_saturate else Fp32LinearAttention
    for block in transformer.transformer_blocks:  # type: ignore[union-attr]
        attention: Any = block.attn1  # type: ignore[union-attr]
        attention.set_processor(wrap(attention.processor))


def _wrap_for_autocast(attn: Attention, device_type: str, dtype: torch.dtype) -> Any:
    """A stand-in for an attention layer that the stock processor gets. Its modules still run under autocast."""

    def run_with_autocast(module: nn.Module | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if module is None:
            return None

        def call(values: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device_type, dtype=dtype):
                return module(values)

        return call

    # The attributes that the stock processor reads.
    return SimpleNamespace(
        heads=attn.heads,
        to_q=run_with_autocast(attn.to_q),
        to_k=run_with_autocast(attn.to_k),
        to_v=run_with_autocast(attn.to_v),
        norm_q=run_with_autocast(attn.norm_q),
        norm_k=run_with_autocast(attn.norm_k),
        to_out=[run_with_autocast(module) for module in attn.to_out],
    )
