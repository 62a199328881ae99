"""Mochi's blocks and attention on fused ops: RMS norms of each branch's output too, behind gates of tanh.

Source of the arithmetic: diffusers, models/transformers/transformer_mochi.py (MochiTransformerBlock, MochiRMSNormZero,
MochiModulatedRMSNorm), models/attention_processor.py (MochiAttnProcessor2_0).

Shapes: B batch, V video tokens, T text tokens, D width (of the text, another one), H heads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from dit_lora.fuse.attention import Recomputable, attend
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora.fuse.two_streams import (
    Heads,
    Rotary,
    TwoStreamProcessor,
    attention_why_not,
    each,
    modulated,
    spared,
)
from dit_lora_kernels.ada_norm import Stream, ada_norm


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    encoder_attention_mask: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (B, V, D) and text (B, T, D') after attention and feed-forward, as `MochiTransformerBlock.forward`."""
    tables = _modulation(block.norm1, temb)
    video, (x,) = _normed(hidden_states, tables.scale, block.norm1.norm.eps)
    norm = block.norm1_context
    if block.context_pre_only:
        scale = norm.linear_1(norm.silu(temb).to(encoder_hidden_states.dtype))
        text, (context,) = _normed(encoder_hidden_states, scale, norm.norm.eps)
    else:
        text_tables = _modulation(norm, temb)
        text, (context,) = _normed(encoder_hidden_states, text_tables.scale, norm.norm.eps)
    attended, attended_text = block.attn1(
        hidden_states=video.tensor,
        encoder_hidden_states=text.tensor,
        image_rotary_emb=image_rotary_emb,
        attention_mask=encoder_attention_mask,
        **spared(block.attn1, video, text),
    )
    x = _leave((block.norm2, block.norm3, block.norm4), block.ff, x, attended, tables)
    if not block.context_pre_only:
        norms = (block.norm2_context, block.norm3_context, block.norm4_context)
        context = _leave(norms, block.ff_context, context, attended_text, text_tables)
    return x, context


class _Modulation(NamedTuple):
    """Four tables (B, D) in the order of `MochiRMSNormZero.linear`."""

    scale: torch.Tensor
    gate: torch.Tensor
    scale_ff: torch.Tensor
    gate_ff: torch.Tensor


def _modulation(norm: Any, temb: torch.Tensor) -> _Modulation:
    return _Modulation(*norm.linear(norm.silu(temb)).chunk(4, dim=1))


def _normed(
    x: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[Recomputable, tuple[torch.Tensor, ...]]:
    return modulated((Stream(x, scale=scale),), norm="rms", eps=eps)


def _leave(
    norms: tuple[Any, Any, Any],
    ff: Any,
    x: torch.Tensor,
    attended: torch.Tensor,
    modulation: _Modulation,
) -> torch.Tensor:
    """The stream with attention's output, and its feed-forward's, normed and added through their gates."""
    after, before_ff, after_ff = norms
    _, gate, scale_ff, gate_ff = modulation
    y = ada_norm(attended, norm="rms", eps=after.eps)
    normed, x = ada_norm(
        x, scale=scale_ff, norm="rms", eps=before_ff.eps, y=y, gate=torch.tanh(gate)
    )
    y = ada_norm(ff(normed), norm="rms", eps=after_ff.eps)
    return torch.addcmul(x, torch.tanh(gate_ff)[:, None], y)


class MochiProcessor(TwoStreamProcessor):
    """`MochiAttnProcessor2_0` with q and k of each stream normed, and the video's rotated, in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: Rotary | None = None,
        recomputable: tuple[Recomputable, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trained = image_rotary_emb is not None and image_rotary_emb[0].requires_grad
        if self.is_stock or trained:  # the op's tables have no gradient
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        shape, (of_video, of_text) = (attn.heads, -1), each(recomputable)
        heads = self.heads(
            (attn.to_q, attn.to_k, attn.to_v),
            (attn.norm_q, attn.norm_k),
            hidden_states,
            shape,
            image_rotary_emb,
            of_video,
        )
        text_heads = self.heads(
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            encoder_hidden_states,
            shape,
            recomputable=of_text,
        )
        attended = self._attended(heads, text_heads, attention_mask)
        video = hidden_states.shape[1]
        attended, text = attended[:, :video], attended[:, video:]
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](attended)), text

    def normed(self, heads: torch.Tensor, norm: Any, rotary: Rotary | None) -> torch.Tensor:
        if rotary is None:
            return super().normed(heads, norm, None)
        if not self.fusion.is_on("qk_norm_rope"):
            return _rotated(norm(heads), *rotary)
        cos, sin = (_table(angles) for angles in rotary)
        return super().normed(heads, norm, (cos, sin))

    def _attended(
        self,
        heads: Heads,
        text_heads: Heads,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """(B, V + T, H * D): each sample attends to its own text alone, whose tokens then come first, zeros after."""
        total, outputs = heads[0].shape[1] + text_heads[0].shape[1], []
        for i, text_mask in enumerate(mask):
            there = torch.nonzero(text_mask.flatten()).flatten()
            query, key, value = (
                torch.cat([of_video[i], of_text[i, there]])[None]
                for of_video, of_text in zip(heads, text_heads, strict=True)
            )
            output = attend(query, key, value, None, self.backend).flatten(2)
            outputs.append(F.pad(output, (0, 0, 0, total - output.shape[1])))
        return torch.cat(outputs)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1) of (B, V, H, D) turned by tables (V, H, D / 2)."""
    a, b = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(heads)


_TABLES = WeakIdKeyDictionary()


def _table(angles: torch.Tensor) -> torch.Tensor:
    """(1, V, H * D) with each of the angles (V, H, D / 2) twice, kept while they live: all blocks share one."""
    if torch.compiler.is_compiling():
        return angles.repeat_interleave(2, dim=-1).flatten(1)[None]
    if angles not in _TABLES:
        _TABLES[angles] = angles.repeat_interleave(2, dim=-1).flatten(1)[None]
    return _TABLES[angles]


_MOCHI = "diffusers.models.transformers.transformer_mochi"
FORWARDS = (ForwardPatch(f"{_MOCHI}.MochiTransformerBlock", "ada_norm", block_forward),)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.MochiAttnProcessor2_0",
        ATTENTION,
        MochiProcessor,
        attention_why_not,
        also=qk_always,
    ),
)
