"""Base of models whose image (or video) and text are streams with weights of their own, and attend together.

Source of the arithmetic: diffusers, models/normalization.py (AdaLayerNormZero), and what the blocks of Flux and SD3
have in common.

Shapes: B batch, S tokens of a stream, R of them rotated, D width, H heads.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from dit_lora.fuse.attention import NORMS, FusedProcessor, Heads, Norm, Recomputable, Rotary
from dit_lora.fuse.lora import project
from dit_lora.fuse.patches import other_norm
from dit_lora_kernels.ada_norm import Stream, ada_norm, joint_ada_norm

HEAD_NORMS: dict[type, Norm] = {nn.LayerNorm: "layer", nn.RMSNorm: "rms", RMSNorm: "rms"}


class Modulation(NamedTuple):
    """Six tables (B, D) in the order of `AdaLayerNormZero.linear`."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor
    shift_ff: torch.Tensor
    scale_ff: torch.Tensor
    gate_ff: torch.Tensor


def modulated(
    streams: Sequence[Stream], *, eps: float
) -> tuple[Recomputable, tuple[torch.Tensor, ...]]:
    """Return streams normed and modulated in one buffer (B, sum of S, D), and each x (B, S, D) to go on from."""
    # The norm's backward keeps its input: its output need not be kept for adapters, and is computed again for them.
    buffer, residuals = joint_ada_norm(streams, norm="layer", eps=eps)
    return Recomputable(buffer, partial(_buffer, streams, eps)), residuals


def _buffer(streams: Sequence[Stream], eps: float) -> torch.Tensor:
    """Return the buffer of `modulated` again, the same values bit for bit."""
    return joint_ada_norm(streams, norm="layer", eps=eps)[0]


def enter(
    norm: Any, x: torch.Tensor, temb: torch.Tensor
) -> tuple[Recomputable, torch.Tensor, Modulation]:
    """Return a stream (B, S, D) as attention takes it, x to go on from, and its modulation by temb (B, D).

    It does what `AdaLayerNormZero.forward` does.
    """
    modulation = Modulation(*norm.linear(norm.silu(temb)).chunk(6, dim=1))
    return *enter_by(norm.norm, x, modulation), modulation


def enter_by(
    norm: Any, x: torch.Tensor, modulation: Modulation
) -> tuple[Recomputable, torch.Tensor]:
    """Return a stream (B, S, D) as attention takes it, by a LayerNorm and a modulation, and x to go on from."""
    normed, (x,) = modulated((Stream(x, modulation.shift, modulation.scale),), eps=norm.eps)
    return normed, x


def leave(
    norm: Any, ff: Any, x: torch.Tensor, attended: torch.Tensor, modulation: Modulation
) -> torch.Tensor:
    """Return the stream (B, S, D) with attention's output, and its feed-forward's, added through their gates."""
    # The sum after attention is an output of the norm that reads it first; the last one has no norm to make it.
    _, _, gate, shift_ff, scale_ff, gate_ff = modulation
    normed, x = ada_norm(x, shift_ff, scale_ff, norm="layer", eps=norm.eps, y=attended, gate=gate)
    return torch.addcmul(x, gate_ff[:, None], ff(normed))


