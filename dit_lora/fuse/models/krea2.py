"""Krea 2's blocks and attention on fused ops: the single stream, and the fusion of the text encoder's layers.

The modulation is computed once for all blocks; each block adds its own table. An RMSNorm's weight is zero-centered:
the factor is the weight plus one. Attention has fewer key heads than query heads, and a gate.

Source of the arithmetic: diffusers, models/transformers/transformer_krea2.py (Krea2TransformerBlock,
Krea2TextFusionBlock, Krea2FinalLayer, Krea2SwiGLU, Krea2AttnProcessor).

Shapes: B batch, S tokens of text and image, L layers of the text encoder, D width, H heads of queries, K of keys.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, attend
from dit_lora.fuse.lora import project_linear_layers
from dit_lora.fuse.models.streams import recompute_norm
from dit_lora.fuse.models.swiglu import apply_swiglu
from dit_lora.fuse.models.two_streams import TwoStreamProcessor, build_recompute_kwargs
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProblemFinder, ProcessorPatch, get_class_name, get_qk_op
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm

_KREA2 = "diffusers.models.transformers.transformer_krea2"


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: RotaryTables,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Forward of `Krea2TransformerBlock`: tokens (B, S, D) after attention and feed-forward; temb is (B, 1, 6 D)."""
    # (B, 1, 6 D) to (B, 1, 6, D), plus the block's own table.
    modulation = temb.unflatten(-1, (6, -1)) + block.scale_shift_table
    scale, shift, gate, scale_ff, shift_ff, gate_ff = modulation.unbind(-2)  # (B, 1, D) each
    # An fp32 table makes the stock block's residual stream fp32.
    x = hidden_states.to(torch.promote_types(hidden_states.dtype, gate.dtype))
    normed, x = _normalize_stream(block.norm1, AdaNormInputs(x, shift, scale))
    attended = block.attn(
        normed.tensor,
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
        **build_recompute_kwargs(block.attn, normed),
    )
    normed, x = _normalize_stream(block.norm2, AdaNormInputs(x, shift_ff, scale_ff, attended, gate))
    return torch.addcmul(x, gate_ff, block.ff(normed.tensor))


def text_forward(block: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Forward of `Krea2TextFusionBlock`: text (B, S, D), or the encoder layers of each token (B S, L, D)."""
    normed, x = _normalize_stream(block.norm1, AdaNormInputs(hidden_states))
    attended = block.attn(normed.tensor, attention_mask=attention_mask, **build_recompute_kwargs(block.attn, normed))
    normed, x = _normalize_stream(block.norm2, AdaNormInputs(x, y=attended))
    return x + block.ff(normed.tensor)


def final_forward(layer: Any, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    """Forward of `Krea2FinalLayer`: tokens (B, S, D) to the output (B, S, .); temb is (B, 1, D)."""
    scale, shift = (temb + layer.scale_shift_table).chunk(2, dim=1)
    normed, _ = _normalize_stream(layer.norm, AdaNormInputs(hidden_states, shift, scale))
    with normed.skip_saving_activation():
        return layer.linear(normed.tensor)


def swiglu_forward(ff: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward of `Krea2SwiGLU` for (B, S, D)."""
    return apply_swiglu(ff.gate, ff.up, ff.down, hidden_states)


def compute_norm_factor(norm: Any) -> torch.Tensor:
    """The factor (D,) of a zero-centered norm, in its weight's dtype as in `Krea2RMSNorm`."""
    return norm.weight + 1.0


def _normalize_stream(norm: Any, stream: AdaNormInputs) -> tuple[RecomputableTensor, torch.Tensor]:
    """Add a pending update to a stream (B, S, D), then norm and modulate the sum.

    Returns the result and the sum, with which the stream continues.
    """

    def normalize(stream: AdaNormInputs) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return joint_ada_norm((stream,), compute_norm_factor(norm), norm="rms", eps=norm.eps)

    normed, (x,) = normalize(stream)
    # The norm's backward saves its input, from which its output can be recomputed for the adapters.
    saved = stream._replace(x=x, y=None, gate=None)
    return RecomputableTensor(normed, partial(recompute_norm, normalize, saved)), x


class Krea2Processor(TwoStreamProcessor):
    """`Krea2AttnProcessor` with one pass for norm and rotation of q and k, and one projection call for all inputs."""

    def get_norm_weight(self, norm: Any) -> torch.Tensor | None:
        """The factor that the norm of q or k multiplies by: its weight plus one. None without a norm."""
        return None if norm is None else compute_norm_factor(norm)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: RotaryTables | None = None,
        recomputable: tuple[RecomputableTensor, ...] = (),
    ) -> torch.Tensor:
        if self.should_use_stock_processor:
            return self.stock(attn, hidden_states, attention_mask, image_rotary_emb)
        layers = (attn.to_q, attn.to_k, attn.to_v, attn.to_gate)
        with recomputable[0].skip_saving_activation() if recomputable else nullcontext():
            *projected, gate = project_linear_layers(layers, hidden_states)
        query, key, value = (tensor.unflatten(-1, (-1, attn.head_dim)) for tensor in projected)
        query = self.norm_and_rotate_heads(query, attn.norm_q, image_rotary_emb, "rms")
        key = self.norm_and_rotate_heads(key, attn.norm_k, image_rotary_emb, "rms")
        # Repeat each of the K heads for every query head that reads it, as the stock processor does: PyTorch's fast
        # kernels support a mask, or other ranks' tokens, only then.
        repeats = attn.num_heads // attn.num_kv_heads
        if repeats > 1:
            key, value = (heads.repeat_interleave(repeats, dim=2) for heads in (key, value))
        attended = attend(query, key, value, attention_mask, self.backend).flatten(2)
        # (B, S, H * D), one gate per element of attention's output.
        gate = torch.sigmoid(gate)
        # Both factors are saved anyway, so an adapter of the projection need not save their product.
        gated = RecomputableTensor(attended * gate, partial(torch.mul, attended, gate))
        with gated.skip_saving_activation():
            return attn.to_out[0](gated.tensor)


def _make_krea2_norm_check(*names: str) -> ProblemFinder:
    """Create a check that names the first of a module's norms (by attribute) that is not a `Krea2RMSNorm`."""

    def find_problem(module: Any) -> str | None:
        for norm in [getattr(module, name) for name in names]:
            # By name: Diffusers imports a model's module only when the model is used.
            if get_class_name(norm) != f"{_KREA2}.Krea2RMSNorm":
                return f"one of its norms is a {type(norm).__name__}"
        return None

    return find_problem


_FIND_BLOCK_PROBLEM = _make_krea2_norm_check("norm1", "norm2")
FORWARDS = (
    ForwardPatch(f"{_KREA2}.Krea2TransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),
    ForwardPatch(f"{_KREA2}.Krea2TextFusionBlock", "ada_norm", text_forward, _FIND_BLOCK_PROBLEM),
    ForwardPatch(f"{_KREA2}.Krea2FinalLayer", "ada_norm", final_forward, _make_krea2_norm_check("norm")),
    ForwardPatch(f"{_KREA2}.Krea2SwiGLU", "ada_norm", swiglu_forward),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_KREA2}.Krea2AttnProcessor",
        ATTENTION,
        Krea2Processor,
        _make_krea2_norm_check("norm_q", "norm_k"),
        get_extra_ops=get_qk_op,
    ),
)
