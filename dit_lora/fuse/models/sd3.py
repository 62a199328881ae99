"""Stable Diffusion 3's blocks and attention on fused ops, including the second attention of SD 3.5.

Source of the arithmetic: diffusers, models/attention.py (JointTransformerBlock), models/attention_processor.py
(JointAttnProcessor2_0), models/normalization.py (AdaLayerNormZero, SD35AdaLayerNormZeroX, AdaLayerNormContinuous).

Shapes: B batch, I image tokens, T text tokens, D width, H heads.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import RecomputableTensor, attend, project_output
from dit_lora.fuse.models.two_streams import (
    Modulation,
    TwoStreamProcessor,
    add_attention_and_feed_forward,
    build_recompute_kwargs,
    find_attention_problem,
    find_norms_problem,
    join_heads,
    modulate,
    norm_stream_for_attention,
    split_recomputable,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op_if_normed
from dit_lora_kernels.ada_norm import AdaNormInputs


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Forward of `JointTransformerBlock`: text (B, T, D), None after the last block, and image (B, I, D)."""
    # Only the stock code supports a chunked feed-forward, which saves memory.
    if block._chunk_size is not None:
        return type(block).forward(block, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs)
    extra, norm, context_norm = joint_attention_kwargs or {}, block.norm1, block.norm1_context
    tables = norm.linear(norm.silu(temb)).chunk(9 if block.use_dual_attention else 6, dim=1)
    # The first six tables are as in every block; three more belong to the second attention.
    modulation = Modulation(*tables[:6])
    stream = AdaNormInputs(hidden_states, modulation.shift, modulation.scale)
    image, (x,) = modulate((stream,), eps=norm.norm.eps)
    if block.use_dual_attention:  # SD 3.5: the image also attends to itself, with its own tables
        shift, scale, second_gate = tables[6:]
        second, (x,) = modulate((AdaNormInputs(x, shift, scale),), eps=norm.norm.eps)
    # The last block, after which nobody reads the text: scale first, and no gate.
    if block.context_pre_only:
        emb = context_norm.linear(context_norm.silu(temb).to(encoder_hidden_states.dtype))
        scale, shift = emb.chunk(2, dim=1)
        stream = AdaNormInputs(encoder_hidden_states, shift, scale)
        text, _ = modulate((stream,), eps=context_norm.norm.eps)
    else:
        text, context, text_modulation = norm_stream_for_attention(context_norm, encoder_hidden_states, temb)
    attended, attended_text = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        **extra,
        **build_recompute_kwargs(block.attn, image, text),
    )
    if block.use_dual_attention:
        x = torch.addcmul(x, modulation.gate[:, None], attended)
        attended = block.attn2(hidden_states=second.tensor, **extra, **build_recompute_kwargs(block.attn2, second))
        modulation = modulation._replace(gate=second_gate)
    # `add_attention_and_feed_forward` adds the second attention with its own gate; the first one is already in x.
    x = add_attention_and_feed_forward(block.norm2, block.ff, x, attended, modulation)
    if block.context_pre_only:
        return None, x
    return add_attention_and_feed_forward(
        block.norm2_context, block.ff_context, context, attended_text, text_modulation
    ), x


class JointProcessor(TwoStreamProcessor):
    """`JointAttnProcessor2_0` that norms q and k in one pass. The image comes first; masks are ignored."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        recomputable: tuple[RecomputableTensor, ...] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.should_use_stock_processor:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask)
        image_recomputable, text_recomputable = split_recomputable(recomputable)
        heads = self.compute_image_heads(attn, hidden_states, recomputable=image_recomputable)
        if encoder_hidden_states is None:
            attended = attend(*heads, None, self.backend).flatten(2)
            return project_output(attn, attended)
        text_heads = self.compute_text_heads(attn, encoder_hidden_states, recomputable=text_recomputable)
        # No mask: the stock processor accepts one and ignores it.
        attended = attend(*join_heads(heads, text_heads), None, self.backend).flatten(2)
        image = hidden_states.shape[1]
        attended, text = attended[:, :image], attended[:, image:]
        # After the last block nobody reads the text, so it has no output projection.
        text = text if attn.context_pre_only else attn.to_add_out(text)
        return project_output(attn, attended), text


def _find_block_problem(block: Any) -> str | None:
    """Reason why an SD3 block keeps its stock forward; None if it can be patched.

    The last block has no second text norm.
    """
    norms = [block.norm1.norm, block.norm1_context.norm, block.norm2]
    return find_norms_problem(*norms, *([] if block.context_pre_only else [block.norm2_context]))


FORWARDS = (
    ForwardPatch("diffusers.models.attention.JointTransformerBlock", "ada_norm", block_forward, _find_block_problem),
)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.JointAttnProcessor2_0",
        ATTENTION,
        JointProcessor,
        find_attention_problem,
        get_extra_ops=get_qk_op_if_normed,
    ),
)
