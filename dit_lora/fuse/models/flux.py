"""Flux's blocks and attention on fused ops.

Source of the arithmetic: diffusers, models/transformers/transformer_flux.py (FluxTransformerBlock,
FluxSingleTransformerBlock, FluxAttnProcessor), models/normalization.py (AdaLayerNormZero, AdaLayerNormZeroSingle).

Shapes: B batch, T text tokens, I image tokens, D width, H heads.
"""

from typing import Any

import torch

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
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return text (B, T, D) and image (B, I, D) after attention and feed-forward, as `FluxTransformerBlock` does."""
    # Each stream is normed into a buffer of its own: their projections have weights of their own.
    image, x, modulation = enter(block.norm1, hidden_states, temb)
    text, context, text_modulation = enter(block.norm1_context, encoder_hidden_states, temb)
    attended, attended_text, *image_prompt = block.attn(
        hidden_states=image.tensor,
        encoder_hidden_states=text.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **spared(block.attn, image, text),
    )
    x = leave(block.norm2, block.ff, x, attended, modulation)
    for (
        prompted
    ) in image_prompt:  # IP-adapter processors return what their image adds as a third output
        x = x + prompted
    context = leave(block.norm2_context, block.ff_context, context, attended_text, text_modulation)
    return clipped(context), x


def single_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return text (B, T, D) and image (B, I, D) after attention and feed-forward, as `FluxSingleTransformerBlock` does."""
    # The stock block joins the streams by a copy; here the norm writes them into one buffer.
    joined = enter_joined(block, encoder_hidden_states, hidden_states, temb)
    attended = block.attn(
        hidden_states=joined.normed.tensor,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
        **spared(block.attn, joined.normed),
    )
    context, x = joined.leave(block, attended)
    return clipped(context), clipped(x)


def clipped(x: torch.Tensor) -> torch.Tensor:
    """Return x within fp16's range if it is in fp16, as Flux's blocks do, so that it stays finite."""
    return x.clip(-65504, 65504) if x.dtype is torch.float16 else x


class FluxProcessor(TwoStreamProcessor):
    """`FluxAttnProcessor` with q and k of each stream normed and rotated in one pass; text comes first."""

    def head_shape(self, attn: Any) -> tuple[int, int]:
        """Return (-1, D)."""
        # As the stock processor: the number of heads follows from the projection's width.
        return -1, attn.head_dim

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        recomputable: tuple[Recomputable, ...] = (),
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # A layer with projections of text needs text, and one without has it joined to the image already.
        joint = attn.added_kv_proj_dim is not None
        matching = joint is (encoder_hidden_states is not None)
        if self.is_stock or attn.fused_projections or not matching:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        of_image, of_text = each(recomputable)
        image_rows = _rows(image_rotary_emb, slice(text, None), hidden_states)
        heads = self.image_heads(attn, hidden_states, image_rows, of_image)
        # A single-stream block projects attention's output itself, together with its feed-forward's.
        if encoder_hidden_states is None:
            return attend(*heads, attention_mask, self.backend).flatten(2)
        text_rows = _rows(image_rotary_emb, slice(text), hidden_states)
        text_heads = self.text_heads(attn, encoder_hidden_states, text_rows, of_text)
        joint_heads = joined_heads(text_heads, heads)
        attended = attend(*joint_heads, attention_mask, self.backend).flatten(2)
        return project_output(attn, attended[:, text:]), attn.to_add_out(attended[:, :text])


def _rows(rotary: Rotary | None, tokens: slice, like: torch.Tensor) -> Rotary | None:
    """Return the tables' rows (., D / H) of some tokens, on the device that the tokens `like` are on."""
    if rotary is None:
        return None
    # The model's tables are of text and image together, in this order.
    cos, sin = (table[tokens].to(like.device) for table in rotary)
    return cos, sin


_FLUX = "diffusers.models.transformers.transformer_flux"
FORWARDS = (
    ForwardPatch(f"{_FLUX}.FluxTransformerBlock", "ada_norm", block_forward, block_why_not),
    ForwardPatch(f"{_FLUX}.FluxSingleTransformerBlock", "ada_norm", single_forward, joined_why_not),
)
PROCESSORS = (
    ProcessorPatch(
        f"{_FLUX}.FluxAttnProcessor", ATTENTION, FluxProcessor, attention_why_not, also=qk_always
    ),
)
