"""Z-Image's blocks and attention on fused ops: the single stream of image and text, and the refiners of each.

The modulation is a scale before attention and feed-forward, and after each a norm and a gate through a tanh.

Source of the arithmetic: diffusers, models/transformers/transformer_z_image.py (ZImageTransformerBlock, FeedForward,
ZSingleStreamAttnProcessor).

Shapes: B batch, S tokens, D width, H heads.
"""

from functools import partial
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, attend, project_output, rotate_pairs
from dit_lora.fuse.models.complex_rotary import get_rotary_tables
from dit_lora.fuse.models.streams import normalize_stream, recompute_norm
from dit_lora.fuse.models.swiglu import apply_swiglu
from dit_lora.fuse.models.two_streams import TwoStreamProcessor, build_recompute_kwargs, find_attention_problem
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op, make_norm_class_check
from dit_lora_kernels.ada_norm import AdaNormInputs

_Z_IMAGE = "diffusers.models.transformers.transformer_z_image"


def block_forward(
    block: Any,
    x: torch.Tensor,
    attn_mask: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    adaln_input: torch.Tensor | None = None,
    noise_mask: torch.Tensor | None = None,
    adaln_noisy: torch.Tensor | None = None,
    adaln_clean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Forward of `ZImageTransformerBlock`: tokens (B, S, D) after attention and feed-forward.

    The text's refiner has no modulation.
    """
    if noise_mask is not None:  # Z-Image-Omni: some tokens are clean, with their own modulation
        return type(block).forward(block, x, attn_mask, freqs_cis, adaln_input, noise_mask, adaln_noisy, adaln_clean)
    scale = gate = scale_ff = gate_ff = None
    if block.modulation:
        scale, gate, scale_ff, gate_ff = block.adaLN_modulation(adaln_input).chunk(4, dim=1)
        gate, gate_ff = gate.tanh(), gate_ff.tanh()
    norm, stream = block.attention_norm1, AdaNormInputs(x, scale=scale)
    normed, x = normalize_stream(norm, stream, "rms")
    # The norm's backward saves its input, so its output need not be saved for adapters: it is recomputed.
    recomputable = RecomputableTensor(normed, partial(recompute_norm, normalize_stream, norm, stream, "rms"))
    attended = block.attention(
        normed, attention_mask=attn_mask, freqs_cis=freqs_cis, **build_recompute_kwargs(block.attention, recomputable)
    )
    attended, _ = normalize_stream(block.attention_norm2, AdaNormInputs(attended), "rms")
    stream = AdaNormInputs(x, scale=scale_ff, y=attended, gate=gate)
    normed, x = normalize_stream(block.ffn_norm1, stream, "rms")
    output, _ = normalize_stream(block.ffn_norm2, AdaNormInputs(block.feed_forward(normed)), "rms")
    return x + output if gate_ff is None else torch.addcmul(x, gate_ff[:, None], output)


def feed_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of `FeedForward` for x (B, S, D)."""
    return apply_swiglu(module.w1, module.w3, module.w2, x)


class ZImageProcessor(TwoStreamProcessor):
    """`ZSingleStreamAttnProcessor` that norms and rotates q and k in one pass."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
        recomputable: tuple[RecomputableTensor, ...] = (),
    ) -> torch.Tensor:
        if self.should_use_stock_processor:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        rotary = None if freqs_cis is None else get_rotary_tables(freqs_cis)
        heads = self.compute_image_heads(attn, hidden_states, rotary, *recomputable)
        if attention_mask is not None and attention_mask.ndim == 2:
            # (B, K) to (B, 1, 1, K).
            attention_mask = attention_mask[:, None, None]
        return project_output(attn, attend(*heads, attention_mask, self.backend).flatten(2))

    def normalize_heads(self, heads: torch.Tensor, norm: Any, rotary: RotaryTables | None) -> torch.Tensor:
        """q or k (B, S, H, D) after its norm and rotation with tables (B, S, D). Uses the kernel if it is on."""
        if rotary is None or self.fusion.is_on("qk_norm_rope"):
            return super().normalize_heads(heads, norm, rotary)
        if norm is not None:
            heads = norm(heads)
        # (B, S, D) with each angle twice, to (B, S, 1, D / 2) for all heads.
        cos, sin = (table[:, :, None, ::2] for table in rotary)
        return rotate_pairs(heads, cos, sin)


_NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
FORWARDS = (
    ForwardPatch(
        f"{_Z_IMAGE}.ZImageTransformerBlock", "ada_norm", block_forward, make_norm_class_check(_NORMS, RMSNorm)
    ),
    ForwardPatch(f"{_Z_IMAGE}.FeedForward", "ada_norm", feed_forward),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_Z_IMAGE}.ZSingleStreamAttnProcessor",
        ATTENTION,
        ZImageProcessor,
        find_attention_problem,
        get_extra_ops=get_qk_op,
    ),
)
