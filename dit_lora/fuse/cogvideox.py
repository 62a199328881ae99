"""CogVideoX blocks on fused ops: text and video stay in one buffer, which the norms write.

Source of the arithmetic: diffusers, models/transformers/cogvideox_transformer_3d.py (CogVideoXBlock),
models/normalization.py (CogVideoXLayerNormZero), models/attention_processor.py (CogVideoXAttnProcessor2_0).

Shapes: B batch, T text tokens, V video tokens, D width, H heads.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb

from dit_lora.fuse.attention import FusedProcessor, Recomputable, attend, heads_mask
from dit_lora.fuse.core import ATTENTION, ForwardPatch, ProcessorPatch, qk_always
from dit_lora.fuse.lora import project
from dit_lora_kernels.ada_norm import Stream, joint_ada_norm
from dit_lora_kernels.qk_norm_rope import qk_norm_rope

Rotary = tuple[torch.Tensor, torch.Tensor]


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (B, V, D) and text (B, T, D) after attention and feed-forward, as `CogVideoXBlock.forward`."""
    text = encoder_hidden_states.shape[1]
    modulation = _modulation(block.norm1, temb)
    streams = modulation.on(Stream(encoder_hidden_states), Stream(hidden_states))
    joint, _ = _normed(block.norm1, streams)
    given = dict(attention_kwargs or {})
    if isinstance(block.attn1.processor, CogVideoXProcessor):
        # The norm's backward keeps its input: its output need not be kept for the adapters.
        again = partial(_joint, block.norm1, streams)
        given["joint_hidden_states"] = Recomputable(joint, again)
    attended, attended_text = block.attn1(
        hidden_states=joint[:, text:],
        encoder_hidden_states=joint[:, :text],
        image_rotary_emb=image_rotary_emb,
        **given,
    )
    gates, modulation = modulation, _modulation(block.norm2, temb)
    streams = modulation.on(
        Stream(encoder_hidden_states, y=attended_text, gate=gates.text_gate),
        Stream(hidden_states, y=attended, gate=gates.gate),
    )
    joint, (encoder_hidden_states, hidden_states) = _normed(block.norm2, streams)
    output = block.ff(joint)
    return (
        torch.addcmul(hidden_states, modulation.gate[:, None], output[:, text:]),
        torch.addcmul(encoder_hidden_states, modulation.text_gate[:, None], output[:, :text]),
    )


class _Modulation(NamedTuple):
    """Six tables (B, D) in the order of `CogVideoXLayerNormZero.linear`."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor
    text_shift: torch.Tensor
    text_scale: torch.Tensor
    text_gate: torch.Tensor

    def on(self, text: Stream, video: Stream) -> tuple[Stream, Stream]:
        return (
            text._replace(shift=self.text_shift, scale=self.text_scale),
            video._replace(shift=self.shift, scale=self.scale),
        )


def _modulation(norm: Any, temb: torch.Tensor) -> _Modulation:
    return _Modulation(*norm.linear(norm.silu(temb)).chunk(6, dim=1))


def _normed(
    norm: Any, streams: tuple[Stream, Stream]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Both streams normed and modulated in one buffer (B, T + V, D), and their residuals."""
    affine = norm.norm
    return joint_ada_norm(streams, affine.weight, affine.bias, norm="layer", eps=affine.eps)


def _joint(norm: Any, streams: tuple[Stream, Stream]) -> torch.Tensor:
    return _normed(norm, streams)[0]


class CogVideoXProcessor(FusedProcessor):
    """`CogVideoXAttnProcessor2_0` without copies: the joint buffer in, q and k normed and rotated in one pass."""

    @property
    def is_stock(self) -> bool:
        """Never under context parallelism: the stock processor attends to this rank's tokens alone."""
        return super().is_stock and self._parallel_config is None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        joint_hidden_states: Recomputable | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_stock:
            return self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        text, projections = encoder_hidden_states.shape[1], (attn.to_q, attn.to_k, attn.to_v)
        if joint_hidden_states is None:
            joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
            projected = project(projections, joint)
        else:
            joint = joint_hidden_states.tensor
            with joint_hidden_states.not_kept():
                projected = project(projections, joint)
        query, key, value = (tensor.unflatten(-1, (attn.heads, -1)) for tensor in projected)
        query = self._normed(query, attn.norm_q, image_rotary_emb, text)
        key = self._normed(key, attn.norm_k, image_rotary_emb, text)
        mask = heads_mask(attn, attention_mask, joint)
        attended = attend(query, key, value, mask, self.backend, self._parallel_config).flatten(2)
        attended = attn.to_out[1](attn.to_out[0](attended))
        return attended[:, text:], attended[:, :text]

    def _normed(
        self, heads: torch.Tensor, norm: Any, rotary: Rotary | None, text: int
    ) -> torch.Tensor:
        """q or k (B, T + V, H, D): normed per head, the video's rotated."""
        if norm is None and rotary is None:
            return heads
        if self.fusion.is_on("qk_norm_rope"):
            cos, sin = rotary if rotary is not None else (None, None)
            weight, bias = (norm.weight, norm.bias) if norm is not None else (None, None)
            return qk_norm_rope(
                heads,
                weight,
                bias,
                cos,
                sin,
                norm="layer" if norm is not None else "none",
                eps=norm.eps if norm is not None else 0.0,
                first=text,
                from_output=self.from_output,
            )
        if norm is not None:
            heads = norm(heads)
        if rotary is None:
            return heads
        rotate: Any = apply_rotary_emb  # its annotations are of complex tables
        rotated = rotate(heads[:, text:], rotary, sequence_dim=1)
        return torch.cat([heads[:, :text], rotated], dim=1)


FORWARDS = (
    ForwardPatch(
        "diffusers.models.transformers.cogvideox_transformer_3d.CogVideoXBlock",
        "ada_norm",
        block_forward,
    ),
)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.CogVideoXAttnProcessor2_0",
        ATTENTION,
        CogVideoXProcessor,
        also=qk_always,
    ),
)
