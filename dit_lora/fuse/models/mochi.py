"""Mochi's blocks and attention on fused ops: RMS norms of each branch's output too, behind gates of tanh.

Source of the arithmetic: diffusers, models/transformers/transformer_mochi.py (MochiTransformerBlock, MochiRMSNormZero,
MochiModulatedRMSNorm), models/attention_processor.py (MochiAttnProcessor2_0).

Shapes: B batch, V video tokens, T text tokens, D width (of the text, another one), H heads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from dit_lora.fuse.attention import (
    Heads,
    Recomputable,
    Rotary,
    attend,
    project_output,
    rotate_pairs,
)
from dit_lora.fuse.models.two_streams import (
    TwoStreamProcessor,
    attention_why_not,
    each,
    modulated,
    spared,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora_kernels.ada_norm import Stream, ada_norm


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    encoder_attention_mask: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return video (B, V, D) and text (B, T, D') after attention and feed-forward, as `MochiTransformerBlock` does."""
    tables = _modulation(block.norm1, temb)
    video, (x,) = _normed(hidden_states, tables.scale, block.norm1.norm.eps)
    norm = block.norm1_context
    if block.context_pre_only:  # the last block, after which nobody reads the text
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
    """Return a `MochiRMSNormZero`'s tables of temb (B, D)."""
    return _Modulation(*norm.linear(norm.silu(temb)).chunk(4, dim=1))


def _normed(
    x: torch.Tensor, scale: torch.Tensor, eps: float
) -> tuple[Recomputable, tuple[torch.Tensor, ...]]:
    """Return x (B, S, D) after RMSNorm times 1 + scale (B, D), and x to go on from."""
    return modulated((Stream(x, scale=scale),), norm="rms", eps=eps)


def _leave(
    norms: tuple[Any, Any, Any],
    ff: Any,
    x: torch.Tensor,
    attended: torch.Tensor,
    modulation: _Modulation,
) -> torch.Tensor:
    """Return the stream (B, S, D) with attention's output, and its feed-forward's, normed and added through gates."""
    after, before_ff, after_ff = norms
    _, gate, scale_ff, gate_ff = modulation
    # Each branch's output is normed before its gate; the gated sum is then made by the next norm that reads it.
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
        of_video, of_text = each(recomputable)
        heads = self.image_heads(attn, hidden_states, image_rotary_emb, of_video)
        text_heads = self.text_heads(attn, encoder_hidden_states, recomputable=of_text)
        attended = self._attended(heads, text_heads, attention_mask)
        video = hidden_states.shape[1]
        attended, text = attended[:, :video], attended[:, video:]
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return project_output(attn, attended), text

    def normed(self, heads: torch.Tensor, norm: Any, rotary: Rotary | None) -> torch.Tensor:
        """Return q or k as `TwoStreamProcessor.normed`, with tables (V, H, D / 2) of each head, in fp32."""
        if rotary is None:
            return super().normed(heads, norm, None)
        if not self.fusion.is_on("qk_norm_rope"):
            normed = norm(heads)
            return rotate_pairs(normed.float(), *rotary).type_as(normed)
        # A row of all heads' angles for each token, which the kernel takes as a table of the full width.
        cos, sin = (_table(angles) for angles in rotary)
        return super().normed(heads, norm, (cos, sin))

    def _attended(self, heads: Heads, text_heads: Heads, mask: torch.Tensor) -> torch.Tensor:
        """Return (B, V + T, H * D), the video's tokens first, by the text's mask (B, T).

        Each sample attends to its own text alone, whose tokens come next; what its mask leaves out is zeros, last.
        """
        total, outputs = heads[0].shape[1] + text_heads[0].shape[1], []
        # A sample at a time, as the stock processor: their texts are of different lengths.
        for i, text_mask in enumerate(mask):
            kept_tokens = torch.nonzero(text_mask.flatten()).flatten()
            query, key, value = (
                torch.cat([of_video[i], of_text[i, kept_tokens]])[None]
                for of_video, of_text in zip(heads, text_heads, strict=True)
            )
            output = attend(query, key, value, None, self.backend).flatten(2)
            # To one length again, as the stock processor pads: what a text lacks follows as zeros.
            outputs.append(F.pad(output, (0, 0, 0, total - output.shape[1])))
        return torch.cat(outputs)


# By identity, as tensors compare element by element; a model makes its tables anew at every forward.
_TABLES = WeakIdKeyDictionary()


def _table(angles: torch.Tensor) -> torch.Tensor:
    """Return (1, V, H * D) with each of the angles (V, H, D / 2) twice, kept while they live: all blocks share one."""
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
