"""Flux's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_flux.py (FluxTransformerBlock,
FluxSingleTransformerBlock, FluxAttnProcessor), models/normalization.py (AdaLayerNormZero, AdaLayerNormZeroSingle).

Shapes: B batch, T text tokens, I image tokens, D width, H heads.
"""

from typing import Any

import torch

from dit_lora.fuse.attention import RecomputableTensor, RotaryTables, attend, project_output
from dit_lora.fuse.models.two_streams import (
    TwoStreamProcessor,
    add_attention_and_feed_forward,
    build_recompute_kwargs,
    find_attention_problem,
    join_heads,
    norm_joint_streams,
    norm_stream_for_attention,
    require_plain_norms,
    split_recomputable,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `FluxTransformerBlock`: text (B, T, D) and image (B, I, D) after attention and feed-forward."""
    # Each stream is normed into a separate buffer, because their projections have separate weights.
    image, x, modulation = norm_stream_for_attention(block.norm1, hidden_states, temb)
    text, context, text_modulation = norm_stream_for_attention(block.norm1_context, encoder_hidden_states, temb)
    attended, attended_text, *image_prompt = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **build_recompute_kwargs(block.attn, image, text),
    )
    x = add_attention_and_feed_forward(block.norm2, block.ff, x, attended, modulation)
    # IP-adapter processors return what their image adds as a third output.
    for prompted in image_prompt:
        x = x + prompted
    context = add_attention_and_feed_forward(
        block.norm2_context, block.ff_context, context, attended_text, text_modulation
    )
    return clip_to_fp16_range(context), x


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `FluxSingleTransformerBlock`: text (B, T, D) and image (B, I, D) after attention and feed-forward."""
    # The stock block joins the streams by a copy; here the norm writes them into one buffer.
    joined = norm_joint_streams(block, encoder_hidden_states, hidden_states, temb)
    attended = block.attn(
        hidden_states=joined.normed.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **build_recompute_kwargs(block.attn, joined.normed),
    )
    context, x = joined.add_attention_and_feed_forward(block, attended)
    return clip_to_fp16_range(context), clip_to_fp16_range(x)


def clip_to_fp16_range(x: torch.Tensor) -> torch.Tensor:
    """Clip x to fp16's range if it is in fp16, as Flux's blocks do, so that it stays finite."""
    return x.clip(-65504, 65504) if x.dtype is torch.float16 else x


class FluxProcessor(TwoStreamProcessor):
    """`FluxAttnProcessor` that norms and rotates q and k of each stream in one pass. Text comes first."""

    def get_head_shape(self, attn: Any) -> tuple[int, int]:
        """Shape in which a projection is split into heads: (-1, D), where D is the width of a head."""
        # As in the stock processor: the number of heads follows from the projection's width.
        return -1, attn.head_dim

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: RotaryTables | None = None,
        recomputable: tuple[RecomputableTensor, ...] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # A layer with text projections needs separate text; without them, text is already joined to the image.
        joint = attn.added_kv_proj_dim is not None
        matching = joint is (encoder_hidden_states is not None)
        if self.should_use_stock_processor or attn.fused_projections or not matching:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        image_recomputable, text_recomputable = split_recomputable(recomputable)
        image_rows = _select_rotary_rows(image_rotary_emb, slice(text, None), hidden_states)
        heads = self.compute_image_heads(attn, hidden_states, image_rows, image_recomputable)
        # A single-stream block projects attention's output itself, together with the feed-forward's hidden values.
        if encoder_hidden_states is None:
            return attend(*heads, attention_mask, self.backend).flatten(2)
        text_rows = _select_rotary_rows(image_rotary_emb, slice(text), hidden_states)
        text_heads = self.compute_text_heads(attn, encoder_hidden_states, text_rows, text_recomputable)
        joint_heads = join_heads(text_heads, heads)
        attended = attend(*joint_heads, attention_mask, self.backend).flatten(2)
        return project_output(attn, attended[:, text:]), attn.to_add_out(attended[:, :text])


def _select_rotary_rows(rotary: RotaryTables | None, tokens: slice, like: torch.Tensor) -> RotaryTables | None:
    """Rows (., D / H) of the rotary tables for these tokens, on the device of `like`; None without tables."""
    if rotary is None:
        return None
    # The model's tables cover text and then image.
    cos, sin = (table[tokens].to(like.device) for table in rotary)
    return cos, sin


_FLUX = "diffusers.models.transformers.transformer_flux"
_FIND_BLOCK_PROBLEM = require_plain_norms("norm1.norm", "norm1_context.norm", "norm2", "norm2_context")
_FIND_SINGLE_BLOCK_PROBLEM = require_plain_norms("norm.norm")
FORWARDS = (
    ForwardPatch(f"{_FLUX}.FluxTransformerBlock", "ada_norm", block_forward, _FIND_BLOCK_PROBLEM),
    ForwardPatch(f"{_FLUX}.FluxSingleTransformerBlock", "ada_norm", single_forward, _FIND_SINGLE_BLOCK_PROBLEM),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_FLUX}.FluxAttnProcessor", ATTENTION, FluxProcessor, find_attention_problem, get_extra_ops=get_qk_op
    ),
)
