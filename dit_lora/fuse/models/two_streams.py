"""Base of models whose image (or video) and text are streams with separate weights that attend together.

Source of the arithmetic: diffusers, models/normalization.py (AdaLayerNormZero), and the common part of the blocks of
Flux and SD3.

Shapes: B batch, S tokens of a stream, R of them rotated, D width, H heads.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_lora.fuse.attention import (
    QK_NORM_NAMES,
    FusedProcessor,
    NormKind,
    QueryKeyValue,
    RecomputableTensor,
    RotaryTables,
)
from dit_lora.fuse.lora import project_linear_layers
from dit_lora.fuse.models.streams import recompute_norm
from dit_lora.fuse.patches import ProblemFinder, find_unsupported_norm
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm

HEAD_NORM_KINDS: dict[type, NormKind] = {nn.LayerNorm: "layer", nn.RMSNorm: "rms", RMSNorm: "rms"}


class Modulation(NamedTuple):
    """Modulation tables of one stream: six tensors (B, D) in the order of `AdaLayerNormZero.linear`."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor
    shift_ff: torch.Tensor
    scale_ff: torch.Tensor
    gate_ff: torch.Tensor


def modulate(streams: Sequence[AdaNormInputs], *, eps: float) -> tuple[RecomputableTensor, tuple[torch.Tensor, ...]]:
    """Norm and modulate several token streams into one buffer (B, sum of S, D).

    Also returns each x (B, S, D) to continue with.
    """
    # The norm's backward saves its input, so its output need not be saved for adapters: it is recomputed.
    buffer, residuals = joint_ada_norm(streams, norm="layer", eps=eps)
    return RecomputableTensor(
        buffer, partial(recompute_norm, joint_ada_norm, streams, norm="layer", eps=eps)
    ), residuals


def norm_stream_for_attention(
    norm: Any, x: torch.Tensor, temb: torch.Tensor
) -> tuple[RecomputableTensor, torch.Tensor, Modulation]:
    """Norm and modulate a stream (B, S, D) for attention, as `AdaLayerNormZero.forward` does with temb (B, D).

    Returns:
        The input of attention, x to continue with, and the modulation.
    """
    modulation = Modulation(*norm.linear(norm.silu(temb)).chunk(6, dim=1))
    return *norm_modulated_stream(norm.norm, x, modulation), modulation


def norm_modulated_stream(
    norm: Any, x: torch.Tensor, modulation: Modulation
) -> tuple[RecomputableTensor, torch.Tensor]:
    """Norm and modulate a stream (B, S, D) for attention with tables that are already computed.

    Also returns x to continue with.
    """
    normed, (x,) = modulate((AdaNormInputs(x, modulation.shift, modulation.scale),), eps=norm.eps)
    return normed, x


def add_attention_and_feed_forward(
    norm: Any, ff: Any, x: torch.Tensor, attention_output: torch.Tensor, modulation: Modulation
) -> torch.Tensor:
    """Add attention's output and then the feed-forward's to the stream (B, S, D), each through its gate."""
    # The norm before the feed-forward adds attention's output; no norm follows the feed-forward, hence addcmul.
    _, _, gate, shift_ff, scale_ff, gate_ff = modulation
    stream = AdaNormInputs(x, shift_ff, scale_ff, attention_output, gate)
    normed, (x,) = joint_ada_norm((stream,), norm="layer", eps=norm.eps)
    return torch.addcmul(x, gate_ff[:, None], ff(normed))


