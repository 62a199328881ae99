"""HunyuanVideo's blocks and attention on fused ops; blocks that replace tokens keep their own forward.

Source of the arithmetic: diffusers, models/transformers/transformer_hunyuan_video.py (HunyuanVideoTransformerBlock,
HunyuanVideoSingleTransformerBlock, HunyuanVideoAttnProcessor2_0), models/normalization.py (AdaLayerNormZero,
AdaLayerNormZeroSingle).

Shapes: B batch, V video tokens, T text tokens, D width, H heads.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import Recomputable, Rotary, attend, project_output
from dit_lora.fuse.models.two_streams import (
    TwoStreamProcessor,
    attention_why_not,
    block_why_not,
    each,
    enter,
    enter_joined,
    joined_heads,
    joined_why_not,
    leave,
    spared,
)
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, qk_always


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    freqs_cis: Rotary | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return video (B, V, D) and text (B, T, D) after both branches, as `HunyuanVideoTransformerBlock` does."""
    # The model gives all blocks the arguments of those that replace tokens; the stock forward ignores them too.
    video, x, modulation = enter(block.norm1, hidden_states, temb)
    text, context, text_modulation = enter(block.norm1_context, encoder_hidden_states, temb)
    attended, attended_text = block.attn(
        hidden_states=video.tensor,
        encoder_hidden_states=text.tensor,
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
        **spared(block.attn, video, text),
    )
    return (
        leave(block.norm2, block.ff, x, attended, modulation),
        leave(block.norm2_context, block.ff_context, context, attended_text, text_modulation),
    )


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: Rotary | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return video (B, V, D) and text (B, T, D) after both branches, as `HunyuanVideoSingleTransformerBlock` does."""
    video = hidden_states.shape[1]
    joined = enter_joined(block, hidden_states, encoder_hidden_states, temb)
    # Two views, as the stock processor takes streams apart; the fused one takes the buffer that both are of.
    attended = block.attn(
        hidden_states=joined.normed.tensor[:, :video],
        encoder_hidden_states=joined.normed.tensor[:, video:],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
        **spared(block.attn, joined.normed),
    )
    return joined.leave(block, torch.cat(attended, dim=1))


class HunyuanVideoProcessor(TwoStreamProcessor):
    """`HunyuanVideoAttnProcessor2_0` with q and k normed and the video's rotated in one pass; text comes last."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        recomputable: tuple[Recomputable, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.is_stock or encoder_hidden_states is None:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        video = hidden_states.shape[1]
        of_video, of_text = each(recomputable)
        if attn.add_q_proj is None:  # a single-stream block's: one set of projections for both
            # Tables of the video's tokens alone: text, which comes last, is not rotated.
            if of_video is not None:
                joint = of_video.tensor
            else:
                joint = torch.cat([hidden_states, encoder_hidden_states], dim=1)
            heads = self.image_heads(attn, joint, image_rotary_emb, of_video)
        else:
            heads = joined_heads(
                self.image_heads(attn, hidden_states, image_rotary_emb, of_video),
                self.text_heads(attn, encoder_hidden_states, recomputable=of_text),
            )
        attended = attend(*heads, attention_mask, self.backend).flatten(2)
        attended, text = attended[:, :video], attended[:, video:]
        # A single-stream block projects attention's output together with the feed-forward's, by `proj_out`.
        if attn.to_out is not None:
            attended = project_output(attn, attended)
        if attn.to_add_out is not None:
            text = attn.to_add_out(text)
        return attended, text


_HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video"
FORWARDS = (
    ForwardPatch(
        f"{_HUNYUAN}.HunyuanVideoTransformerBlock", "ada_norm", block_forward, block_why_not
    ),
    ForwardPatch(
        f"{_HUNYUAN}.HunyuanVideoSingleTransformerBlock", "ada_norm", single_forward, joined_why_not
    ),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_HUNYUAN}.HunyuanVideoAttnProcessor2_0",
        ATTENTION,
        HunyuanVideoProcessor,
        attention_why_not,
        also=qk_always,
    ),
)
