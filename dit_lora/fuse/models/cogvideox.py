"""CogVideoX blocks on fused ops. Text and video share one buffer, which the norms write.

Source of the arithmetic: diffusers, models/transformers/cogvideox_transformer_3d.py (CogVideoXBlock),
models/normalization.py (CogVideoXLayerNormZero), models/attention_processor.py (CogVideoXAttnProcessor2_0).

Shapes: B batch, T text tokens, V video tokens, D width, H heads.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_processor import Attention

from dit_lora.fuse.attention import (
    FusedProcessor,
    RecomputableTensor,
    RotaryTables,
    attend,
    project_output,
    reshape_mask,
)
from dit_lora.fuse.lora import project_linear_layers
from dit_lora.fuse.models.streams import recompute_norm
from dit_lora.fuse.patches import ATTENTION, ForwardPatch, ProcessorPatch, get_qk_op
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm


def block_forward(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: RotaryTables | None = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of `CogVideoXBlock`: video (B, V, D) and text (B, T, D) after attention and feed-forward."""
    text = encoder_hidden_states.shape[1]
    # Both streams get their own shift, scale and gate from one projection.
    modulation = _compute_modulation(block.norm1, temb)
    streams = modulation.modulate(AdaNormInputs(encoder_hidden_states), AdaNormInputs(hidden_states))
    joint, _ = _normalize_streams(block.norm1, streams)
    extra = dict(attention_kwargs or {})
    if isinstance(block.attn1.processor, CogVideoXProcessor):
        # The norm's backward keeps its input: its output need not be kept for the adapters.
        recompute = partial(recompute_norm, _normalize_streams, block.norm1, streams)
        extra["joint_hidden_states"] = RecomputableTensor(joint, recompute)
    attended, attended_text = block.attn1(
        hidden_states=joint[:, text:],
        encoder_hidden_states=joint[:, :text],
        image_rotary_emb=image_rotary_emb,
        **extra,
    )
    gates, modulation = modulation, _compute_modulation(block.norm2, temb)
    streams = modulation.modulate(
        AdaNormInputs(encoder_hidden_states, y=attended_text, gate=gates.text_gate),
        AdaNormInputs(hidden_states, y=attended, gate=gates.gate),
    )
    # The next norm adds attention's gated outputs, and also returns the sums.
    joint, (encoder_hidden_states, hidden_states) = _normalize_streams(block.norm2, streams)
    output = block.ff(joint)
    return (
        # No norm follows the feed-forward in this block, so its gated output is added here.
        torch.addcmul(hidden_states, modulation.gate[:, None], output[:, text:]),
        torch.addcmul(encoder_hidden_states, modulation.text_gate[:, None], output[:, :text]),
    )


class _Modulation(NamedTuple):
    """Modulation tables of CogVideoX: six tensors (B, D) in the order of `CogVideoXLayerNormZero.linear`."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor
    text_shift: torch.Tensor
    text_scale: torch.Tensor
    text_gate: torch.Tensor

    def modulate(self, text: AdaNormInputs, video: AdaNormInputs) -> tuple[AdaNormInputs, AdaNormInputs]:
        """Text and video stream with their shift and scale, as operands of the fused norm."""
        return (
            text._replace(shift=self.text_shift, scale=self.text_scale),
            video._replace(shift=self.shift, scale=self.scale),
        )


def _compute_modulation(norm: Any, temb: torch.Tensor) -> _Modulation:
    """Modulation tables of a `CogVideoXLayerNormZero` for temb (B, .)."""
    return _Modulation(*norm.linear(norm.silu(temb)).chunk(6, dim=1))


def _normalize_streams(
    norm: Any, streams: tuple[AdaNormInputs, AdaNormInputs]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Norm and modulate both streams into one buffer (B, T + V, D), text first. Also returns their residuals."""
    affine = norm.norm
    return joint_ada_norm(streams, affine.weight, affine.bias, norm="layer", eps=affine.eps)


class CogVideoXProcessor(FusedProcessor):
    """`CogVideoXAttnProcessor2_0` without copies: takes the joint buffer; norms and rotates q and k in one pass."""

    @property
    def should_use_stock_processor(self) -> bool:
        """True if the stock processor must run: attention is off and there is no context parallelism.

        Under context parallelism the fused processor always runs, because the stock one would only attend to this
        rank's tokens.
        """
        # The base class returns True for any parallel configuration. `super` is not used here, because Dynamo cannot
        # trace such a property.
        return not self.fusion.is_on(ATTENTION) and self._parallel_config is None

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: RotaryTables | None = None,
        joint_hidden_states: RecomputableTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.should_use_stock_processor:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        text, projections = encoder_hidden_states.shape[1], (attn.to_q, attn.to_k, attn.to_v)
        # Our block's forward passes the buffer that both arguments are views of; the stock forward has none.
        if joint_hidden_states is None:
            joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
            projected = project_linear_layers(projections, joint)
        else:
            joint = joint_hidden_states.tensor
            with joint_hidden_states.skip_saving_activation():
                projected = project_linear_layers(projections, joint)
        # (B, T + V, D) to (B, T + V, H, D / H).
        query, key, value = (tensor.unflatten(-1, (attn.heads, -1)) for tensor in projected)
        # Text comes first and has no positions: rotation starts after it.
        query = self.norm_and_rotate_heads(query, attn.norm_q, image_rotary_emb, "layer", text)
        key = self.norm_and_rotate_heads(key, attn.norm_k, image_rotary_emb, "layer", text)
        mask = reshape_mask(attn, attention_mask, joint)
        attended = attend(query, key, value, mask, self.backend, self._parallel_config).flatten(2)
        attended = project_output(attn, attended)
        return attended[:, text:], attended[:, :text]


_COGVIDEOX = "diffusers.models.transformers.cogvideox_transformer_3d"
FORWARDS = (ForwardPatch(f"{_COGVIDEOX}.CogVideoXBlock", "ada_norm", block_forward),)
PROCESSORS = (
    ProcessorPatch(
        "diffusers.models.attention_processor.CogVideoXAttnProcessor2_0",
        ATTENTION,
        CogVideoXProcessor,
        get_extra_ops=get_qk_op,
    ),
)