class Joined(NamedTuple):
    """Both streams of a block that norms them together, and runs feed-forward and attention side by side."""

    normed: Recomputable
    """(B, S of both, D): what attention takes."""
    streams: tuple[torch.Tensor, ...]
    """Each x (B, S, D) to go on from."""
    gate: torch.Tensor
    """(B, 1, D)."""
    inner: torch.Tensor
    """The feed-forward's hidden values, of both streams."""

    def leave(self, block: Any, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both streams with attention's output (B, S of both, D) and the feed-forward's, through the gate."""
        # One layer projects both, side by side: the stock block's weights are of this order.
        output = block.proj_out(torch.cat([attended, self.inner], dim=2))
        first, second = self.streams
        count = first.shape[1]
        return (
            torch.addcmul(first, self.gate, output[:, :count]),
            torch.addcmul(second, self.gate, output[:, count:]),
        )


def enter_joined(
    block: Any, first: torch.Tensor, second: torch.Tensor, temb: torch.Tensor
) -> Joined:
    """Take two streams (B, S, D) into a block with one `AdaLayerNormZeroSingle`, in this order."""
    shift, scale, gate = block.norm.linear(block.norm.silu(temb)).chunk(3, dim=1)
    streams = [Stream(x, shift, scale) for x in (first, second)]
    normed, residuals = modulated(streams, eps=block.norm.norm.eps)
    # An adapter on the feed-forward would keep its input too: it is the same buffer that attention's can do without.
    with normed.not_kept():
        inner = block.proj_mlp(normed.tensor)
    return Joined(normed, residuals, gate[:, None], block.act_mlp(inner))


class TwoStreamProcessor(FusedProcessor):
    """Values that processors of both streams share: q, k and v of one, ready for attention."""

    def head_shape(self, attn: Any) -> tuple[int, int]:
        """Return (H, D), with a -1 for what follows from the other."""
        return attn.heads, -1

    def image_heads(
        self,
        attn: Any,
        x: torch.Tensor,
        rotary: Rotary | None = None,
        recomputable: Recomputable | None = None,
    ) -> Heads:
        """Return q, k and v (B, S, H, D) of image or video tokens x (B, S, .)."""
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        return self._heads(attn, layers, norms, x, rotary, recomputable)

    def text_heads(
        self,
        attn: Any,
        x: torch.Tensor,
        rotary: Rotary | None = None,
        recomputable: Recomputable | None = None,
    ) -> Heads:
        """Return q, k and v (B, S, H, D) of text tokens x (B, S, .), by the layers that are the text's own."""
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        norms = (attn.norm_added_q, attn.norm_added_k)
        return self._heads(attn, layers, norms, x, rotary, recomputable)

    def _heads(
        self,
        attn: Any,
        layers: Sequence[nn.Module],
        norms: tuple[Any, Any],
        x: torch.Tensor,
        rotary: Rotary | None,
        recomputable: Recomputable | None,
    ) -> Heads:
        """Return the projections of x; q and k are normed per head, and their first R tokens rotated."""
        # What is saved inside, for adapters' gradients, is a view of the block's buffer: backward makes it again.
        with recomputable.not_kept() if recomputable is not None else nullcontext():
            projected = project(layers, x)
        query, key, value = (tensor.unflatten(-1, self.head_shape(attn)) for tensor in projected)
        return self.normed(query, norms[0], rotary), self.normed(key, norms[1], rotary), value

    def normed(self, heads: torch.Tensor, norm: Any, rotary: Rotary | None) -> torch.Tensor:
        """Return q or k (B, S, H, D) after its norm and rotation, either of which may be missing."""
        # `attention_why_not` let no layer with a norm of another class come here.
        kind = "layer" if norm is None else HEAD_NORMS[type(norm)]
        return self.normed_heads(heads, norm, rotary, kind)


def joined_heads(first: Heads, second: Heads) -> Heads:
    """Return q, k and v (B, S of both, H, D) of two streams, one after the other."""
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    return query, key, value


def spared(attn: Any, *normed: Recomputable) -> dict[str, tuple[Recomputable, ...]]:
    """Return an argument for attention with a processor of these, which then does not keep its input."""
    # A stock processor refuses arguments that it does not know: it gets none.
    takes = isinstance(attn.processor, TwoStreamProcessor)
    return {"recomputable": normed} if takes else {}


def each(recomputable: tuple[Recomputable, ...]) -> tuple[Recomputable | None, Recomputable | None]:
    """Return the image's and the text's, which are one in a joined block; None where the block runs its stock forward."""
    return (recomputable[0], recomputable[-1]) if recomputable else (None, None)


def norms_why_not(*norms: Any) -> str | None:
    """Return why these are not all LayerNorms without weights, as which the blocks' forwards take them."""
    if reason := other_norm(norms, nn.LayerNorm):
        return reason
    affine = any(norm.elementwise_affine for norm in norms)
    return "one of its norms has weights" if affine else None


def block_why_not(block: Any) -> str | None:
    """Say why a block of Flux keeps its stock forward; None if it can be fused."""
    return norms_why_not(
        block.norm1.norm, block.norm1_context.norm, block.norm2, block.norm2_context
    )


def joined_why_not(block: Any) -> str | None:
    """Return why a block that norms both streams together keeps its own forward; None if it need not."""
    return norms_why_not(block.norm.norm)


def attention_why_not(attn: Any) -> str | None:
    """Return why a norm of q or k is none that `qk_norm_rope` computes; None if they all are."""
    norms = (getattr(attn, name, None) for name in NORMS)
    return other_norm((norm for norm in norms if norm is not None), *HEAD_NORMS)