class JointStreamState(NamedTuple):
    """State of a text and an image stream in a block that norms them together.

    Such a block runs feed-forward and attention in parallel.
    """

    normed: RecomputableTensor
    """(B, S of both, D), the input of attention."""
    streams: tuple[torch.Tensor, ...]
    """Each stream x (B, S, D) to continue with."""
    gate: torch.Tensor
    """(B, 1, D)."""
    ff_hidden: torch.Tensor
    """The feed-forward's hidden values, of both streams."""

    def add_attention_and_feed_forward(
        self, block: Any, attention_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gated outputs of attention (B, S of both, D) and feed-forward to the text and image streams."""
        # One layer projects both, concatenated in the order of the stock block's weights.
        output = block.proj_out(torch.cat([attention_output, self.ff_hidden], dim=2))
        # In the order in which they were joined.
        first_stream, second_stream = self.streams
        count = first_stream.shape[1]
        return (
            torch.addcmul(first_stream, self.gate, output[:, :count]),
            torch.addcmul(second_stream, self.gate, output[:, count:]),
        )


def norm_joint_streams(
    block: Any, first_stream: torch.Tensor, second_stream: torch.Tensor, temb: torch.Tensor
) -> JointStreamState:
    """Norm two streams (B, S, D) together, in this order, for a block with one `AdaLayerNormZeroSingle`."""
    shift, scale, gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)
    streams = [AdaNormInputs(x, shift, scale) for x in (first_stream, second_stream)]
    normed, residuals = modulate(streams, eps=block.norm.norm.eps)
    # Adapters on the feed-forward need not save its input either: it is the same buffer as attention's.
    with normed.skip_saving_activation():
        inner = block.proj_mlp(normed.tensor)
    return JointStreamState(normed, residuals, gate[:, None], block.act_mlp(inner))


class TwoStreamProcessor(FusedProcessor):
    """Base class of attention processors for blocks with a text and an image stream.

    It computes q, k and v of a stream, ready for attention.
    """

    def get_head_shape(self, attn: Any) -> tuple[int, int]:
        """Shape (H, D) in which a projection is split into heads; -1 for the size that follows from the other."""
        return attn.heads, -1

    def compute_image_heads(
        self,
        attn: Any,
        x: torch.Tensor,
        rotary: RotaryTables | None = None,
        recomputable: RecomputableTensor | None = None,
    ) -> QueryKeyValue:
        """q, k and v (B, S, H, D) of image or video tokens x (B, S, .)."""
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        return self._compute_heads(attn, layers, norms, x, rotary, recomputable)

    def compute_text_heads(
        self,
        attn: Any,
        x: torch.Tensor,
        rotary: RotaryTables | None = None,
        recomputable: RecomputableTensor | None = None,
    ) -> QueryKeyValue:
        """q, k and v (B, S, H, D) of text tokens x (B, S, .), with the layers for text."""
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        norms = (attn.norm_added_q, attn.norm_added_k)
        return self._compute_heads(attn, layers, norms, x, rotary, recomputable)

    def _compute_heads(
        self,
        attn: Any,
        layers: Sequence[nn.Module],
        norms: tuple[Any, Any],
        x: torch.Tensor,
        rotary: RotaryTables | None,
        recomputable: RecomputableTensor | None,
    ) -> QueryKeyValue:
        """Project x to q, k and v. q and k are normed per head, and their first R tokens are rotated."""
        # Adapters save a view of the block's buffer for their gradients: backward recomputes it instead.
        with recomputable.skip_saving_activation() if recomputable is not None else nullcontext():
            projected = project_linear_layers(layers, x)
        # (B, S, .) to (B, S, H, D).
        query, key, value = (tensor.unflatten(-1, self.get_head_shape(attn)) for tensor in projected)
        return (self.normalize_heads(query, norms[0], rotary), self.normalize_heads(key, norms[1], rotary), value)

    def normalize_heads(self, heads: torch.Tensor, norm: Any, rotary: RotaryTables | None) -> torch.Tensor:
        """q or k (B, S, H, D) after its norm and rotation. Either may be missing."""
        # `find_attention_problem` rejected layers with norms of other classes.
        kind = "layer" if norm is None else HEAD_NORM_KINDS[type(norm)]
        return self.norm_and_rotate_heads(heads, norm, rotary, kind)


def join_heads(first_heads: QueryKeyValue, second_heads: QueryKeyValue) -> QueryKeyValue:
    """Concatenate q, k and v of two streams along the tokens: (B, S of both, H, D)."""
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(first_heads, second_heads, strict=True))
    return query, key, value


def build_recompute_kwargs(attn: Any, *norm_outputs: RecomputableTensor) -> dict[str, tuple[RecomputableTensor, ...]]:
    """Keyword argument that tells a fused processor how to recompute its normed inputs instead of saving them."""
    # A stock processor rejects unknown arguments, so it gets none.
    takes = isinstance(attn.processor, TwoStreamProcessor)
    return {"recomputable": norm_outputs} if takes else {}


def split_recomputable(
    recomputable: tuple[RecomputableTensor, ...],
) -> tuple[RecomputableTensor | None, RecomputableTensor | None]:
    """Split recomputable inputs into the image's and the text's.

    Joined streams give the same one twice; without any, both are None.
    """
    return (recomputable[0], recomputable[-1]) if recomputable else (None, None)


def find_norms_problem(*norms: Any) -> str | None:
    """Reason why a block's norms cannot be fused; None if all are LayerNorms without weights."""
    if reason := find_unsupported_norm(norms, nn.LayerNorm):
        return reason
    affine = any(norm.elementwise_affine for norm in norms)
    return "one of its norms has weights" if affine else None


def require_plain_norms(*names: str) -> ProblemFinder:
    """Create a check that applies `find_norms_problem` to a block's norms of these names, such as `norm1.norm`."""

    def find_problem(block: Any) -> str | None:
        return find_norms_problem(*(attrgetter(name)(block) for name in names))

    return find_problem


def find_attention_problem(attn: Any) -> str | None:
    """Reason why the kernel `qk_norm_rope` cannot compute a norm of q or k; None if it can compute all."""
    norms = (getattr(attn, name, None) for name in QK_NORM_NAMES)
    return find_unsupported_norm((norm for norm in norms if norm is not None), *HEAD_NORM_KINDS)
