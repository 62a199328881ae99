"""Qwen-Image's blocks and attention on fused ops.

Blocks whose modulation differs from token to token keep their own forward.

Source of the arithmetic: diffusers, models/transformers/transformer_qwenimage.py (QwenImageTransformerBlock,
QwenDoubleStreamAttnProcessor2_0, apply_rotary_emb_qwen).

Shapes: B batch, T text tokens, I image tokens, D width, H heads; R tokens of a table.
"""

from typing import Any

import torch

from dit_lora.fuse.attention import RecomputableTensor, attend, project_output
from dit_lora.fuse.models.complex_rotary import get_rotary_tables
from dit_lora.fuse.models.flux import clip_to_fp16_range
from dit_lora.fuse.models.two_streams import (
    Modulation,
    TwoStreamProcessor,
    add_attention_and_feed_forward,
    build_recompute_kwargs,
    find_attention_problem,
    find_norms_problem,
    join_heads,
    norm_modulated_stream,
    split_recomputable,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_mask: torch.Tensor | None,
    temb: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `QwenImageTransformerBlock`: text (B, T, D) and image (B, I, D) after attention and feed-forward.

    `modulate_index` is always None here: `_find_block_problem` rejects the blocks that use it.
    """
    modulation = Modulation(*block.img_mod(temb).chunk(6, dim=-1))
    text_modulation = Modulation(*block.txt_mod(temb).chunk(6, dim=-1))
    image, x = norm_modulated_stream(block.img_norm1, hidden_states, modulation)
    text, context = norm_modulated_stream(block.txt_norm1, encoder_hidden_states, text_modulation)
    attended, attended_text = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **build_recompute_kwargs(block.attn, image, text),
    )
    x = add_attention_and_feed_forward(block.img_norm2, block.img_mlp, x, attended, modulation)
    context = add_attention_and_feed_forward(block.txt_norm2, block.txt_mlp, context, attended_text, text_modulation)
    return clip_to_fp16_range(context), clip_to_fp16_range(x)


class QwenImageProcessor(TwoStreamProcessor):
    """`QwenDoubleStreamAttnProcessor2_0` that norms and rotates q and k of each stream in one pass. Text is first."""

    def get_head_shape(self, attn: Any) -> tuple[int, int]:
        """Shape in which a projection is split into heads: (-1, D), where D is the width of a head."""
        # As in the stock processor: the number of heads follows from the projection's width.
        return -1, attn.inner_dim // attn.heads

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        recomputable: tuple[RecomputableTensor, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Without text, or with another kind of mask, the stock processor raises its own error.
        if self.should_use_stock_processor or encoder_hidden_states is None or attention_mask is not None:
            return self.stock(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
        image_recomputable, text_recomputable = split_recomputable(recomputable)
        # The model passes one complex table for the image and one for the text.
        rotary, text_rotary = (None, None) if image_rotary_emb is None else map(get_rotary_tables, image_rotary_emb)
        heads = self.compute_image_heads(attn, hidden_states, rotary, image_recomputable)
        text_heads = self.compute_text_heads(attn, encoder_hidden_states, text_rotary, text_recomputable)
        mask = encoder_hidden_states_mask
        if mask is not None:
            # (B, T) to text and image, (B, 1, 1, T + I). Image tokens are never masked.
            mask = torch.cat([mask, mask.new_ones(len(mask), hidden_states.shape[1])], dim=1)[:, None, None, :]
        attended = attend(*join_heads(text_heads, heads), mask, self.backend).flatten(2)
        # Text tokens come first in the joint sequence.
        count = encoder_hidden_states.shape[1]
        return project_output(attn, attended[:, count:]), attn.to_add_out(attended[:, :count])


def _find_block_problem(block: Any) -> str | None:
    if block.zero_cond_t:
        return "its modulation differs from token to token (zero_cond_t)"
    return find_norms_problem(block.img_norm1, block.img_norm2, block.txt_norm1, block.txt_norm2)


_QWEN = "diffusers.models.transformers.transformer_qwenimage"
FORWARDS = (ForwardPatch(f"{_QWEN}.QwenImageTransformerBlock", "ada_norm", block_forward, _find_block_problem),)
PROCESSORS = (
    ProcessorPatch(
        f"{_QWEN}.QwenDoubleStreamAttnProcessor2_0",
        ATTENTION,
        QwenImageProcessor,
        find_attention_problem,
        get_extra_ops=get_qk_op,
    ),
)
