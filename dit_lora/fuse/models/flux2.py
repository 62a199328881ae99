"""FLUX.2's blocks and attention on fused ops.

The modulation is computed once for all blocks of a kind. A single block projects q, k, v and the hidden values of a
SwiGLU together, and both outputs together.

Source of the arithmetic: diffusers, models/transformers/transformer_flux2.py (Flux2TransformerBlock,
Flux2SingleTransformerBlock, Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor).

Shapes: B batch, T text tokens, I image tokens, S tokens of both, D width, H heads.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, attend
from dit_lora.fuse.models.flux import FluxProcessor, clip_to_fp16_range
from dit_lora.fuse.models.swiglu import recompute_gated_hidden
from dit_lora.fuse.models.two_streams import (
    Modulation,
    TwoStreamProcessor,
    add_attention_and_feed_forward,
    build_recompute_kwargs,
    find_attention_problem,
    modulate,
    norm_modulated_stream,
    require_plain_norms,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_class_name, get_qk_op
from dit_lora_kernels.ada_norm import AdaNormInputs

_FLUX2 = "diffusers.models.transformers.transformer_flux2"


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb_mod_img: torch.Tensor,
    temb_mod_txt: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `Flux2TransformerBlock`: text (B, T, D) and image (B, I, D) after attention and feed-forward."""
    # A row for each token, where references are kept (Diffusers' KV cache).
    if temb_mod_img.ndim != 2:
        return type(block).forward(
            block,
            hidden_states,
            encoder_hidden_states,
            temb_mod_img,
            temb_mod_txt,
            image_rotary_emb,
            joint_attention_kwargs,
        )
    # (B, 6 D) to six tables (B, D).
    modulation = Modulation(*temb_mod_img.chunk(6, dim=1))
    text_modulation = Modulation(*temb_mod_txt.chunk(6, dim=1))
    image, x = norm_modulated_stream(block.norm1, hidden_states, modulation)
    text, context = norm_modulated_stream(block.norm1_context, encoder_hidden_states, text_modulation)
    attended, attended_text = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **build_recompute_kwargs(block.attn, image, text),
    )
    x = add_attention_and_feed_forward(block.norm2, block.ff, x, attended, modulation)
    context = add_attention_and_feed_forward(
        block.norm2_context, block.ff_context, context, attended_text, text_modulation
    )
    return clip_to_fp16_range(context), x


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None,
    temb_mod: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Forward of `Flux2SingleTransformerBlock`: both streams (B, S, D) after attention and feed-forward.

    With `split_hidden_states`, text (B, T, D) and image (B, I, D).
    """
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    if temb_mod.ndim != 2:
        x: torch.Tensor = type(block).forward(
            block, hidden_states, None, temb_mod, image_rotary_emb, joint_attention_kwargs
        )
    else:
        # One set of tables for both streams, which are joined in this block.
        shift, scale, gate = temb_mod.chunk(3, dim=1)
        normed, (x,) = modulate((AdaNormInputs(hidden_states, shift, scale),), eps=block.norm.eps)
        attended = block.attn(
            hidden_states=normed.tensor,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
            **build_recompute_kwargs(block.attn, normed),
        )
        x = clip_to_fp16_range(torch.addcmul(x, gate[:, None], attended))
    return (x[:, :text_seq_len], x[:, text_seq_len:]) if split_hidden_states else x


def swiglu_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of `Flux2SwiGLU`: silu(first half) * second half."""
    # One split: its backward writes the joint gradient once. Two slices would write one each and add them.
    gate, linear = x.chunk(2, dim=-1)
    activated = RecomputableTensor(module.gate_fn(gate), partial(functional.silu, gate))
    with activated.skip_saving_activation():
        return activated.tensor * linear


class Flux2SingleProcessor(TwoStreamProcessor):
    """`Flux2ParallelSelfAttnProcessor` that norms and rotates q and k in one pass."""

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
        with recomputable[0].skip_saving_activation() if recomputable else nullcontext():
            projected = attn.to_qkv_mlp_proj(hidden_states)
        # One split: its backward writes the joint gradient once.
        inner = attn.inner_dim
        sizes = [inner, inner, inner, attn.mlp_hidden_dim * attn.mlp_mult_factor]
        # q, k and v (B, S, D) each, and the feed-forward's gate and linear halves.
        *heads, hidden = projected.split(sizes, dim=-1)
        query, key, value = (tensor.unflatten(-1, (-1, attn.head_dim)) for tensor in heads)
        query = self.normalize_heads(query, attn.norm_q, image_rotary_emb)
        key = self.normalize_heads(key, attn.norm_k, image_rotary_emb)
        attended = attend(query, key, value, attention_mask, self.backend).flatten(2)

        def recompute_joint() -> torch.Tensor:
            return torch.cat([attended, recompute_gated_hidden(*hidden.chunk(2, dim=-1))], dim=-1)

        joint = RecomputableTensor(torch.cat([attended, attn.mlp_act_fn(hidden)], dim=-1), recompute_joint)
        # Both parts are saved for backward anyway, so an adapter need not save their concatenation.
        with joint.skip_saving_activation():
            return attn.to_out(joint.tensor)


def _find_single_attention_problem(attn: Any) -> str | None:
    if get_class_name(attn.mlp_act_fn) != f"{_FLUX2}.Flux2SwiGLU":
        return f"its activation is a {type(attn.mlp_act_fn).__name__}"
    return _find_swiglu_problem(attn.mlp_act_fn) or find_attention_problem(attn)


def _find_swiglu_problem(module: Any) -> str | None:
    is_stock = get_class_name(module.gate_fn) == "torch.nn.modules.activation.SiLU"
    return None if is_stock else f"its activation is a {type(module.gate_fn).__name__}"


_FIND_BLOCK_PROBLEM = require_plain_norms("norm1", "norm1_context", "norm2", "norm2_context")
FORWARDS = (
    ForwardPatch(f"{_FLUX2}.Flux2TransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),
    ForwardPatch(f"{_FLUX2}.Flux2SingleTransformerBlock", "ada_norm", single_forward, require_plain_norms("norm")),
    ForwardPatch(f"{_FLUX2}.Flux2SwiGLU", "ada_norm", swiglu_forward, _find_swiglu_problem),
)
# The double blocks' attention is that of FLUX.1: text first, one rotation, norms for each stream.
PROCESSORS = (
    ProcessorPatch(
        f"{_FLUX2}.Flux2AttnProcessor", ATTENTION, FluxProcessor, find_attention_problem, get_extra_ops=get_qk_op
    ),
    ProcessorPatch(
        f"{_FLUX2}.Flux2ParallelSelfAttnProcessor",
        ATTENTION,
        Flux2SingleProcessor,
        _find_single_attention_problem,
        get_extra_ops=get_qk_op,
    ),
)
